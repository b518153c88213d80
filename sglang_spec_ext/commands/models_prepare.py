"""`spec-ext models prepare`: the checkpoints of the demo and the tests, each made once per machine."""

import argparse
import json
import sys

from sglang_spec_ext.cli import UsageError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("names", nargs="*", help="only these: smollm2, tiny, or the name of one checkpoint")
    parser.add_argument("--json", action="store_true", help="print one JSON object: name -> folder")


def run(args: argparse.Namespace) -> int:
    """Prepare what is wanted and print where it is."""
    return _prepare(args.names, as_json=args.json)


def _prepare(names: list[str], *, as_json: bool) -> int:
    from rich.console import Console
    from rich.progress import Progress

    from sglang_spec_ext.models import prepare

    known = prepare.models()
    for name in names:
        if not any(name in (model.name, model.group) for model in known):
            choices = ", ".join(["tiny", *(model.name for model in known)])
            raise UsageError(f"models prepare: there is no checkpoint {name!r}; choose from {choices}")
    wanted = [m for m in known if not names or m.name in names or m.group in names]
    console = Console(file=sys.stderr)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("preparing checkpoints", total=len(wanted))
        for model, reason in prepare.prepare(wanted):
            if reason is not None:
                progress.console.print(f"built {model.name} ({reason})")
            progress.advance(task)
    if as_json:
        print(json.dumps({model.name: str(model.folder) for model in wanted}))
    else:
        for model in wanted:
            print(f"{model.name:24s} {model.folder}")
    return 0
