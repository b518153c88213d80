"""`spec-ext`: one table of subcommands, each imported only when it is called.

Exit status: 0 good, 1 a check failed, 2 wrong use. With `--json` a command prints one JSON object on
standard output and nothing else; progress and warnings go to standard error.
"""

import argparse
import importlib
import sys
from collections.abc import Sequence

# name -> (module with configure(parser) and run(args) -> int, one line of help)
COMMANDS = {
    "bench": ("sglang_spec_ext.commands.bench", "check and time the kernels and the engine"),
    "demo": ("sglang_spec_ext.commands.demo", "ask a real server, without and with speculation"),
    "demo-pd": ("sglang_spec_ext.commands.demo_pd", "the same with prefill and decode on separate servers"),
    "doctor": ("sglang_spec_ext.commands.doctor", "check this machine, the installed SGLang and every hook"),
    "models": ("sglang_spec_ext.commands.models", "prepare, check and train checkpoints"),
    "profile": ("sglang_spec_ext.commands.profile", "measure the cost table of a server without serving"),
    "simulate": ("sglang_spec_ext.commands.simulate", "evaluate draft-length policies without an engine"),
    "top": ("sglang_spec_ext.commands.top", "watch a running server's controller"),
}


class UsageError(Exception):
    """Wrong use of a command: the message names the argument, the rule, the value and the cure."""


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser; only the named command's module is imported (all of them for None)."""
    parser = argparse.ArgumentParser(prog="spec-ext", description="Speculative decoding for SGLang, by load.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (module, summary) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=summary, description=summary)
        if command in (None, name):
            importlib.import_module(module).configure(sub)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return the exit status of the process."""
    argv = sys.argv[1:] if argv is None else list(argv)
    named = argv[0] if argv and argv[0] in COMMANDS else ""
    args = build_parser(named).parse_args(argv)
    try:
        return int(importlib.import_module(COMMANDS[args.command][0]).run(args))
    except UsageError as error:
        print(f"spec-ext {args.command}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    # `python -m` runs this file under another name; the UsageError that commands raise is the imported one's
    sys.exit(importlib.import_module("sglang_spec_ext.cli").main())
