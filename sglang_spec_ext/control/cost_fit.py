"""Build a cost table from timed samples: medians, an additive fit, a monotone curve.

The profiler takes the samples on the real path after warm-up; this module only turns them into a table.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from statistics import median

import numpy as np

from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import CostTableError, Curve, isotonic
from sglang_spec_ext.records import FloatArray

MIN_REPEATS = 5  # of one shape; a median of fewer does not reject a stall


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifySample:
    """One timed target pass."""

    batch: int
    tokens: int  # in the whole pass, anchors included
    seconds: float
    context_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSample:
    """One timed draft of K tokens per request; K = 0 times what keeps the draft's KV usable."""

    batch: int
    k: int
    seconds: float
    context_len: int = 0


def fit_cost_table(
    verify: Iterable[VerifySample],
    draft: Iterable[DraftSample],
    *,
    captured_tokens: int = 0,
    captured_batch: int = 0,
    fixed_s: float = 0.0,
    fingerprint: Mapping[str, str] | None = None,
    min_repeats: int = MIN_REPEATS,
) -> CostTable:
    """Return the table; CostTableError names what is missing or wrong in the samples.

    `captured_tokens` and `captured_batch` are the largest captured graph sizes of the target and the draft.
    """
    verify_cells: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for v in verify:
        verify_cells[v.context_len][v.batch, v.tokens].append(_checked(v.seconds, f"verify sample {v}"))
    draft_cells: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for d in draft:
        draft_cells[d.context_len][d.k, d.batch].append(_checked(d.seconds, f"draft sample {d}"))
    if not verify_cells:
        raise CostTableError("verify samples: none; profile the target before fitting")
    buckets = []
    for context_len in sorted(verify_cells):
        if context_len not in draft_cells:
            raise CostTableError(f"draft samples: none at context_len={context_len}; profile it there")
        medians = _medians(verify_cells[context_len], min_repeats, "verify (batch, tokens)")
        tokens, batch = _fit_verify(medians, captured_tokens)
        drafts = _medians(draft_cells[context_len], min_repeats, "draft (K, batch)")
        buckets.append(ContextBucket(context_len, tokens, batch, _fit_draft(drafts, captured_batch)))
    return CostTable(tuple(buckets), fixed_s, dict(fingerprint or {}))


def _checked(seconds: float, label: str) -> float:
    if not isfinite(seconds) or seconds <= 0:
        raise CostTableError(f"{label}: seconds must be finite and > 0; time it again")
    return seconds


def _medians(
    cells: Mapping[tuple[int, int], Sequence[float]], min_repeats: int, label: str
) -> dict[tuple[int, int], float]:
    for key, times in cells.items():
        if len(times) < min_repeats:
            raise CostTableError(f"{label} {key}: {len(times)} repeats, needs {min_repeats}; time more")
    return {key: median(times) for key, times in cells.items()}


def _connected(cells: Iterable[tuple[int, int]]) -> bool:
    """Whether batch sizes and token counts form one linked set, so that the two parts can be told apart."""
    groups: list[set[tuple[str, int]]] = []
    for batch, tokens in cells:
        linked: set[tuple[str, int]] = {("batch", batch), ("tokens", tokens)}
        apart = [group for group in groups if not group & linked]
        groups = [*apart, linked.union(*(group for group in groups if group & linked))]
    return len(groups) == 1


def _fit_verify(cells: Mapping[tuple[int, int], float], captured: int) -> tuple[Curve, Curve | None]:
    batches = sorted({batch for batch, _ in cells})
    tokens = sorted({count for _, count in cells})
    if len(batches) == 1:
        theta: FloatArray = np.array([cells[batches[0], count] for count in tokens])
        return _token_curve(tokens, theta, captured), None
    if not _connected(cells):
        raise CostTableError(
            f"verify samples: batches {batches} share no token counts, so batch and tokens cannot be told "
            "apart; time the same token count at two batch sizes"
        )
    rows = np.zeros((len(cells), len(tokens) + len(batches) - 1))
    seconds = np.empty(len(cells))
    for row, ((batch, count), value) in enumerate(cells.items()):
        rows[row, tokens.index(count)] = 1.0
        if batch != batches[0]:
            rows[row, len(tokens) + batches.index(batch) - 1] = 1.0
        seconds[row] = value
    # divided by the measured time: relative errors count, or the largest shapes would decide alone
    solution = np.linalg.lstsq(rows / seconds[:, None], np.ones(len(cells)), rcond=None)[0]
    alpha = isotonic([0.0, *np.maximum(solution[len(tokens) :], 0.0).tolist()])
    return _token_curve(tokens, solution[: len(tokens)], captured), Curve(tuple(batches), tuple(alpha))


def _token_curve(tokens: Sequence[int], theta: FloatArray, captured: int) -> Curve:
    if np.any(theta <= 0):
        raise CostTableError(
            f"verify samples: the fit gives no positive time at {tokens[int(np.argmin(theta))]} tokens; "
            "the samples contradict each other, time them again"
        )
    return Curve(tuple(tokens), tuple(isotonic(theta.tolist())), _largest_within(tokens, captured))


def _fit_draft(cells: Mapping[tuple[int, int], float], captured: int) -> tuple[tuple[int, Curve], ...]:
    curves = []
    for k in sorted({k for k, _ in cells}):
        batches = sorted(batch for other, batch in cells if other == k)
        seconds = isotonic([cells[k, batch] for batch in batches])
        curves.append((k, Curve(tuple(batches), tuple(seconds), _largest_within(batches, captured))))
    return tuple(curves)


def _largest_within(points: Sequence[int], captured: int) -> int:
    return max((point for point in points if point <= captured), default=0)
