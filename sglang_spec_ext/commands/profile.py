"""`spec-ext profile -- SERVER ARGUMENTS`: measure what a step costs, keep the table, serve nothing.

The server is started as it would be, in shadow mode; its profile is kept for the next real start.
"""

import argparse
import json
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from sglang_spec_ext.cli import UsageError
from sglang_spec_ext.runtime import SpecExt
from sglang_spec_ext.testing import ServerFailed, running_server


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print the table as one JSON object")
    parser.add_argument("server", nargs=argparse.REMAINDER, metavar="-- SERVER ARGUMENTS",
                        help="arguments of sglang.launch_server, with the draft")  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Start the server, take its table, end it."""
    arguments = args.server[1:] if args.server[:1] == ["--"] else args.server
    if "--speculative-algorithm" not in arguments:
        raise UsageError(
            "server arguments: need --speculative-algorithm and its draft, got "
            f"{' '.join(arguments) or 'none'}; give them after --"
        )
    if not any(argument.startswith("--spec-ext-mode") for argument in arguments):
        arguments += ["--spec-ext-mode", "shadow"]
    try:
        with running_server(arguments) as server:
            state = SpecExt(server.url).state()
    except ServerFailed as error:
        print(f"spec-ext profile: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps({"profile": state["profile"], "cost_table": state["cost_table"]}))
    else:
        _show(state)
    return 0 if state["cost_table"] is not None else 1


def _show(state: dict[str, Any]) -> None:
    console = Console()
    console.print(f"profile {state['profile']}")
    if state["cost_table"] is None:
        return
    for bucket in state["cost_table"]["buckets"]:
        table = Table("tokens in the pass", "ms", title=f"target pass at {bucket['context_len']} tokens of context")
        for tokens, seconds in zip(bucket["tokens"]["points"], bucket["tokens"]["seconds"], strict=True):
            table.add_row(str(tokens), f"{1000.0 * seconds:.2f}")
        console.print(table)
        draft = Table("K", "batch", "ms", title="drafting")
        for curve in bucket["draft"]:
            for batch, seconds in zip(curve["points"], curve["seconds"], strict=True):
                draft.add_row(str(curve["k"]), str(batch), f"{1000.0 * seconds:.2f}")
        console.print(draft)
