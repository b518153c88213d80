"""`spec-ext bench envelope`: is the controller never worse than the best fixed setting, at any load?

Real servers, SGLang's own benchmark client, held-out prompts; every setting in turn, round after round. Writes
envelope.json, envelope.md and plots; `--render` makes the last two again from the first.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_spec_ext.cli import UsageError
from sglang_spec_ext.commands import bench_envelope_report as reporting
from sglang_spec_ext.commands import bench_envelope_setups as setting
from sglang_spec_ext.cpu import selection
from sglang_spec_ext.models.cache import home

QUICK_S = 400.0  # a quick run starts nothing after this, and ends within eight minutes
MARKS = ("<!-- envelope -->", "<!-- /envelope -->")
CONCURRENCY, QUICK_CONCURRENCY = (1, 2, 4, 8, 16, 32), (1, 4, 16)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--quick", action="store_true", help="one short round of the main settings, under 8 minutes")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object and nothing else")
    parser.add_argument("--out", type=Path, default=Path("bench_results/envelope"), metavar="DIR")
    parser.add_argument("--render", type=Path, metavar="JSON", help="measure nothing; table and plots of a report")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="put the table between the marks in this page, too")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG")
    parser.add_argument("--target", type=Path, help="folder of the model [default: the prepared SmolLM2]")
    parser.add_argument(
        "--draft", action="append", metavar="ALGORITHM=FOLDER",
        help="a draft; may be given once for each algorithm [default: the shipped DSPARK draft]",
    )  # fmt: skip
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=setting.KINDS, help="kinds of settings to measure [default: all]")
    parser.add_argument("--tiers", default="auto", help="K to choose from, as for --spec-ext-tiers")
    loads = "requests in flight [default: 1 2 4 8 16 32, quick 1 4 16]"
    parser.add_argument("--concurrency", type=int, nargs="+", help=loads)
    parser.add_argument("--no-shifting", action="store_true", help="leave the shifting load out")
    parser.add_argument("--shifting-rounds", type=int, metavar="N", help="repeats of the shifting load [default: all]")
    parser.add_argument("--rounds", type=int, help="repeats [default: 3, quick 1]")
    parser.add_argument("--tokens", type=int, help="tokens of each answer [default: 64, quick 32]")
    parser.add_argument("--cell-seconds", type=float, help="time of one load in one setting [default: 10, quick 3]")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="start nothing after this [default: quick 400]")
    parser.add_argument(
        "--alive", type=int, help="servers alive at a time [default: all on the CPU platform, 1 on a GPU]"
    )
    parser.add_argument("--threads", type=int, help="threads of a CPU server [default: all cores]")
    parser.add_argument("--sps-table", type=Path, help="SGLang's own cost table [default: measured in this run]")
    parser.add_argument("--server-args", default="", metavar="ARGS", help="further arguments for every server")


def run(args: argparse.Namespace) -> int:
    """Measure or render, write the files, print the table or the JSON."""
    report = _read(args.render) if args.render is not None else _measure(args)
    args.out.mkdir(parents=True, exist_ok=True)
    text = reporting.markdown(report)
    if args.render is None:
        (args.out / "envelope.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    (args.out / "envelope.md").write_text(text, encoding="utf-8")
    if args.into is not None:
        _put(text, args.into)
    if not args.no_plot:
        from sglang_spec_ext.commands.bench_envelope_plot import plots

        plots(report, args.out)
    print(json.dumps(report) if args.json else text)
    return 0


def _put(text: str, page: Path) -> None:
    """Replace what stands between the marks of a page."""
    whole = page.read_text(encoding="utf-8") if page.exists() else ""
    if any(whole.count(mark) != 1 for mark in MARKS):
        raise UsageError(f"--into {page}: needs the lines {MARKS[0]} and {MARKS[1]} once each")
    before, after = whole.split(MARKS[0])[0], whole.split(MARKS[1])[1]
    page.write_text(f"{before}{MARKS[0]}\n{text}{MARKS[1]}{after}", encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return report | reporting.aggregate(report["samples"], report["setups"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"--render {path}: not a report of this command ({error!r})") from error


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure draft by draft, so that no more servers are alive than one draft needs."""
    from sglang_spec_ext.commands.bench_envelope_measure import Measured

    began = time.monotonic()
    choice, amount = _choice(args), _amount(args)
    limit = args.limit or (QUICK_S if args.quick else float("inf"))
    found, setups = Measured(), {}
    for place, (algorithm, draft) in enumerate(choice.drafts.items()):
        if found.interrupted:
            break
        until = began + limit * (place + 1) / len(choice.drafts)  # as much for each draft
        share = replace(amount, first_round=place * amount.rounds, deadline=until)
        setups |= _measure_draft(args, replace(choice, drafts={algorithm: draft}), share, found)
    setups = dict(sorted(setups.items(), key=lambda named: not named[1].family))  # no speculation below the drafts
    facts: dict[str, Any] = {
        "setups": {name: {"family": setup.family, "role": str(setup.role)} for name, setup in setups.items()},
        "samples": found.samples,
        "series": found.series,
        "left_out": found.left_out,
        "inactive": found.inactive,
        "load": {"rounds": amount.rounds, "tokens": amount.tokens, "cell_s": amount.cell_s, "quick": args.quick},
        "model": {"target": choice.target.name, "dtype": choice.dtype,
                  "drafts": {name: path.name for name, path in choice.drafts.items()}},
    }  # fmt: skip
    return {**reporting.aggregate(found.samples, facts["setups"]), **facts, **_circumstances()}


