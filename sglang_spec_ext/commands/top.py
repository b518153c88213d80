"""`spec-ext top URL`: a live view of what a server's controller sees, chooses and gains."""

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sglang_spec_ext.cli import UsageError
from sglang_spec_ext.runtime import ControlError, SpecExt


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("url", help="address of the server, as http://127.0.0.1:30000")
    parser.add_argument("--api-key", default=os.environ.get("SGLANG_API_KEY"), help="the server's key")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="between two looks")
    parser.add_argument("--once", action="store_true", help="print one view and end")
    parser.add_argument("--json", action="store_true", help="print the state as one JSON object and end")


def run(args: argparse.Namespace) -> int:
    """Show the state until interrupted."""
    if "://" not in args.url:
        raise UsageError(f"url: needs a scheme, got {args.url!r}; give http://{args.url}")
    if not args.interval > 0:
        raise UsageError(f"--interval: must be > 0 seconds, got {args.interval}")
    server = SpecExt(args.url, api_key=args.api_key)
    try:
        if args.json:
            print(json.dumps(server.state()))
            return 0
        console = Console()
        if args.once or not console.is_terminal:
            console.print(view(server.state()))
            return 0
        with Live(view(server.state()), console=console, auto_refresh=False) as live:
            while True:
                time.sleep(args.interval)
                live.update(view(server.state()), refresh=True)
    except ControlError as error:
        print(f"spec-ext top: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0


def view(state: Mapping[str, Any]) -> Group:
    """Return one frame."""
    head = Text.assemble(
        (f"{state['worker']}  ", "bold"),
        f"mode {state['mode']}, verify {state['verify']}, "
        f"K {state['k']} of {state['tiers']}, {state['decisions']} decisions",
        "" if state["pinned"] is None else f", pinned to {state['pinned']}",
    )
    notes = [Text(f"! {reason}", style="yellow") for reason in state["inactive"]]
    return Group(head, *notes, _rates(state), _choices(state), _acceptance(state))


def _rates(state: Mapping[str, Any]) -> Table:
    ledger, cost = state["ledger"], state["cost"]
    table = Table("tokens/s", "", title="rate", title_justify="left")
    table.add_row("predicted for what was chosen", _number(ledger["chosen_tok_s"]))
    table.add_row("measured", _number(ledger["measured_tok_s"]))
    best = ledger["best_fixed_k"]
    table.add_row(f"predicted for the best fixed K ({best})", _number(ledger["best_fixed_tok_s"]))
    table.add_row("regret", _number(ledger["regret_tok_s"]))
    table.add_row("draft tokens wasted", _share(ledger["wasted_draft_share"]))
    table.add_row("steps that probed", _share(state["probe_steps"] / max(1, state["decisions"])))
    if cost is not None:
        table.add_row("reality over table (target pass)", f"{cost['verify_ratio']:.2f}")
        table.add_row("noise of a step", _share(cost["noise"]))
    return table


def _choices(state: Mapping[str, Any]) -> Table:
    table = Table("reason", "steps", title="decisions", title_justify="left")
    for reason, count in sorted(state["reasons"].items(), key=lambda item: -item[1]):
        table.add_row(reason, str(count))
    table.add_row("switches of K", str(sum(state["moves"].values())))
    return table


def _acceptance(state: Mapping[str, Any]) -> Table:
    found = state["acceptance"]
    title = f"acceptance by position ({found['samples']} samples, {found['dropped']} dropped)"
    table = Table("requests", *(str(j + 1) for j in range(max(state["tiers"]))), title=title, title_justify="left")
    for name, numbers in found["classes"].items():
        if any(weight >= 1.0 for weight in numbers["weights"]):
            table.add_row(name, *(f"{rate:.2f}" for rate in numbers["rates"]))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{100.0 * value:.1f} %"
