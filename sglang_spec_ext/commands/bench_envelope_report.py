"""From samples to the report of `spec-ext bench envelope`: medians, spread, ratios, a Markdown table. Pure.

A ratio is taken within a round, where both settings met the same prompts and the same machine, and the median over
rounds is reported. The best of a group is the one with the highest median: with noise, the best of many is flattered,
so a ratio to it errs against ours. With three rounds and more it stands beside the ratio to the one that was best in
the other rounds, which no luck of its own round has chosen: where noise hides the best, that one errs for ours.
"""

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

RIVALS = ("none", "fixed", "static", "stock")
FIXED = ("fixed", "static")
SHIFTING = "shifting"
CHOOSING_ROUNDS = 3  # from here on the other rounds choose a best
# what the project promises, for the last column
FLOOR_LEVEL, FLOOR_MEAN, FLOOR_SHIFTING, FLOOR_NO_SPEC = 0.98, 1.0, 1.05, 0.98

RATIOS = (
    ("ratio_to_best", "the best other"),
    ("ratio_to_best_fixed", "the best fixed K"),
    ("ratio_to_best_of_other_rounds", "what was best in the other rounds"),  # where there were enough
)

Samples = Sequence[Mapping[str, Any]]
Setups = Mapping[str, Mapping[str, Any]]  # name -> {"family", "role"}


def aggregate(samples: Samples, setups: Setups) -> dict[str, Any]:
    """Return `levels`, `shifting` and `summary` for samples of {setup, load, round, tok_s, accept_length}."""
    loads = sorted({sample["load"] for sample in samples if sample["load"] != SHIFTING})
    levels = [{"concurrency": load, **_load(samples, setups, load)} for load in loads]
    shifting = _load(samples, setups, SHIFTING) if any(s["load"] == SHIFTING for s in samples) else None
    return {"levels": levels, "shifting": shifting, "summary": _summary(levels, shifting, setups)}


def _load(samples: Samples, setups: Setups, load: object) -> dict[str, Any]:
    runs: dict[str, dict[int, float]] = {}
    lengths: dict[str, list[float]] = {}
    for sample in samples:
        if sample["load"] == load:
            runs.setdefault(sample["setup"], {})[sample["round"]] = sample["tok_s"]
            if sample["accept_length"] is not None:
                lengths.setdefault(sample["setup"], []).append(sample["accept_length"])
    ours = [name for name in runs if setups[name]["role"] == "adaptive"]

    def against(roles: Iterable[str]) -> dict[str, Any]:
        pairs = {name: _best(runs, name, _group(runs, setups, name, roles)) for name in ours}
        return {name: _paired(runs, name, best) for name, best in pairs.items() if best is not None}

    return {
        "tok_s": {name: spread(list(found.values())) for name, found in runs.items()},
        "accept_length": {name: statistics.median(found) for name, found in lengths.items()},
        "ratio_to_best_fixed": against(FIXED),
        "ratio_to_no_spec": against(("none",)),
        "ratio_to_best": against(RIVALS),
        "ratio_to_best_of_other_rounds": {
            name: _chosen_elsewhere(runs, name, _group(runs, setups, name, RIVALS)) for name in ours
        },
    }


def _group(runs: Iterable[str], setups: Setups, name: str, roles: Iterable[str]) -> list[str]:
    """Settings of the same draft, and those without one, that play one of the roles."""
    families, wanted = ("", setups[name]["family"]), tuple(roles)
    return [other for other in runs if setups[other]["family"] in families and setups[other]["role"] in wanted]


def _best(runs: Mapping[str, Mapping[int, float]], name: str, group: Sequence[str]) -> str | None:
    """Return the best of the group in the rounds of `name`: no speculation is measured beside every draft."""

    def rate(other: str) -> float:
        shared = [value for number, value in runs[other].items() if number in runs[name]]
        return statistics.median(shared) if shared else 0.0

    return max(group, key=rate, default=None)


def _paired(runs: Mapping[str, Mapping[int, float]], name: str, other: str) -> dict[str, Any] | None:
    common = sorted(runs[name].keys() & runs[other].keys())
    if not common:
        return None
    return {"of": other, **spread([runs[name][number] / runs[other][number] for number in common])}


def _chosen_elsewhere(
    runs: Mapping[str, Mapping[int, float]], name: str, group: Sequence[str]
) -> dict[str, Any] | None:
    """Return the ratio to what was best in all rounds but the one that is looked at."""
    ratios = []
    for number in runs[name] if len(runs[name]) >= CHOOSING_ROUNDS else ():
        elsewhere = {
            other: statistics.median(shared)
            for other in group
            if number in runs[other]
            and (shared := [value for at, value in runs[other].items() if at != number and at in runs[name]])
        }
        if elsewhere:
            ratios.append(runs[name][number] / runs[max(elsewhere, key=lambda other: elsewhere[other])][number])
    return spread(ratios) if ratios else None


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Return median, smallest, largest and count."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def _summary(levels: Sequence[Mapping[str, Any]], shifting: Mapping[str, Any] | None, setups: Setups) -> dict[str, Any]:
    summary = {}
    for name in (name for name, setup in setups.items() if setup["role"] == "adaptive"):
        best = _medians(levels, "ratio_to_best", name)
        no_spec = _medians(levels, "ratio_to_no_spec", name)
        moving = _medians([] if shifting is None else [shifting], "ratio_to_best_fixed", name)
        if best:
            summary[name] = {
                "worst_level": min(best),
                "mean_of_levels": statistics.fmean(best),
                "shifting_to_best_fixed": moving[0] if moving else None,
                "worst_to_no_spec": min(no_spec) if no_spec else None,
            }
    return summary


