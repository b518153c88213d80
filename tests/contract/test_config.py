"""Flags and configuration files: one table, strict, and every error names the field."""

import argparse
import json
import os
from pathlib import Path

import pytest

from sglang_spec_ext import config, flags
from sglang_spec_ext.config import ConfigError, SpecExtConfig


def parse(*argv: str) -> tuple[SpecExtConfig | None, argparse.Namespace]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path")
    flags.add_arguments(parser)
    namespace = parser.parse_args(argv)
    return flags.take(namespace), namespace


def test_no_flag_means_no_configuration_and_an_untouched_namespace() -> None:
    chosen, namespace = parse("--model-path", "m")
    assert chosen is None
    assert vars(namespace) == {"model_path": "m"}


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"mode": "shadow"}))
    assert parse("--spec-ext-config", str(path))[0] == SpecExtConfig(mode="shadow")
    assert parse("--spec-ext-config", str(path), "--spec-ext-mode", "adaptive")[0] == SpecExtConfig(mode="adaptive")


@pytest.mark.parametrize(
    ("content", "names"),
    [
        ('{"mood": "shadow"}', "mood"),
        ('{"mode": "sometimes"}', "$.mode"),
        ('{"mode": ', "--spec-ext-config"),
        ("[]", "object"),
        ('{"pd_key_file": "k"}', "use sidecar"),
        ('{"pd_transport": "carrier-pigeon"}', "$.pd_transport"),
    ],
)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, content: str, names: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"spec\.json") as caught:
        parse("--spec-ext-config", str(path))
    assert names in str(caught.value)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.json.*cannot be read"):
        parse("--spec-ext-config", str(tmp_path / "absent.json"))


def test_an_unknown_value_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("--spec-ext-mode", "sometimes")
    assert caught.value.code == 2
    assert "--spec-ext-mode" in capsys.readouterr().err


def test_every_field_has_a_flag_a_default_and_a_description() -> None:
    for name, _, meta, default in flags.described_fields():
        assert meta.description
        assert default is not None, name
    assert set(config.json_schema()["$defs"]["SpecExtConfig"]["properties"]) == set(config.field_names())


def test_exported_restores_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flags.ENVIRONMENT, SpecExtConfig(mode="shadow").to_json())
    with flags.exported(SpecExtConfig(mode="adaptive")):
        assert flags.active_config() == SpecExtConfig(mode="adaptive")
    assert flags.active_config() == SpecExtConfig(mode="shadow")
    with flags.exported(None):
        assert flags.ENVIRONMENT not in os.environ
        assert flags.active_config() is None


def test_mode_off_is_inactive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(flags.ENVIRONMENT, SpecExtConfig().to_json())
    assert flags.active_config() is None
