"""Exact enumeration of what a planner does to the output distribution, for one request and small
vocabularies.

Chain rejection sampling: a verified draft token x is accepted with min(1, p/q), on rejection the token comes
from norm(max(p - q, 0)); a token that is not verified comes from p. A planner that looks at confidences which
depend on the drawn token changes the distribution of that very token (DSpark paper, appendix A).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_spec_ext.control.verify import allocate, early_stop_budget, plan_budget, survival_of
from sglang_spec_ext.records import FloatArray, IntArray

Planner = Callable[[FloatArray], int]  # live survivals [1, G] -> draft tokens verified


@dataclass(frozen=True, slots=True)
class SpeedTable:
    """StepCost from steps per second by verify tokens; drafting is in it."""

    speeds: Mapping[int, float]

    @property
    def fixed_s(self) -> float:
        """See StepCost."""
        return 0.0

    def draft_s(self, k: int, batch: int, context_len: int = 0) -> float:  # noqa: ARG002
        """See StepCost."""
        return 0.0

    def verify_s(self, tokens: int, batch: int, context_len: int = 0) -> float:  # noqa: ARG002
        """See StepCost."""
        return 1.0 / self.speeds[tokens]

    def verify_many(self, tokens: IntArray, batch: int, context_len: int = 0) -> FloatArray:
        """See StepCost."""
        return np.array([self.verify_s(int(count), batch, context_len) for count in tokens])


def first_token_distribution(
    target: Sequence[float], draft: Sequence[float], survivals: Sequence[FloatArray], planner: Planner
) -> list[float]:
    """Probability of each first token emitted; `survivals[x]` [1, G] is live after x was drafted first."""
    p, q = np.asarray(target), np.asarray(draft)
    residual = np.maximum(p - q, 0.0)
    residual = residual / residual.sum() if residual.any() else p
    emitted = np.zeros_like(p)
    for token, chance in enumerate(q):
        if planner(survivals[token]) >= 1:
            accepted = min(1.0, p[token] / chance)
            emitted[token] += chance * accepted
            emitted += chance * (1.0 - accepted) * residual
        else:
            emitted += chance * p
    return [float(value) for value in emitted]


def enumerate_case(case: Mapping[str, Any]) -> dict[str, list[float]]:
    """First-token distribution under three planners, for a case as in the paper's appendix A.

    `argmax_over_live_confidences` breaks the rule on purpose, to show that the enumeration notices.
    `budget_fixed_beforehand` is checked for every budget and given once they agree.
    """
    first = float(case["confidence_1"])
    second = [float(case["confidence_2_given_first"][name]) for name in case["tokens"]]
    survivals = [survival_of(np.array([[first, value]])) for value in second]
    cost = SpeedTable(
        {int(count): float(v) for count, v in case["steps_per_second_by_verify_tokens"].items()}
    )

    def enumerate_with(planner: Planner) -> list[float]:
        return first_token_distribution(case["target_p"], case["draft_q"], survivals, planner)

    fixed = [
        enumerate_with(lambda survival, budget=budget: int(allocate(survival, budget)[0]))  # type: ignore[misc]
        for budget in range(int(case["gamma"]) + 1)
    ]
    if not np.allclose(fixed, fixed[0], rtol=0, atol=1e-12):
        raise AssertionError(
            f"budgets fixed beforehand disagree: {fixed}; allocation looks at the drawn token"
        )
    return {
        "argmax_over_live_confidences": enumerate_with(lambda survival: plan_budget(survival, cost).budget),
        "early_stop": enumerate_with(lambda survival: early_stop_budget(survival, cost).budget),
        "budget_fixed_beforehand": fixed[0],
    }
