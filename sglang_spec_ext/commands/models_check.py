"""`spec-ext models check FOLDER`: is this draft whole, and does it fit its target?"""

import argparse
import dataclasses
import json
import pathlib

from sglang_spec_ext.models.check import DraftReport, report_draft


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=pathlib.Path, help="the draft's folder")
    parser.add_argument(
        "--target", type=pathlib.Path, help="the target's folder: also check that the two fit"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print what the folder holds and every problem; 0 for a good folder, 1 otherwise."""
    report = report_draft(args.folder, args.target)
    if args.json:
        print(json.dumps(dataclasses.asdict(report) | {"ok": not report.problems}))
    else:
        _show(report)
    return 1 if report.problems else 0


def _show(report: DraftReport) -> None:
    taps = (
        "SGLang's default" if report.tap_layers is None else ", ".join(map(str, report.tap_layers)) or "none"
    )
    facts = {
        "architecture": f"{report.architecture} ({report.algorithm or 'not a known draft'})",
        "parameters": f"{report.num_parameters / 1e6:.2f} M, {report.num_bytes / 1e6:.2f} MB",
        "tap layers": taps,
        "mask token id": report.mask_token_id,
        "block size": report.block_size,
        "draft vocabulary": report.draft_vocab_size,
    }
    print(report.folder)
    for name, value in facts.items():
        if value is not None:
            print(f"  {name:17s} {value}")
    for problem in report.problems:
        print(f"  problem: {problem}")
    print(f"  {len(report.problems)} problem(s)" if report.problems else "  good")
