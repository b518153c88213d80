"""From the confidences of finished steps to the budget of the next one.

Joins calibration, the promise that confidences kept, and the fixed age of what a budget may be planned from.
"""

import numpy as np

from sglang_spec_ext.control.acceptance import Acceptance, usable_rows
from sglang_spec_ext.control.calibration import MarginEstimator, TemperatureScaling
from sglang_spec_ext.control.cost import StepCost
from sglang_spec_ext.control.lagged import LaggedSurvivals
from sglang_spec_ext.control.promise import Promise
from sglang_spec_ext.control.verify import BudgetPlan, capped, plan_budget, survival_of
from sglang_spec_ext.records import BatchState, FloatArray, StepObservation


class Survivals:
    """Survivals of the last steps, from a confidence head or from the margin estimator."""

    def __init__(self, scaling: TemperatureScaling | None, estimator: MarginEstimator | None) -> None:
        self.scaling = scaling
        self.estimator = estimator
        self.lagged = LaggedSurvivals()
        self.promise = Promise()

    def observe(self, observation: StepObservation) -> None:
        """Take in one finished step."""
        usable = usable_rows(observation)
        accepted = np.where(usable, observation.accepted, 0).astype(np.int64)
        verified = observation.verified
        if verified is None:
            verified = np.full(accepted.size, observation.k)
        confidences = observation.confidences
        if confidences is not None and self.scaling is not None:
            confidences = self.scaling.apply(confidences)
        elif confidences is None and self.estimator is not None and observation.margins is not None:
            reached = np.where(usable, np.minimum(accepted + 1, verified), 0)
            self.estimator.observe(
                observation.margins, reached, accepted, classes=observation.classes, ragged=observation.ragged
            )
            if self.estimator.warm:
                confidences = self.estimator.probabilities(observation.margins)
        if confidences is not None and observation.request_ids is not None:
            survival = survival_of(confidences)
            self.promise.observe(survival, verified, accepted, usable)
            self.lagged.push(observation.step, observation.request_ids, survival)

    def plan(self, batch: BatchState, cap: int, acceptance: Acceptance, cost: StepCost) -> BudgetPlan | None:
        """Plan a budget from survivals of the fixed age; None where one K for all is all there is."""
        if not cap or batch.request_ids is None:
            return None
        table = np.cumprod([state.rates() for state in acceptance.classes], axis=1)
        classes = np.zeros(batch.num_reqs, np.int64) if batch.classes is None else batch.classes
        prior: FloatArray = table[classes]
        survival = self.lagged.at(batch.step, batch.request_ids, prior)
        if survival is None:
            return None
        caps = np.full(batch.num_reqs, cap) if batch.caps is None else np.minimum(batch.caps, cap)
        return plan_budget(
            capped(np.minimum(survival * self.promise.ratio, 1.0), caps),
            cost,
            prefill_tokens=batch.prefill_tokens,
            context_len=batch.context_len,
        )