def _measure_draft(args: argparse.Namespace, choice: setting.Choice, amount: Any, found: Any) -> dict[str, Any]:
    """Measure the settings of one draft and no speculation, adding to `found`; returns the settings by name."""
    from sglang_spec_ext.commands import bench_envelope_load as load
    from sglang_spec_ext.commands.bench_envelope_fleet import Fleet
    from sglang_spec_ext.commands.bench_envelope_measure import Bench

    alive = args.alive if args.alive is not None else None if selection.selected() else 1
    specs = setting.servers(choice)
    with tempfile.TemporaryDirectory() as scratch, Fleet(specs, alive=alive, home=Path(scratch)) as fleet:
        if any(spec.needs_table for spec in specs):
            fleet.table = args.sps_table or _table(args, choice, found.left_out)
        setups = setting.setups(specs, _tiers(fleet, specs, found.left_out), choice.kinds)
        side_by_side = alive is None or alive >= len(specs)
        prompts = load.Prompts(choice.target)
        Bench(fleet, setups, prompts, amount, _say, side_by_side=side_by_side, found=found).run()
    return {setup.name: setup for setup in setups}


def _tiers(fleet: Any, specs: list[setting.ServerSpec], left_out: dict[str, str]) -> dict[str, list[int]]:
    """Return the K that each of our servers can be pinned to; starts those that are."""
    from sglang_spec_ext.commands.bench_envelope_fleet import Unavailable

    tiers = {}
    for spec in specs:
        if spec.pinned:
            _say(f"starting {spec.name}")
            try:
                tiers[spec.name] = fleet.get(spec.name).control.state()["tiers"]
            except Unavailable as error:
                left_out[spec.name] = str(error)
    return tiers


def _choice(args: argparse.Namespace) -> setting.Choice:
    root = Path(__file__).resolve().parents[2]
    drafts = setting.parse_drafts(args.draft or [f"DSPARK={root / 'models' / 'smollm2-135m-dspark'}"])
    target = args.target or home() / "models" / "smollm2"
    for name, folder in {"--target": target, **{f"--draft {name}": path for name, path in drafts.items()}}.items():
        if not (folder / "config.json").exists():
            raise UsageError(f"{name} {folder}: holds no config.json; give the folder of a checkpoint")
    kinds = args.only or (setting.CORE if args.quick else setting.KINDS)
    return setting.Choice(
        target=target,
        drafts=drafts,
        dtype=args.dtype,
        max_concurrency=max(_concurrency(args)),
        tokens=_tokens(args),
        kinds=frozenset(kinds),
        tiers="0,1,3" if args.quick and args.tiers == "auto" else args.tiers,
        threads=args.threads or setting.default_threads() if selection.selected() else None,
        server_arguments=setting.split_arguments(args.server_args),
    )


def _concurrency(args: argparse.Namespace) -> tuple[int, ...]:
    wanted = tuple(sorted(set(args.concurrency or (QUICK_CONCURRENCY if args.quick else CONCURRENCY))))
    if wanted[0] < 1:
        raise UsageError(f"--concurrency: must be >= 1, got {wanted[0]}")
    return wanted


def _tokens(args: argparse.Namespace) -> int:
    return args.tokens or (32 if args.quick else 64)


def _amount(args: argparse.Namespace) -> Any:
    """Return how much is measured of each draft; its own deadline and number of the first round are still to be set."""
    from sglang_spec_ext.commands.bench_envelope_measure import Amount

    rounds, cell_s = (1, 3.0) if args.quick else (3, 10.0)
    rounds = args.rounds or rounds
    return Amount(
        concurrency=_concurrency(args), rounds=rounds, tokens=_tokens(args), cell_s=args.cell_seconds or cell_s,
        shifting_rounds=0 if args.no_shifting else rounds if args.shifting_rounds is None else args.shifting_rounds,
    )  # fmt: skip


def _table(args: argparse.Namespace, choice: setting.Choice, left_out: dict[str, str]) -> Path | None:
    from sglang_spec_ext.commands.bench_envelope_fleet import Unavailable, profile_by_sglang

    _say("measuring SGLang's own cost table with its profiler")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        spec = setting.recording_server(choice)
        steady_s = 0.5 if args.quick else 3.0
        return profile_by_sglang(spec, args.out, batch_sizes=list(_concurrency(args)), steady_s=steady_s)
    except Unavailable as error:
        left_out["SGLang's own cost table"] = str(error)
        return None


def _circumstances() -> dict[str, Any]:
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line for line in info.read_text(encoding="utf-8").splitlines() if line.startswith("model name")]
        model = named[0].partition(":")[2].strip() if named else model
    versions = {"python": platform.python_version()}
    for package in ("sglang", "torch", "sglang-spec-ext"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed as a package"
    return {
        "machine": {"cpu": model, "cores": os.cpu_count(), "devices": devices, "system": platform.platform()},
        "versions": versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": " ".join(["spec-ext", *sys.argv[1:]]).replace(str(Path.home()), "~"),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
