"""The configuration of the extension: one typed record, from which flags, validation and docs are derived.

A field's `Meta` is the single source of its help text and its bounds; `flags.py` turns the record into
command-line options, `json_schema` into a schema for configuration files.
"""

from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from sglang_spec_ext.errors import SpecExtError

Mode = Literal["off", "shadow", "adaptive"]
Verify = Literal["uniform", "ragged"]
PdTransport = Literal["aux", "sidecar", "off"]
PdMismatch = Literal["degrade", "refuse"]

# Runtime control, over SGLang's internal-state routes
STATE_KEY = "spec_ext"  # in each internal state of /server_info
UPDATE_PREFIX = "spec_ext_"  # of the keys in an update
MODES: tuple[str, ...] = get_args(Mode)  # an update carries numbers, so a mode is sent as its place here


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
    tiers: Annotated[
        str,
        Meta(
            description="Numbers of draft tokens K to choose from, as '0,1,3,7'; 0 is plain decoding. The largest "
            "one the draft makes is always among them. auto: a ladder up to it.",
            pattern=r"^(auto|\d+(,\d+)*)$",
        ),
    ] = "auto"
    ladder: Annotated[
        str,
        Meta(
            description="none, or a JSON file that bounds K by batch size: vLLM's "
            "num_speculative_tokens_per_batch_size, or SGLang's --speculative-adaptive-config.",
            min_length=1,
        ),
    ] = "none"
    verify: Annotated[
        Verify,
        Meta(
            description="uniform: one K for the whole batch; ragged: a budget of tokens, shared out among requests "
            "by confidence (DSPARK with a confidence head; DFLASH and EAGLE on the CPU platform, by margins)."
        ),
    ] = "uniform"
    min_gain: Annotated[
        float, Meta(description="Predicted gain that a switch of K must exceed.", ge=0.0, lt=1.0)
    ] = 0.04
    dwell_steps: Annotated[int, Meta(description="Steps between two switches of K.", ge=1, le=4096)] = 16
    probe_max_fraction: Annotated[
        float, Meta(description="Largest share of steps that may probe another K.", ge=0.0, le=0.5)
    ] = 0.01
    profile: Annotated[
        str,
        Meta(
            description="auto: measure the cost of a step at start and keep it for the next start; off: measure "
            "nothing, so that the fixed width runs; else a cost table file to use.",
            min_length=1,
        ),
    ] = "auto"
    profile_context: Annotated[
        int, Meta(description="Tokens of context at which the profile is measured.", ge=1, le=1048576)
    ] = 256
    pd_transport: Annotated[
        PdTransport,
        Meta(
            description="How draft records travel from a prefill to a decode server. aux: with SGLang's own metadata; "
            "sidecar: over ZeroMQ; off: not at all."
        ),
    ] = "aux"
    pd_mismatch: Annotated[
        PdMismatch,
        Meta(
            description="A prefill server that runs another draft or layout. degrade: its requests start without "
            "records; refuse: they fail at once."
        ),
    ] = "degrade"
    pd_key_file: Annotated[
        str,
        Meta(
            description="none, or a file of mode 0600 with the key that signs sidecar messages, equal on all servers.",
            min_length=1,
        ),
    ] = "none"

    def __post_init__(self) -> None:
        if self.pd_key_file != "none" and self.pd_transport == "aux":
            raise ValueError(
                f"pd_key_file {self.pd_key_file} signs sidecar messages, and pd_transport is aux; "
                "use sidecar, or leave the key out"
            )

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
    source = f"--spec-ext-config {path}"
    try:
        values: dict[str, Any] = msgspec.json.decode(Path(path).read_bytes())
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read ({error.strerror}); give a JSON file") from error
    except msgspec.DecodeError as error:
        raise ConfigError(f"{source}: {error}; give a JSON object") from error
    from_values(values, source=source)
    return values


def field_names() -> tuple[str, ...]:
    """Return the field names in the order in which they are documented."""
    return tuple(SpecExtConfig.__struct_fields__)


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of a configuration file."""
    return msgspec.json.schema(SpecExtConfig)
