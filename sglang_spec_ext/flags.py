"""Command-line flags and the one environment variable that carries them to child processes.

The only module that reads or writes `SGLANG_SPEC_EXT`. Flags are derived from `SpecExtConfig`.
"""

import argparse
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args, get_origin, get_type_hints

from msgspec import NODEFAULT, Meta
from msgspec.structs import fields

from sglang_spec_ext import config as config_module
from sglang_spec_ext.config import ConfigError, SpecExtConfig

PREFIX = "--spec-ext-"
ENVIRONMENT = "SGLANG_SPEC_EXT"
_DESTINATION = "spec_ext_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each field of `SpecExtConfig`, and `--spec-ext-config`."""
    group = parser.add_argument_group("spec-ext", "load-aware speculative decoding (sglang-spec-ext)")
    group.add_argument(
        f"{PREFIX}config", metavar="FILE", default=None, help="JSON file with any of these settings; flags win."
    )
    for name, kind, meta, default in described_fields():
        restriction = {"choices": get_args(kind)} if get_origin(kind) is not None else {"type": kind}
        group.add_argument(
            PREFIX + name.replace("_", "-"),
            dest=_DESTINATION + name,
            default=None,
            help=f"{meta.description} [default: {default}]",
            **restriction,
        )


def take(namespace: argparse.Namespace) -> SpecExtConfig | None:
    """Remove our values from a parsed namespace and return the configuration; None when no flag was given."""
    given = {
        name: value
        for name in config_module.field_names()
        if (value := namespace.__dict__.pop(_DESTINATION + name, None)) is not None
    }
    path = namespace.__dict__.pop(_DESTINATION + "config", None)
    if path is None and not given:
        return None
    values = config_module.read_file(path) if path is not None else {}
    return config_module.from_values({**values, **given}, source="command line")


def described_fields() -> list[tuple[str, Any, Meta, Any]]:
    """Return (name, type, Meta, default) of each field, in order."""
    hints = get_type_hints(SpecExtConfig, include_extras=True)
    rows = []
    for item in fields(SpecExtConfig):
        kind, *extras = get_args(hints[item.name])
        meta = next(extra for extra in extras if isinstance(extra, Meta))
        rows.append((item.name, kind, meta, None if item.default is NODEFAULT else item.default))
    return rows


def markdown_table() -> str:
    """Return the flags as a Markdown table, as it stands in the README."""
    rows = ["| flag | values | default | meaning |", "|---|---|---|---|"]
    rows.append(f"| `{PREFIX}config` | FILE | none | JSON file with any of these settings; flags win. |")
    for name, kind, meta, default in described_fields():
        values = ", ".join(get_args(kind)) if get_origin(kind) is not None else kind.__name__
        rows.append(f"| `{PREFIX}{name.replace('_', '-')}` | {values} | {default} | {meta.description} |")
    return "\n".join(rows)


def active_config() -> SpecExtConfig | None:
    """Return what this process was started with; None when the extension was not asked for or is off."""
    text = os.environ.get(ENVIRONMENT)
    if not text:
        return None
    found = config_module.from_json(text, source=f"environment variable {ENVIRONMENT}")
    return None if found.mode == "off" else found


def export(chosen: SpecExtConfig | None) -> None:
    """Hand the configuration to every process started from here on."""
    if chosen is None:
        os.environ.pop(ENVIRONMENT, None)
    else:
        os.environ[ENVIRONMENT] = chosen.to_json()


@contextmanager
def exported(chosen: SpecExtConfig | None) -> Iterator[None]:
    """Export for the duration of a block, then restore what was there."""
    before = os.environ.get(ENVIRONMENT)
    export(chosen)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(ENVIRONMENT, None)
        else:
            os.environ[ENVIRONMENT] = before


__all__ = ["ENVIRONMENT", "PREFIX", "ConfigError", "active_config", "add_arguments", "export", "exported", "take"]
