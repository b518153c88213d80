"""PNG plots of the envelope: tokens per second against load, and what happened over time in the shifting load."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_spec_ext.commands.plotting import save, subplots

_STYLES: dict[str, dict[str, Any]] = {
    "none": {"color": "0.3", "linestyle": ":"},
    "fixed": {"linewidth": 0.8, "alpha": 0.8},
    "static": {"color": "C9", "linestyle": "--"},
    "stock": {"linestyle": "--"},
    "shadow": {"color": "0.6", "linestyle": "-."},
    "adaptive": {"linewidth": 2.4, "marker": "o", "markersize": 4},
}


def plots(report: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write the plots that the report has data for; returns their paths."""
    written = []
    if report["levels"]:
        written.append(_levels(report, folder / "envelope.png"))
    for name in filter(report["series"].get, report["summary"]):
        path = folder / f"shifting-{name.lower().replace(' ', '-')}.png"
        written += [_shifting(report, name, path)]
    return written


def _levels(report: Mapping[str, Any], path: Path) -> Path:
    figure, axis = subplots(1, size=(9, 5.5))
    for name, setup in report["setups"].items():
        points = [(lv["concurrency"], lv["tok_s"][name]) for lv in report["levels"] if name in lv["tok_s"]]
        if not points:
            continue
        loads = [load for load, _ in points]
        (line,) = axis.plot(loads, [found["median"] for _, found in points], label=name, **_STYLES[setup["role"]])
        if setup["role"] == "adaptive":
            low, high = ([found[end] for _, found in points] for end in ("min", "max"))
            axis.fill_between(loads, low, high, alpha=0.15, color=line.get_color())
    axis.set_xscale("log", base=2)
    axis.set(xlabel="requests in flight", ylabel="output tokens per second", ylim=(0, None))
    ticks = [level["concurrency"] for level in report["levels"]]
    axis.set_xticks(ticks, labels=[str(tick) for tick in ticks])
    axis.legend(fontsize="small", ncols=2)
    return save(figure, path)


def _shifting(report: Mapping[str, Any], name: str, path: Path) -> Path:
    rows = report["series"][name]
    times = [row["t_s"] for row in rows]
    seen = [row for row in rows if "k" in row]
    figure, (rates, ks) = subplots(2, size=(9, 6))
    rates.plot(times, [row["tok_s"] for row in rows], label=f"{name}, measured")
    known = [row for row in seen if row["predicted_tok_s"] is not None]
    predicted = [row["predicted_tok_s"] for row in known]
    rates.plot([row["t_s"] for row in known], predicted, "--", label="predicted for decode steps")
    rates.set(ylabel="output tokens per second", ylim=(0, None))
    rates.legend(fontsize="small")
    ks.step([row["t_s"] for row in seen], [row["k"] for row in seen], where="post", color="C3", label="K")
    ks.set(ylabel="K (draft tokens)", xlabel="seconds")
    load = ks.twinx()
    load.plot(times, [row["running"] for row in rows], color="0.6", linewidth=0.8)
    load.set(ylabel="requests in flight (grey)")
    return save(figure, path)
