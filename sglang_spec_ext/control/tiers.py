"""Expected tokens per second of every K on the ladder, and how sure the difference of two of them is.

Rate = (sum over requests of 1 + expected accepted) / (draft_s + verify_s + fixed_s). Requests count when they
decode; prefill tokens that share the step stand in the time alone.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from sglang_spec_ext.control.acceptance import Acceptance
from sglang_spec_ext.control.cost import StepCost
from sglang_spec_ext.records import BatchState, RequestClass

Group = tuple[int, int, int]  # (RequestClass, largest K of its requests, number of requests)


class Expectation(Protocol):
    """What scoring needs of one class of requests."""

    def expected(self) -> Sequence[float]:
        """Expected tokens per request and step, bonus included, for K = 0 and up."""


class Expectations(Protocol):
    """Expectations of all classes, by RequestClass."""

    @property
    def classes(self) -> Sequence[Expectation]:
        """One entry per RequestClass."""


class Score(NamedTuple):
    """Prediction for one K."""

    k: int
    tokens: float  # expected in the step, bonus tokens included
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def group_requests(batch: BatchState, max_k: int) -> list[Group]:
    """Count the requests of a batch by class and cap."""
    if batch.caps is None:
        if batch.classes is None:
            return [(RequestClass.PLAIN, max_k, batch.num_reqs)]
        by_class = np.bincount(batch.classes).tolist()
        return [(index, max_k, count) for index, count in enumerate(by_class) if count]
    width = max_k + 1
    key = np.zeros(batch.num_reqs, np.int64) if batch.classes is None else batch.classes.astype(np.int64)
    counts = np.bincount(key * width + np.clip(batch.caps, 0, max_k)).tolist()
    return [(index // width, index % width, count) for index, count in enumerate(counts) if count]


def score_tiers(
    tiers: Sequence[int],
    groups: Sequence[Group],
    *,
    batch: BatchState,
    acceptance: Expectations,
    cost: StepCost,
) -> list[Score]:
    """Score every K; a uniform K verifies K + 1 tokens of every request, whatever the caps.

    Nobody accepts above its own cap.
    """
    reqs, context, prefill = batch.num_reqs, batch.context_len, batch.prefill_tokens
    classes, fixed_s = acceptance.classes, cost.fixed_s
    expected = [(classes[request_class].expected(), cap, count) for request_class, cap, count in groups]
    scores = []
    for k in tiers:
        tokens = 0.0
        for curve, cap, count in expected:
            tokens += count * curve[k if k < cap else cap]  # noqa: FURB136 - min() costs more than the rest
        seconds = cost.draft_s(k, reqs, context) + cost.verify_s(reqs * (k + 1) + prefill, reqs, context)
        scores.append(Score(k, tokens, seconds + fixed_s))
    return scores


def gain_error(groups: Sequence[Group], acceptance: Acceptance, better: Score, current: Score) -> float:
    """Standard error of log(tokens of `better` / tokens of `current`) from the acceptance estimates.

    Both share the rates of their common positions, so the error of the ratio is far below that of either.
    """
    variance = 0.0
    for index, state in enumerate(acceptance.classes):
        mine = [(cap, count) for request_class, cap, count in groups if request_class == index]
        if not mine:
            continue
        rates, expected = state.rates(), state.expected()
        for j in range(max(better.k, current.k)):
            slope = 0.0
            for cap, count in mine:
                high, low = min(better.k, cap), min(current.k, cap)
                if high > j:
                    slope += count * (expected[high] - expected[j]) / better.tokens
                if low > j:
                    slope -= count * (expected[low] - expected[j]) / current.tokens
            variance += (slope / max(rates[j], 1e-3)) ** 2 * state.rate_variance(j)
    return float(variance**0.5)
