"""How likely the next draft token is accepted: per class of requests, per position, decayed.

rate[j] is the probability that position j + 1 is accepted given that all earlier ones were; survival is
their running product and expected tokens are 1 (the bonus) plus the sum of survivals. A sample counts only
at positions that were reached and verified, so it carries the K it was drafted at by itself. Two windows
run side by side: when the short one contradicts the long one, the long one is dropped, so that a change of
load shows within some steps while a steady load is estimated from about a thousand samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp, sqrt
from typing import Any

import numpy as np

from sglang_spec_ext.records import BoolArray, IntArray, RequestClass, StepObservation

WINDOW_SAMPLES = 1024.0  # memory of the long window in requests ...
WINDOW_STEPS = 32.0  # ... but never less than these steps
SHORT_SAMPLES = 64.0
SHORT_STEPS = 4.0
CHANGE_SIGMAS = 4.0
CHANGE_MIN_SAMPLES = 12.0
STALE_SLOWDOWN = 8.0  # a position that is not verified is forgotten this much more slowly
PRIOR_RATE = 0.75
PRIOR_WEIGHT = 8.0  # pseudo-samples behind the prior, or behind the position before
RATIO_WEIGHT = 0.02  # step of the learned ratio between neighbouring positions
RATIO_BOUNDS = (0.1, 1.2)
MAX_RATE = 0.999


@dataclass(slots=True)
class ClassAcceptance:
    """State of one class; lists have one entry per position."""

    max_k: int
    trials: list[float] = field(init=False)
    hits: list[float] = field(init=False)
    short_trials: list[float] = field(init=False)
    short_hits: list[float] = field(init=False)
    ratios: list[float] = field(init=False)  # rate of a position over that of the one before, slowly learned
    changes: int = 0
    _rates: list[float] | None = None
    _expected: list[float] | None = None

    def __post_init__(self) -> None:
        self.trials = [0.0] * self.max_k
        self.hits = [0.0] * self.max_k
        self.short_trials = [0.0] * self.max_k
        self.short_hits = [0.0] * self.max_k
        self.ratios = [1.0] * self.max_k

    def observe(self, rows: int, reached: Sequence[int], accepted: Sequence[int]) -> None:
        """Add `rows` requests: how many reached (and had verified) each position, how many accepted it."""
        self._rates = self._expected = None
        keep = exp(-min(rows / WINDOW_SAMPLES, 1.0 / WINDOW_STEPS))
        keep_short = exp(-min(rows / SHORT_SAMPLES, 1.0 / SHORT_STEPS))
        keep_stale = keep ** (1.0 / STALE_SLOWDOWN)
        trials, hits = self.trials, self.hits
        short_trials, short_hits = self.short_trials, self.short_hits
        for j in range(self.max_k):
            new = reached[j]
            if not new:
                trials[j] *= keep_stale
                hits[j] *= keep_stale
                self.ratios[j] += (1.0 - self.ratios[j]) * (1.0 - keep_stale)
                continue
            trials[j] = trials[j] * keep + new
            hits[j] = hits[j] * keep + accepted[j]
            short_trials[j] = short_trials[j] * keep_short + new
            short_hits[j] = short_hits[j] * keep_short + accepted[j]
            if self._changed(j):
                self._restart_from(j)
            if j and trials[j] > PRIOR_WEIGHT and trials[j - 1] > PRIOR_WEIGHT and hits[j - 1] > 0:
                ratio = hits[j] / trials[j] / (hits[j - 1] / trials[j - 1])
                ratio = min(max(ratio, RATIO_BOUNDS[0]), RATIO_BOUNDS[1])
                self.ratios[j] += RATIO_WEIGHT * (ratio - self.ratios[j])

    def _changed(self, j: int) -> bool:
        count = self.short_trials[j]
        if count < CHANGE_MIN_SAMPLES or self.trials[j] <= 2.0 * count:
            return False
        pooled = (self.hits[j] + 1.0) / (self.trials[j] + 2.0)
        deviation = self.short_hits[j] / count - pooled
        return abs(deviation) > CHANGE_SIGMAS * sqrt(pooled * (1.0 - pooled) / count)

    def _restart_from(self, j: int) -> None:
        """Trust the short window at j; deeper positions keep their ratio and lose their weight."""
        self.changes += 1
        self.trials[j], self.hits[j] = self.short_trials[j], self.short_hits[j]
        for deeper in range(j + 1, self.max_k):
            self._shrink(deeper, PRIOR_WEIGHT / 4.0)

    def _shrink(self, j: int, weight: float) -> None:
        if self.trials[j] > weight:
            scale = weight / self.trials[j]
            self.trials[j] *= scale
            self.hits[j] *= scale

    def discount(self, weight: float) -> None:
        """Let estimates weigh at most `weight` samples: they are old, fresh ones must count."""
        self._rates = self._expected = None
        for j in range(self.max_k):
            self._shrink(j, weight)
            self.short_trials[j] = self.short_hits[j] = 0.0

    def rates(self) -> list[float]:
        """Acceptance probability of each position given all earlier ones were accepted."""
        if self._rates is None:
            rates = []
            expectation = PRIOR_RATE
            for j in range(self.max_k):
                prior = expectation * (self.ratios[j] if j else 1.0)
                rate = (self.hits[j] + PRIOR_WEIGHT * prior) / (self.trials[j] + PRIOR_WEIGHT)
                expectation = min(rate, MAX_RATE)
                rates.append(expectation)
            self._rates = rates
        return self._rates

    def expected(self) -> list[float]:
        """Expected tokens per request and step, bonus included, for K = 0 .. max_k."""
        if self._expected is None:
            survival, total, expected = 1.0, 1.0, [1.0]
            for rate in self.rates():
                survival *= rate
                total += survival
                expected.append(total)
            self._expected = expected
        return self._expected

    def rate_variance(self, j: int) -> float:
        """Variance of the estimate of rates()[j]."""
        rate = self.rates()[j]
        return rate * (1.0 - rate) / (self.trials[j] + PRIOR_WEIGHT)


class Acceptance:
    """Estimates of all classes, fed by observations; unusable rows are counted and dropped."""

    def __init__(self, max_k: int) -> None:
        self.max_k = max_k
        self.classes = tuple(ClassAcceptance(max_k) for _ in RequestClass)
        self.samples = 0
        self.dropped = 0

    def observe(self, observation: StepObservation) -> tuple[int, int]:
        """Take in one step; return (rows used, draft tokens accepted in them)."""
        accepted = np.asarray(observation.accepted)
        if observation.k > self.max_k:
            raise ValueError(
                f"k: {observation.k} exceeds the largest tier {self.max_k}; add it to the controller's tiers"
            )
        usable = usable_rows(observation)
        used = int(np.count_nonzero(usable))
        self.dropped += accepted.size - used
        if not used or not observation.k:
            return used, 0
        self.samples += used
        width = self.max_k + 2
        good = accepted[usable].astype(np.int64)
        key = good
        if observation.verified is None:
            reach = np.minimum(good + 1, observation.k)
        else:
            reach = np.minimum(good + 1, observation.verified[usable])
        if observation.classes is not None:
            offset = observation.classes[usable].astype(np.int64) * width
            key, reach = good + offset, reach + offset
        size = width * len(self.classes)
        got = np.bincount(key, minlength=size).tolist()
        saw = np.bincount(reach, minlength=size).tolist()
        total = 0
        for index, state in enumerate(self.classes):
            block = got[index * width : (index + 1) * width]
            rows = sum(block)
            if rows:
                hits = _at_least(block)
                state.observe(rows, _at_least(saw[index * width : (index + 1) * width]), hits)
                total += sum(hits)
        return used, total

    def seed(self, request_class: RequestClass, rates: Sequence[float], weight: float) -> None:
        """Start a class from known rates [positions] worth `weight` samples (a PD acceptance prior)."""
        if len(rates) > self.max_k or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ValueError(
                f"rates: needs at most {self.max_k} probabilities in 0..1, got {list(rates)}; "
                "drop the prior, or send the one of this draft"
            )
        state = self.classes[request_class]
        for j, rate in enumerate(rates):
            state.trials[j], state.hits[j] = weight, weight * rate
        state.discount(weight)

    def snapshot(self) -> dict[str, Any]:
        """Plain facts: rates and weights by class."""
        return {
            "samples": self.samples,
            "dropped": self.dropped,
            "classes": {
                name.name.lower(): {
                    "rates": list(state.rates()),
                    "weights": list(state.trials),
                    "changes": state.changes,
                }
                for name, state in zip(RequestClass, self.classes, strict=True)
            },
        }


def usable_rows(observation: StepObservation) -> BoolArray:
    """Rows [R] that may be learnt from: valid, and 0 <= accepted <= verified (false for NaN)."""
    accepted = np.asarray(observation.accepted)
    limit: int | IntArray = observation.k if observation.verified is None else observation.verified
    usable: BoolArray = (accepted >= 0) & (accepted <= limit)
    if observation.valid is not None:
        usable &= observation.valid
    return usable


def _at_least(histogram: Sequence[int]) -> list[int]:
    """From counts of 0, 1, 2, ... to counts of >= 1, >= 2, ..."""
    totals, running = [], 0
    for count in reversed(histogram[1:]):
        running += count
        totals.append(running)
    return totals[::-1]
