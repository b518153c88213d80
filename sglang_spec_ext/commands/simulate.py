"""`spec-ext simulate`: evaluate draft-length policies on a cost model, without an engine, torch or a GPU."""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_spec_ext.cli import UsageError

_BEST_K_BATCHES = tuple(round(2 ** (i / 4)) for i in range(37))  # 1 .. 512, for the plot


def configure(parser: argparse.ArgumentParser) -> None:
    """Add one subcommand per simulation."""
    kinds = parser.add_subparsers(dest="simulation", required=True, metavar="SIMULATION")
    best_k = _add(kinds, "best-k", "best draft length by batch size, for two draft costs")
    _add(kinds, "markov", "acceptance of a block whose positions know each other, and of one whose do not")
    _add(kinds, "verify", "verify everything, nothing, or the tokens most likely to survive")
    lossless = _add(kinds, "lossless", "enumerate what three planners do to the output distribution")
    lossless.add_argument(
        "file", type=Path, metavar="FILE", help="JSON case, as in the DSpark paper's appendix A"
    )
    scenario = _add(kinds, "scenario", "the controller against every fixed K, an oracle and published rules")
    scenario.add_argument(
        "file", type=Path, nargs="+", metavar="FILE", help="scenario JSON; several give one row each"
    )
    capacity = _add(kinds, "capacity", "GPUs for a day's load: the controller against every fixed K")
    capacity.add_argument("file", type=Path, metavar="FILE", help="plan JSON: GPU, model, draft and day")
    capacity.add_argument("--gpu", metavar="NAME", help="plan for this preset instead of the file's GPU")
    for plotted in (best_k, scenario):
        plotted.add_argument("--plot", type=Path, metavar="FILE", help="also write a PNG (needs matplotlib)")


def _add(kinds: Any, name: str, summary: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = kinds.add_parser(name, help=summary, description=summary)
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def run(args: argparse.Namespace) -> int:
    """Run one simulation and print its table or JSON."""
    plot = getattr(args, "plot", None)
    if plot is not None and plot.suffix.lower() != ".png":
        raise UsageError(f"--plot {plot}: must end in .png")
    result, draw = _SIMULATIONS[args.simulation](args)
    if plot is not None and draw is not None:
        draw(plot)
    if args.json:
        print(json.dumps(result, allow_nan=False))
    else:
        from sglang_spec_ext.commands import simulate_tables

        simulate_tables.show(args.simulation, result)
    return 0


Outcome = tuple[dict[str, Any], Callable[[Path], None] | None]


def _best_k(args: argparse.Namespace) -> Outcome:  # noqa: ARG001
    from sglang_spec_ext.control.chapter import best_k_rows

    def draw(path: Path) -> None:
        from sglang_spec_ext.commands.simulate_plot import plot_best_k

        plot_best_k(best_k_rows(batches=_BEST_K_BATCHES), path)

    return {"rows": best_k_rows()}, draw


def _markov(args: argparse.Namespace) -> Outcome:  # noqa: ARG001
    from sglang_spec_ext.control.chapter import markov_acceptance

    return dict(markov_acceptance()), None


def _verify(args: argparse.Namespace) -> Outcome:  # noqa: ARG001
    from sglang_spec_ext.control.chapter import adaptive_verification_rows

    return {"rows": adaptive_verification_rows()}, None


def _lossless(args: argparse.Namespace) -> Outcome:
    from sglang_spec_ext.control.lossless import enumerate_case

    try:
        case = json.loads(_read(args.file))
        return {"first_token_distribution": enumerate_case(case)}, None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UsageError(f"{args.file}: not a case to enumerate ({error!r})") from error


def _scenario(args: argparse.Namespace) -> Outcome:
    from sglang_spec_ext.control.comparison import Comparison, compare
    from sglang_spec_ext.control.scenario import ScenarioError, load_scenario

    if args.plot is not None and len(args.file) > 1:
        raise UsageError(f"--plot {args.plot}: draws one scenario, got {len(args.file)} files")
    comparisons: dict[str, Comparison] = {}
    with _progress() as advance:
        for path in args.file:
            try:
                comparisons[path.stem] = compare(load_scenario(_read(path)), advance)
            except ScenarioError as error:
                raise UsageError(f"{path}: {error}") from error
    if len(args.file) > 1:
        return {"scenarios": {name: comparison.as_dict() for name, comparison in comparisons.items()}}, None
    comparison = comparisons[args.file[0].stem]

    def draw(path: Path) -> None:
        from sglang_spec_ext.commands.simulate_plot import plot_scenario

        plot_scenario(comparison, path)

    return comparison.as_dict(), draw


def _capacity(args: argparse.Namespace) -> Outcome:
    from sglang_spec_ext.control.capacity import CapacityError, capacity, load_plan

    try:
        return capacity(load_plan(_read(args.file), gpu=args.gpu)), None
    except CapacityError as error:
        raise UsageError(f"{args.file}: {error}") from error


_SIMULATIONS: dict[str, Callable[[argparse.Namespace], Outcome]] = {
    "best-k": _best_k,
    "markov": _markov,
    "verify": _verify,
    "lossless": _lossless,
    "scenario": _scenario,
    "capacity": _capacity,
}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: cannot be read ({error})") from error


class _progress:  # noqa: N801 - used as a context manager only
    """A progress bar on standard error, when that is a terminal; gives `advance(done, total)`."""

    def __enter__(self) -> Callable[[int, int], None]:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
        self._bar.__enter__()
        task = self._bar.add_task("simulating", total=None)
        return lambda done, total: self._bar.update(task, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self._bar.stop()
