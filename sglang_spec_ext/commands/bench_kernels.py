"""`spec-ext bench kernels`: check every kernel against its twin, then time it beside its peers.

No speed-up is ever printed for an implementation whose result differs from the twin's, and a wrong kernel of
ours makes the exit status 1. A dry run does all but the timing, on a CPU, in Triton's interpreter.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_spec_ext.cli import UsageError

# Inputs rotate so that a call does not find its data in the cache: more bytes than the largest L2 (50 to 126
# MB).
_ROTATE_BYTES = 300_000_000
_MAX_ROTATIONS = 12
_NOT_COMPARED = "no field in common with the twin"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--dry-run", action="store_true", help="check only, small sizes, no GPU needed")
    parser.add_argument("--op", action="append", metavar="NAME", help="only this op (repeatable)")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="also write kernels.json and kernels.md there"
    )
    parser.add_argument(
        "--seconds", type=float, default=330.0, help="start no new case after this long (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Check, time, report."""
    if args.dry_run:
        if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
            raise UsageError("bench kernels: --dry-run must be the first to import triton in its process")
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from sglang_spec_ext.commands import bench_cases

    if not args.dry_run and not torch.cuda.is_available():
        raise UsageError("bench kernels: there is no CUDA device here; --dry-run checks the kernels on a CPU")
    started = time.monotonic()
    cases = list(bench_cases.all_cases("cpu" if args.dry_run else "cuda", dry_run=args.dry_run))
    names = sorted({case.op for case in cases})
    for name in args.op or []:
        if name not in names:
            raise UsageError(f"bench kernels: there is no op {name!r}; choose from {', '.join(names)}")
    copy_rate = None
    if not args.dry_run:
        from sglang_spec_ext.commands.bench_timing import copy_bytes_per_second

        copy_rate = copy_bytes_per_second()
    rows, skipped = [], []
    for case in cases:
        if args.op and case.op not in args.op:
            continue
        if time.monotonic() - started > args.seconds:
            skipped.append(
                {"op": case.op, "sizes": case.sizes, "reason": f"--seconds {args.seconds:g} were over"}
            )
            continue
        rows.append(measure(case, copy_rate))
        print(_progress(rows[-1]), file=sys.stderr)
    report = {
        "dry_run": args.dry_run,
        "environment": _environment(copy_rate),
        "ok": all(row["correct"] for row in rows),
        "rows": rows,
        "skipped": skipped,
    }
    text = markdown(report)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")
        (args.out / "kernels.md").write_text(text)
    print(json.dumps(report) if args.json else text)
    return 0 if report["ok"] else 1


