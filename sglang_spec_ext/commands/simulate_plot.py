"""PNG plots of the simulations."""

from collections import defaultdict
from pathlib import Path
from typing import Any

from sglang_spec_ext.commands.plotting import save, subplots
from sglang_spec_ext.control.comparison import Comparison
from sglang_spec_ext.control.simulator import moving_rate

_WINDOW_STEPS = 50


def plot_best_k(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the best K against the batch size, one line per draft cost and way of drafting."""
    figure, axis = subplots(1, size=(9, 3.2))
    lines: dict[tuple[float, bool], list[tuple[int, int]]] = defaultdict(list)
    for row in rows:
        lines[row["t_draft_s"], row["parallel"]].append((row["batch"], row["best_k"]))
    for (draft_s, parallel), points in lines.items():
        label = f"{'block' if parallel else 'serial'}, {draft_s * 1e3:g} ms a pass"
        axis.step(*zip(*points, strict=True), where="mid", label=label, linestyle="-" if parallel else "--")
    axis.set(xscale="log", xlabel="batch (requests)", ylabel="best K (draft tokens)")
    axis.set_xscale("log", base=2)
    axis.legend()
    save(figure, path)


def plot_scenario(comparison: Comparison, path: Path) -> None:
    """Draw tokens per second and K over time: ours, every fixed K, the oracle."""
    figure, (rates, ks) = subplots(2, size=(9, 6.4))
    for k, run in comparison.fixed.items():
        rates.plot(moving_rate(run, _WINDOW_STEPS), linewidth=0.8, alpha=0.7, label=f"fixed K={k}")
    rates.plot(moving_rate(comparison.oracle, _WINDOW_STEPS), "k:", linewidth=1.4, label="oracle")
    rates.plot(moving_rate(comparison.adaptive, _WINDOW_STEPS), "C3", linewidth=1.6, label="adaptive")
    rates.set(ylabel=f"tok/s (mean of {_WINDOW_STEPS} steps)", yscale="log")
    rates.legend(ncols=4, fontsize="small")
    ks.step(range(len(comparison.oracle.ks)), comparison.oracle.ks, "k:", where="post", label="oracle")
    ks.step(range(len(comparison.adaptive.ks)), comparison.adaptive.ks, "C3", where="post", label="adaptive")
    ks.set(xlabel="step", ylabel="K (draft tokens)")
    ks.legend(fontsize="small")
    for axis in (rates, ks):
        for part in comparison.adaptive.bounds():
            axis.axvline(part.start, color="0.85", linewidth=0.8, zorder=0)
    save(figure, path)