def _medians(loads: Sequence[Mapping[str, Any]], ratio: str, name: str) -> list[float]:
    found = [load[ratio].get(name) for load in loads]
    return [pair["median"] for pair in found if pair is not None]


def markdown(report: Mapping[str, Any]) -> str:
    """Return the tables and the facts that they stand on."""
    return "\n".join([_facts(report), "", *_throughput(report), "", *_promise(report), *_left_out(report)]) + "\n"


def _facts(report: Mapping[str, Any]) -> str:
    machine, versions, load = report["machine"], report["versions"], report["load"]
    devices = ", ".join(machine["devices"]) or f"{machine['cpu']}, {machine['cores']} cores"
    software = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"{report['date']}, {devices}; {report['model']['dtype']} {report['model']['target']}; {software}. "
        f"Output tokens per second, median of {_rounds(report)} (smallest to largest); answers of "
        f"{load['tokens']} tokens, greedy, to distinct held-out prompts.\n\n    {report['command']}"
    )


def _rounds(report: Mapping[str, Any]) -> str:
    """Say how many rounds the cells of the table stand on: a run that is out of time measures some less often."""
    planned = report["load"]["rounds"]
    drafting = [sample for sample in report["samples"] if report["setups"][sample["setup"]]["family"]]
    runs = Counter((sample["setup"], sample["load"]) for sample in drafting).values()
    if not runs or min(runs) == planned:
        return f"{planned} rounds"
    return f"{min(runs)} to {max(runs)} of {planned} rounds"


def _throughput(report: Mapping[str, Any]) -> list[str]:
    levels, shifting = report["levels"], report["shifting"]
    loads = [*levels, *([] if shifting is None else [shifting])]
    heads = [str(level["concurrency"]) for level in levels] + ([] if shifting is None else [SHIFTING])
    rows = [f"| tokens/s at requests in flight | {' | '.join(heads)} |", "|---" * (len(heads) + 1) + "|"]
    named = [name for name in report["setups"] if any(name in load["tok_s"] for load in loads)]
    rows += [f"| {name} | {' | '.join(_cell(load['tok_s'].get(name)) for load in loads)} |" for name in named]
    for name in report["summary"]:
        for ratio, text in RATIOS:
            found = [load.get(ratio, {}).get(name) for load in loads]
            if ratio != RATIOS[-1][0] or any(found):
                rows.append(f"| *{name} / {text}* | {' | '.join(map(_ratio, found))} |")
    return rows


def _cell(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "not measured"
    if found["runs"] == 1:
        return f"{found['median']:.1f}"
    return f"{found['median']:.1f} ({found['min']:.1f} to {found['max']:.1f})"


def _ratio(found: Mapping[str, Any] | None) -> str:
    return "not measured" if found is None else f"{found['median']:.2f}"


def _promise(report: Mapping[str, Any]) -> list[str]:
    heads = (
        "worst level against the best other", "mean over levels", "shifting load against the best fixed K",
        "worst level against no speculation",
    )  # fmt: skip
    rows = [
        f"| | {' | '.join(heads)} |",
        "|---|---|---|---|---|",
        f"| *aim* | {FLOOR_LEVEL} | {FLOOR_MEAN:.2f} | {FLOOR_SHIFTING} | {FLOOR_NO_SPEC} |",
    ]
    floors = (
        ("worst_level", FLOOR_LEVEL), ("mean_of_levels", FLOOR_MEAN),
        ("shifting_to_best_fixed", FLOOR_SHIFTING), ("worst_to_no_spec", FLOOR_NO_SPEC),
    )  # fmt: skip
    for name, found in report["summary"].items():
        rows.append(f"| {name} | {' | '.join(_judged(found[key], floor) for key, floor in floors)} |")
    return rows


def _judged(value: float | None, floor: float) -> str:
    if value is None:
        return "not measured"
    return f"{value:.2f}" if value >= floor else f"**{value:.2f}, missed**"


def _left_out(report: Mapping[str, Any]) -> list[str]:
    by_reason: dict[str, list[str]] = {}
    measured = {f"{sample['setup']} at {sample['load']}" for sample in report["samples"]}  # at least in one round
    for name, reason in report["left_out"].items():
        if name not in measured:
            by_reason.setdefault(reason, []).append(name)
    rows = [f"- {', '.join(names)}: {reason}" for reason, names in by_reason.items()]
    said = [f"- {name} says: {text}" for name, texts in report["inactive"].items() for text in texts]
    return ["", *(["Not measured:", *rows] if rows else []), *said] if rows or said else []
