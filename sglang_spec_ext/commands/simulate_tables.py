"""Readable tables of the simulations."""

from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table

MIN_WIDTH = 130  # of the widest table: a line too long for a terminal or a file is better than numbers cut short


def show(simulation: str, result: dict[str, Any]) -> None:
    """Print the table of one simulation."""
    console = Console()
    console.width = max(console.width, MIN_WIDTH)
    for table in _TABLES[simulation](result):
        console.print(table)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    return table


def _best_k(result: dict[str, Any]) -> list[Table]:
    table = _table(
        "Best draft length", "draft pass", "batch", "drafting", "no spec tok/s", "best K", "speed-up"
    )
    for row in result["rows"]:
        table.add_row(
            f"{row['t_draft_s'] * 1e3:.2f} ms",
            str(row["batch"]),
            "block" if row["parallel"] else "serial",
            f"{row['no_spec_tok_s']:.1f}",
            str(row["best_k"]),
            f"{row['speedup']:.4f}",
        )
    return [table]


def _markov(result: dict[str, Any]) -> list[Table]:
    table = _table("Expected accepted drafts of a block of 6", "positions apart", "linked by a Markov head")
    table.add_row(f"{result['parallel']:.4f}", f"{result['markov']:.4f}")
    return [table]


def _verify(result: dict[str, Any]) -> list[Table]:
    table = _table(
        "Verification by survival: tok/s, and drafts admitted in all and per request",
        "batch",
        "no spec",
        "verify all",
        "adaptive",
        "admitted",
        "accurate",
        "inaccurate",
    )
    for row in result["rows"]:
        table.add_row(
            str(row["batch"]),
            *(f"{row[key]:.1f}" for key in ("no_spec", "verify_all", "adaptive")),
            str(row["admitted"]),
            *(f"{row[key]:.4f}" for key in ("kept_accurate", "kept_inaccurate")),
        )
    return [table]


def _lossless(result: dict[str, Any]) -> list[Table]:
    table = _table("Distribution of the first token", "planner", "probabilities")
    for name, probabilities in result["first_token_distribution"].items():
        table.add_row(name.replace("_", " "), "  ".join(f"{p:.4f}" for p in probabilities))
    return [table]


def _scenarios(results: dict[str, Any]) -> list[Table]:
    table = _table(
        "Tokens per second as a share of the oracle's; switches and probes of ours",
        "scenario", "adaptive", "best fixed", "no spec", "sglang_ema", "vllm_table", "vllm_argmax",
        "worst segment", "switches", "probes",
    )  # fmt: skip
    for name, result in results.items():
        oracle, ours = result["oracle"]["tok_s"], result["adaptive"]
        fixed = result["fixed"]
        shares = [ours["tok_s"], max(fixed.values()), fixed.get("0")]
        shares += [result["published"][rule]["tok_s"] for rule in ("sglang_ema", "vllm_table", "vllm_argmax")]
        worst = min(part["tok_s"] / part["best_fixed_tok_s"] for part in ours["segments"])
        table.add_row(
            name,
            *("-" if tok_s is None else f"{tok_s / oracle:.4f}" for tok_s in shares),
            f"{worst:.4f}",
            str(ours["switches"]),
            f"{ours['probe_fraction']:.4f}",
        )
    return [table]


def _scenario(result: dict[str, Any]) -> list[Table]:
    if "scenarios" in result:
        return _scenarios(result["scenarios"])
    oracle = result["oracle"]["tok_s"]
    ours = result["adaptive"]
    whole = _table("Whole scenario", "policy", "tok/s", "of oracle", "switches")
    whole.add_row("adaptive", f"{ours['tok_s']:.1f}", f"{ours['tok_s'] / oracle:.4f}", str(ours["switches"]))
    for k, tok_s in result["fixed"].items():
        whole.add_row(f"fixed K={k}", f"{tok_s:.1f}", f"{tok_s / oracle:.4f}", "0")
    for name, run in result["published"].items():
        whole.add_row(name, f"{run['tok_s']:.1f}", f"{run['tok_s'] / oracle:.4f}", str(run["switches"]))
    whole.add_row("oracle", f"{oracle:.1f}", "1.0000", "")
    parts = _table("Segments", "#", "adaptive tok/s", "best fixed K", "its tok/s", "ratio")
    for index, part in enumerate(ours["segments"]):
        best = part["best_fixed_tok_s"]
        ratio = f"{part['tok_s'] / best:.4f}"
        parts.add_row(str(index), f"{part['tok_s']:.1f}", str(part["best_fixed_k"]), f"{best:.1f}", ratio)
    return [whole, parts]


def _capacity(result: dict[str, Any]) -> list[Table]:
    gpu = result["gpu"]
    title = f"Best K by requests in flight on a replica of {gpu['per_replica']} x {gpu['name']}"
    rungs = _table(title, "from", "to", "K")
    for first, last, k in result["ladder"]:
        rungs.add_row(str(first), str(last), str(k))
    heads = ("policy", "tok/s of a replica", "GPUs at the peak", "GPU hours", "tok/s of a request")
    totals = _table("The day by policy", *heads)
    for name, found in result["policies"].items():
        if found["served"]:
            speeds = [part["tok_s_per_request"] for part in found["day"] if part["tok_s_per_request"] is not None]
            cells = (
                f"{found['replica_tok_s']:.0f}",
                str(found["peak_gpus"]),
                f"{found['gpu_hours']:.0f}",
                f"{min(speeds):.0f} to {max(speeds):.0f}" if speeds else "-",
            )
        else:
            cells = ("-", found["reason"], "-", "-")
        totals.add_row(name, *cells)
    ours = result["policies"]["adaptive"]
    hours = _table("The day, adaptive", "demand tok/s", "GPUs", "batch", "K", "tok/s of a request")
    for part in ours.get("day", ()):
        speed = "-" if part["tok_s_per_request"] is None else f"{part['tok_s_per_request']:.1f}"
        k = "-" if part["k"] is None else str(part["k"])
        hours.add_row(f"{part['tok_s']:.0f}", str(part["gpus"]), str(part["batch"]), k, speed)
    return [rungs, totals, hours]


_TABLES: dict[str, Callable[[dict[str, Any]], list[Table]]] = {
    "best-k": _best_k,
    "markov": _markov,
    "verify": _verify,
    "lossless": _lossless,
    "scenario": _scenario,
    "capacity": _capacity,
}
