"""`spec-ext models`: one table of actions, each imported only when it is called."""

import argparse
import importlib
import sys

from sglang_spec_ext.errors import SpecExtError

# name -> (module with configure(parser) and run(args) -> int, one line of help)
ACTIONS = {
    "prepare": (
        "sglang_spec_ext.commands.models_prepare",
        "make the demo target and the tiny test checkpoints, once",
    ),
    "check": ("sglang_spec_ext.commands.models_check", "check a draft folder, alone and against its target"),
    "train": ("sglang_spec_ext.commands.models_train", "make training text and train a draft"),
    "calibrate": ("sglang_spec_ext.commands.models_calibrate", "fit the confidence temperatures of a DSpark draft"),
    "evaluate": ("sglang_spec_ext.commands.models_evaluate", "measure accept lengths on the real engine"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the sub-subcommands."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, (module, summary) in ACTIONS.items():
        importlib.import_module(module).configure(actions.add_parser(name, help=summary, description=summary))


def run(args: argparse.Namespace) -> int:
    """Carry out the action; 1 with the message alone when it cannot go on."""
    try:
        return int(importlib.import_module(ACTIONS[args.action][0]).run(args))
    except SpecExtError as error:
        print(f"spec-ext models {args.action}: {error}", file=sys.stderr)
        return 1
