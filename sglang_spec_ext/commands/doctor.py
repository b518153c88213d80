"""`spec-ext doctor`: what this machine, this environment and the installed SGLang allow."""

import argparse
import json
import sys

from sglang_spec_ext import doctor


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help='print {"ok", "checks": [{"name", "ok", "detail"}]}')


def run(args: argparse.Namespace) -> int:
    """Run every check; 0 when all passed, 1 otherwise."""
    checks = doctor.run_checks()
    good = all(check.ok for check in checks)
    if args.json:
        rows = [{"name": check.name, "ok": check.ok, "detail": check.detail} for check in checks]
        print(json.dumps({"ok": good, "checks": rows}))
        return 0 if good else 1
    from rich.console import Console
    from rich.table import Table

    table = Table("", "check", "detail", box=None)
    for check in checks:
        table.add_row("[green]ok[/]" if check.ok else "[red]FAIL[/]", check.name, check.detail)
    Console(file=sys.stdout).print(table)
    return 0 if good else 1
