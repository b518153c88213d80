"""What happened over time in the shifting load: measured and predicted tokens per second, K, requests in flight."""

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_spec_ext.commands.bench_envelope_load import Answer
from sglang_spec_ext.control.cost_files import cost_table_from

BIN_S = 1.0


def look(state: Mapping[str, Any], at_s: float) -> dict[str, Any]:
    """Return what a prediction needs of a controller's state."""
    cost = state["cost"] or {}
    return {
        "at_s": at_s,
        "k": state["k"],
        "rates": state["acceptance"]["classes"]["plain"]["rates"],
        "cost_table": state["cost_table"],
        "verify_ratio": cost.get("verify_ratio", 1.0),
        "draft_ratio": cost.get("draft_ratio", 1.0),
        "fixed_s": state["fixed_s"] or 0.0,
    }


def predicted_tok_s(seen: Mapping[str, Any], num_reqs: int) -> float | None:
    """Return the rate of the K in use at a batch size, by the controller's own formula; None without a table."""
    if seen["cost_table"] is None or not num_reqs:
        return None
    table = cost_table_from(seen["cost_table"])
    k, fixed_s = int(seen["k"]), float(seen["fixed_s"])
    expected = survival = 1.0
    for rate in seen["rates"][:k]:
        survival *= float(rate)
        expected += survival
    verify_s = table.verify_s(num_reqs * (k + 1), num_reqs) * float(seen["verify_ratio"])
    return num_reqs * expected / (table.draft_s(k, num_reqs) * float(seen["draft_ratio"]) + verify_s + fixed_s)


def series(answers: Sequence[Answer], looks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a second from the first request on; `k` and the prediction where a controller was looked at."""
    start = min(answer.start_s for answer in answers)
    bins = int((max(answer.end_s for answer in answers) - start) / BIN_S) + 1
    tokens = [0] * bins
    for answer in answers:
        for at, count in answer.chunks:
            tokens[min(bins - 1, int((at - start) / BIN_S))] += count
    seen = {int((found["at_s"] - start) / BIN_S): found for found in looks}
    rows = []
    for index, count in enumerate(tokens):
        middle = start + (index + 0.5) * BIN_S
        running = sum(answer.start_s <= middle < answer.end_s for answer in answers)
        row: dict[str, Any] = {"t_s": index * BIN_S, "tok_s": count / BIN_S, "running": running}
        if index in seen:
            row |= {"k": seen[index]["k"], "predicted_tok_s": predicted_tok_s(seen[index], running)}
        rows.append(row)
    return rows
