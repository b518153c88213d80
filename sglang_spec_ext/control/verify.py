"""Which draft tokens to verify: a budget for the batch and a prefix for each request, by survival.

Survival of position j is the product of acceptance probabilities up to j, so it never rises along a request
and the best B of all positions are a prefix of each request. The budget is the global optimum of expected
tokens over time: on a staircase of graph sizes the first descent is not the best (TensorRT-LLM #17056).

Lossless rule: whether position j is verified may depend on tokens before j and on other requests, never on
the token at j. A confidence behind position j may know the token at j, so `plan_budget` must be given
survivals of a fixed earlier step (see lagged.py), or `early_stop_budget` be used; `allocate` may rank live
ones, since a later position of a request never outranks an earlier one (DSpark paper, appendix A).
"""

from dataclasses import dataclass

import numpy as np

from sglang_spec_ext.control.cost import StepCost
from sglang_spec_ext.records import BoolArray, FloatArray, IntArray


@dataclass(frozen=True, slots=True)
class BudgetPlan:
    """How many draft tokens to verify in the batch, and what that is predicted to give."""

    budget: int
    tokens: float  # expected in the step, bonus tokens included
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def survival_of(confidences: FloatArray) -> FloatArray:
    """Return survivals [R, G] of confidences [R, G]; a row with NaN or a value outside 0..1 becomes zeros.

    Such a row verifies its anchor alone and leaves its neighbours as they are.
    """
    trusted: BoolArray = np.logical_and.reduce((confidences >= 0.0) & (confidences <= 1.0), axis=1)
    clean = confidences if trusted.all() else np.where(trusted[:, None], confidences, 0.0)
    result: FloatArray = np.multiply.accumulate(clean, axis=1, dtype=np.float64)
    return result


def capped(survival: FloatArray, caps: IntArray | None) -> FloatArray:
    """Return survivals [R, G] with zeros behind each request's cap [R]."""
    if caps is None:
        return survival
    return np.where(np.arange(survival.shape[1]) < caps[:, None], survival, 0.0)


def _curve(
    survival: FloatArray, cost: StepCost, max_budget: int | None, prefill_tokens: int, context_len: int
) -> tuple[FloatArray, FloatArray]:
    """Expected tokens [B + 1] and seconds [B + 1] of every budget from 0 up."""
    reqs, gamma = survival.shape
    values = survival[survival > 0.0]
    values.sort()
    values = values[::-1] if max_budget is None else values[::-1][: max(0, max_budget)]
    tokens = np.empty(values.size + 1)
    tokens[0] = reqs
    np.cumsum(values, out=tokens[1:])
    tokens[1:] += reqs
    sizes = np.arange(reqs + prefill_tokens, reqs + prefill_tokens + values.size + 1)
    seconds = cost.verify_many(sizes, reqs, context_len)
    return tokens, seconds + (cost.draft_s(gamma, reqs, context_len) + cost.fixed_s)


def plan_budget(
    survival: FloatArray,
    cost: StepCost,
    *,
    max_budget: int | None = None,
    prefill_tokens: int = 0,
    context_len: int = 0,
) -> BudgetPlan:
    """Return the budget with the most expected tokens per second, the smallest one among equals.

    `survival` [R, G] is of a fixed earlier step, capped; the whole block of G tokens is drafted whatever the
    budget. O(N log N) in the N = R * G positions.
    """
    if not survival.size:
        return BudgetPlan(0, 0.0, cost.fixed_s or float("inf"))
    tokens, seconds = _curve(survival, cost, max_budget, prefill_tokens, context_len)
    best = int(np.argmax(tokens / seconds))
    return BudgetPlan(best, float(tokens[best]), float(seconds[best]))


def early_stop_budget(survival: FloatArray, cost: StepCost, *, context_len: int = 0) -> BudgetPlan:
    """Return the budget at which one more token first fails to raise the rate (DSpark, algorithm 1).

    It may be fed live survivals: a stop never looks past the position it decides on.
    """
    if not survival.size:
        return BudgetPlan(0, 0.0, cost.fixed_s or float("inf"))
    tokens, seconds = _curve(survival, cost, None, 0, context_len)
    rates = tokens / seconds
    falls = np.nonzero(rates[1:] <= rates[:-1])[0]
    best = int(falls[0]) if falls.size else rates.size - 1
    return BudgetPlan(best, float(tokens[best]), float(seconds[best]))


def allocate(survival: FloatArray, budget: int) -> IntArray:
    """Return how many draft tokens [R] each request verifies: the best `budget` positions of [R, G].

    Equal survivals are taken by (position, request). Positions with survival 0 are never taken; the anchor,
    which every request verifies, is not counted.
    """
    reqs = len(survival)
    flat = survival.ravel()
    positive: IntArray = np.count_nonzero(survival, axis=1)
    if budget >= int(positive.sum()):
        return positive
    if budget <= 0:
        return np.zeros(reqs, np.int64)
    threshold = np.partition(flat, flat.size - budget)[flat.size - budget]
    lengths: IntArray = np.count_nonzero(survival > threshold, axis=1)
    tied = np.flatnonzero(survival.T.ravel() == threshold)[: budget - int(lengths.sum())]
    lengths += np.bincount(tied % reqs, minlength=reqs)
    return lengths