def measure(case: Any, copy_rate: float | None) -> dict[str, Any]:
    """Return one row of the report; `copy_rate` None means a dry run: nothing is timed."""
    import torch

    implementations = dict(case.implementations)
    if case.compiled and copy_rate is not None:
        twin = implementations["twin"]
        compiled = torch.compile(lambda inputs: twin(inputs)())
        implementations["compiled twin"] = lambda inputs: lambda: compiled(inputs)
    inputs = [case.make(0)]
    truth = _snapshot(implementations["twin"](inputs[0])())
    checks = {
        name: _disagreement(truth, implementation, inputs[0], case.slack or {})
        for name, implementation in implementations.items()
    }
    row: dict[str, Any] = {
        "op": case.op,
        "sizes": case.sizes,
        "correct": checks["ours"] is None,
        "checks": checks,
        "bytes_moved": case.bytes_moved,
        "floor_s": None,
        "seconds": {},
        "launch": {},
        "speedups": None,
        "bandwidth_fraction": None,
    }
    if copy_rate is None or not row["correct"]:
        return row
    from sglang_spec_ext.commands.bench_timing import median_seconds

    rotations = max(2, min(_MAX_ROTATIONS, _ROTATE_BYTES // _input_bytes(inputs[0])))
    inputs += [case.make(seed) for seed in range(1, rotations)]
    for name, implementation in implementations.items():
        if checks[name] is None:
            calls = [implementation(one) for one in inputs]
            row["seconds"][name], row["launch"][name] = median_seconds(calls)
    ours = row["seconds"]["ours"]
    row["floor_s"] = case.bytes_moved / copy_rate
    row["bandwidth_fraction"] = row["floor_s"] / ours
    row["speedups"] = {name: seconds / ours for name, seconds in row["seconds"].items() if name != "ours"}
    return row


def _snapshot(outputs: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor.clone() for name, tensor in outputs.items()}


def _disagreement(
    truth: dict[str, Any], implementation: Callable[..., Any], inputs: dict[str, Any], slack: dict[str, float]
) -> str | None:
    """Say how an implementation's result differs from the twin's, or why there is none; None: it agrees."""
    try:
        got = implementation(inputs)()
    except Exception as error:  # noqa: BLE001 - whatever a peer raises is its reason in the report
        return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    common = [name for name in truth if name in got]
    if not common:
        return _NOT_COMPARED
    for name in common:
        want, have = truth[name], got[name]
        if want.shape != have.shape:
            return f"{name}: shape {list(have.shape)}, not {list(want.shape)}"
        if want.dtype.is_floating_point:
            difference = float((want.double() - have.double()).abs().nan_to_num(nan=0.0).max())
            if not difference <= 1e-3 or not bool((want.isnan() == have.isnan()).all()):
                return f"{name}: differs by {difference:.3g}"
        else:
            share = float((want != have).float().mean())
            if share > slack.get(name, 0.0):
                return f"{name}: {share:.2%} of the entries differ"
    return None


def _input_bytes(inputs: dict[str, Any]) -> int:
    flat = [
        *inputs.values(),
        *(v for part in inputs.values() if isinstance(part, dict) for v in part.values()),
    ]
    return max(1, sum(value.nbytes for value in flat if hasattr(value, "nbytes")))


def _environment(copy_rate: float | None) -> dict[str, Any]:
    import torch

    found: dict[str, Any] = {"python": platform.python_version()}
    for name in ("torch", "triton", "sglang"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    on_gpu = copy_rate is not None
    found["device"] = torch.cuda.get_device_name() if on_gpu else "CPU, Triton interpreter"
    found["copy_bytes_per_s"] = copy_rate
    return found


def _label(row: dict[str, Any]) -> str:
    return row["op"] + " " + " ".join(f"{name}={value}" for name, value in row["sizes"].items())


def _progress(row: dict[str, Any]) -> str:
    if not row["correct"]:
        return f"{_label(row)}: WRONG, {row['checks']['ours']}"
    ours = row["seconds"].get("ours")
    return f"{_label(row)}: correct" + ("" if ours is None else f", {ours * 1e6:.1f} us")


def markdown(report: dict[str, Any]) -> str:
    """Return the report as a Markdown table; speed-ups only beside results that agree."""
    environment = report["environment"]
    versions = ", ".join(f"{name} {environment[name]}" for name in ("torch", "triton", "sglang", "python"))
    lines = [f"{environment['device']}; {versions}."]
    if report["dry_run"]:
        lines.append("Dry run: correctness only, not measured on a GPU.")
    else:
        lines.append(f"Copy bandwidth {environment['copy_bytes_per_s'] / 1e12:.2f} TB/s (read + write).")
    peers = ["twin", "compiled twin", "sglang"]
    lines += ["", "| op | check | ours | of copy bandwidth | " + " | ".join(f"vs {p}" for p in peers) + " |"]
    lines.append("|---|---|---|---|" + "---|" * len(peers))
    for row in report["rows"]:
        cells = [_label(row), "ok" if row["correct"] else f"WRONG: {row['checks']['ours']}"]
        ours = row["seconds"].get("ours")
        cells.append("-" if ours is None else f"{ours * 1e6:.1f} us")
        cells.append("-" if row["bandwidth_fraction"] is None else f"{row['bandwidth_fraction']:.0%}")
        cells += [_against(row, peer) for peer in peers]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [f"\nSkipped {_label(item)}: {item['reason']}." for item in report["skipped"]]
    return "\n".join(lines) + "\n"


def _against(row: dict[str, Any], peer: str) -> str:
    if peer not in row["checks"]:
        return "-"
    if row["checks"][peer] is not None:
        return f"no result to compare: {row['checks'][peer]}"
    if row["speedups"] is None:
        return "agrees" if row["correct"] else "-"
    eager = " (eager)" if row["launch"][peer] == "eager" else ""
    return f"{row['speedups'][peer]:.2f}x{eager}"
