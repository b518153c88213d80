"""The configuration of the extension: one typed record, from which flags, validation and docs are derived.

A field's `Meta` is the single source of its help text and its bounds; `flags.py` turns the record into
command-line options, `json_schema` into a schema for configuration files.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang_spec_ext.errors import SpecExtError

Mode = Literal["off", "shadow", "adaptive"]


class ConfigError(SpecExtError):
    """A value that cannot be used: the message names the field, the rule, the value and the cure."""


class SpecExtConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What the user asked for; made once in the launching process and carried to every child."""

    mode: Annotated[
        Mode,
        Meta(
            description="off: SGLang runs untouched; shadow: decide and report, change nothing; "
            "adaptive: decide and act."
        ),
    ] = "off"

    def to_json(self) -> str:
        """Return the record as one JSON object, as carried in the environment."""
        return msgspec.json.encode(self).decode()


def from_json(text: str, *, source: str) -> SpecExtConfig:
    """Decode and validate a JSON object; `source` names it in the error."""
    try:
        return msgspec.json.decode(text, type=SpecExtConfig)
    except msgspec.DecodeError as error:  # ValidationError is one too
        raise ConfigError(f"{source}: {error}; known fields: {', '.join(field_names())}") from error


def from_values(values: dict[str, Any], *, source: str) -> SpecExtConfig:
    """Validate a plain dict of field values."""
    try:
        return msgspec.convert(values, type=SpecExtConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}; known fields: {', '.join(field_names())}") from error


def read_file(path: str | Path) -> dict[str, Any]:
    """Read and validate a JSON configuration file; return the fields that it sets."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--spec-ext-config {path}: cannot be read ({error.strerror}); give a JSON file") from error
    from_json(text, source=f"--spec-ext-config {path}")
    values: dict[str, Any] = msgspec.json.decode(text)
    return values


def field_names() -> tuple[str, ...]:
    """Return the field names in the order in which they are documented."""
    return tuple(SpecExtConfig.__struct_fields__)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file."""
    return msgspec.json.schema(SpecExtConfig)
