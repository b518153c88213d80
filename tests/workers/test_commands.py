"""`spec-ext top` and `spec-ext profile`: wrong use is named before anything is started."""

import argparse

import pytest

from sglang_spec_ext.cli import UsageError
from sglang_spec_ext.commands import profile, top


def parse(command, *argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.configure(parser)
    return parser.parse_args(argv)


@pytest.mark.parametrize(
    ("command", "argv", "rule"),
    [
        (top, ("localhost:30000",), "needs a scheme"),
        (top, ("http://localhost", "--interval", "0"), "must be > 0"),
        (profile, (), "need --speculative-algorithm"),
        (profile, ("--", "--model-path", "m"), "need --speculative-algorithm"),
    ],
)
def test_wrong_use_is_named(command, argv, rule) -> None:
    with pytest.raises(UsageError, match=rule):
        command.run(parse(command, *argv))


def test_top_without_a_server_ends_with_status_1(capsys) -> None:
    assert top.run(parse(top, "http://127.0.0.1:9", "--once")) == 1
    assert "cannot be reached" in capsys.readouterr().err
