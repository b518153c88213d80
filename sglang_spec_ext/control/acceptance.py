"""How likely the next draft token is accepted: per class of requests, per position, decayed.

rate[j] is the probability that position j + 1 is accepted given that all earlier ones were; survival is
their running product and expected tokens are 1 (the bonus) plus the sum of survivals. A sample counts only
at positions that were reached and verified, so it carries the K it was drafted at by itself. Two windows
run side by side: when the short one contradicts the long one, the long one is dropped, so that a change of
load shows within some steps while a steady load is estimated from some hundred samples.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate
from math import exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_spec_ext.records import BoolArray, IntArray, RequestClass, StepObservation

WINDOW_SAMPLES = 512.0  # memory of the long window in requests ...
WINDOW_STEPS = 32.0  # ... but never less than these steps
SHORT_SAMPLES = 96.0
SHORT_STEPS = 4.0
TEST_INTERVAL = 4  # observations between comparisons of the windows
CHANGE_NATS = 8.0  # evidence that drops the long window: 4 sigmas
WARY_NATS = 3.5  # the same after a phase at K = 0, where samples are few and the load may have changed
WARY_WEIGHT = 16.0  # samples that estimates from before such a phase may weigh
CERTAIN = 0.98  # an acceptance that only hope would assume
RESTART_WEIGHT = 16.0  # samples of the short window that are kept after a change
STALE_SLOWDOWN = 8.0  # a position that is not verified is forgotten this much more slowly
PRIOR_RATE = 0.75
PRIOR_WEIGHT = 8.0  # pseudo-samples behind the prior, or behind the position before
RATIO_WEIGHT = 0.08  # step of the learned ratio between neighbouring positions
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
    ratios: list[float] = field(init=False)  # rate over that of the position before, slowly learned; [0] is 1
    level: float = PRIOR_RATE  # rate of position 1 to fall back on where samples are few
    changes: int = 0
    wary: bool = False
    _observations: int = 0
    _rates: list[float] | None = None
    _expected: list[float] | None = None
    _optimistic: list[float] | None = None

    def __post_init__(self) -> None:
        self.trials = [0.0] * self.max_k
        self.hits = [0.0] * self.max_k
        self.short_trials = [0.0] * self.max_k
        self.short_hits = [0.0] * self.max_k
        self.ratios = [1.0] * self.max_k

    def observe(self, rows: int, reached: Sequence[float], accepted: Sequence[float]) -> None:
        """Add `rows` requests: how many reached (and had verified) each position, how many accepted it."""
        self._rates = self._expected = self._optimistic = None
        keep, keep_short, keep_stale = _kept(rows)
        self._observations += 1
        # the test looks back over a whole window, so it may come late; not where single samples count
        test = self.wary or not self._observations % TEST_INTERVAL
        trials, hits = self.trials, self.hits
        short_trials, short_hits = self.short_trials, self.short_hits
        seen = self.max_k - reached.count(0)  # counts never rise along the positions
        for j in range(seen):
            new, good = reached[j], accepted[j]
            trials[j] = trials[j] * keep + new
            hits[j] = hits[j] * keep + good
            short_trials[j] = short_trials[j] * keep_short + new
            short_hits[j] = short_hits[j] * keep_short + good
        for j in range(seen, self.max_k):
            trials[j] *= keep_stale
            hits[j] *= keep_stale
            self.ratios[j] = 1.0 + (self.ratios[j] - 1.0) * keep
        if test:
            self._compare(seen)
        if trials[0] > 4.0 * PRIOR_WEIGHT:
            self.level = hits[0] / trials[0]

    def _compare(self, seen: int) -> None:
        """Compare the windows of the positions just seen, and each position with the one before."""
        trials, hits = self.trials, self.hits
        for j in range(seen):
            if self._changed(j):
                self._restart_from(j)
            if j and trials[j] > PRIOR_WEIGHT and trials[j - 1] > PRIOR_WEIGHT and hits[j - 1] > 0:
                ratio = hits[j] / trials[j] / (hits[j - 1] / trials[j - 1])
                ratio = min(max(ratio, RATIO_BOUNDS[0]), RATIO_BOUNDS[1])
                self.ratios[j] += RATIO_WEIGHT * (ratio - self.ratios[j])

    def _changed(self, j: int) -> bool:
        """Whether the short window contradicts what came before it: likelihood ratio in nats."""
        count = self.short_trials[j]
        older = self.trials[j] - count
        if older < 1.0:
            return False
        recent = self.short_hits[j] / count
        before = min(max((self.hits[j] - self.short_hits[j]) / older, 0.0), 1.0)
        pooled = (self.hits[j] + 0.5) / (self.trials[j] + 1.0)
        nats = count * _divergence(recent, pooled) + older * _divergence(before, pooled)
        return nats > (WARY_NATS if self.wary else CHANGE_NATS)

    def _restart_from(self, j: int) -> None:
        """Trust the short window at j a little, for it still holds older samples; the next ones decide.

        Deeper positions keep their ratio and lose their weight.
        """
        self.changes += 1
        scale = min(1.0, RESTART_WEIGHT / self.short_trials[j])
        self.short_trials[j] *= scale
        self.short_hits[j] *= scale
        self.trials[j], self.hits[j] = self.short_trials[j], self.short_hits[j]
        if j == 0:
            self.level = (self.hits[0] + 1.0) / (self.trials[0] + 2.0)
        for deeper in range(j + 1, self.max_k):
            weight = PRIOR_WEIGHT / 4.0
            if self.trials[deeper] > weight:
                self.hits[deeper] *= weight / self.trials[deeper]
                self.trials[deeper] = weight

    def grow_wary(self) -> None:
        """Prepare for the first samples after a pause: the load may have changed meanwhile."""
        self.wary = True
        self._rates = self._expected = self._optimistic = None
        for j in range(self.max_k):
            self.short_trials[j] = self.short_hits[j] = 0.0
            if self.trials[j] > WARY_WEIGHT:
                self.hits[j] *= WARY_WEIGHT / self.trials[j]
                self.trials[j] = WARY_WEIGHT

    def restart(self, j: int, trials: float, hits: float) -> None:
        """Replace what is known of one position."""
        self.trials[j], self.hits[j] = trials, hits
        self.short_trials[j] = self.short_hits[j] = 0.0
        self._rates = self._expected = self._optimistic = None

    @property
    def improving(self) -> bool:
        """Whether the few latest samples of position 1 hint at better acceptance than estimated."""
        count = self.short_trials[0]
        if not count:
            return False
        recent, rate = self.short_hits[0] / count, self.rates()[0]
        return recent > rate and count * _divergence(recent, rate) > 1.0

    def optimistic(self) -> list[float]:
        """`expected` if every position without enough samples were accepted nearly always."""
        if self._optimistic is None:
            self._estimate()
        assert self._optimistic is not None
        return self._optimistic

    def rates(self) -> list[float]:
        """Acceptance probability of each position given all earlier ones were accepted."""
        if self._rates is None:
            self._estimate()
        assert self._rates is not None
        return self._rates

    def expected(self) -> list[float]:
        """Expected tokens per request and step, bonus included, for K = 0 .. max_k."""
        if self._expected is None:
            self._estimate()
        assert self._expected is not None
        return self._expected

    def _estimate(self) -> None:
        """Estimate each position from its samples and, with the weight of the prior, from the one before."""
        rates, expected, optimistic = [], [1.0], [1.0]
        survival, total, hoped, hoped_total, rate = 1.0, 1.0, 1.0, 1.0, self.level
        for ratio, hits, trials in zip(self.ratios, self.hits, self.trials, strict=True):
            rate = (hits + PRIOR_WEIGHT * rate * ratio) / (trials + PRIOR_WEIGHT)
            rate = rate if rate < MAX_RATE else MAX_RATE  # noqa: FURB136 - min() costs more than the rest
            survival *= rate
            total += survival
            hoped *= rate if trials >= PRIOR_WEIGHT else CERTAIN
            hoped_total += hoped
            rates.append(rate)
            expected.append(total)
            optimistic.append(hoped_total)
        self._rates, self._expected, self._optimistic = rates, expected, optimistic

    def rate_variance(self, j: int) -> float:
        """Variance of rates()[j] from its samples; without samples there is no noise, only ignorance."""
        rate, weight = self.rates()[j], self.trials[j] + PRIOR_WEIGHT
        return rate * (1.0 - rate) / weight * (self.trials[j] / weight)


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
        k = observation.k
        if k > self.max_k:
            raise ValueError(f"k: {k} exceeds the largest tier {self.max_k}; add it to the controller's tiers")
        usable = usable_rows(observation)
        used = int(np.count_nonzero(usable))
        if used != accepted.size:
            self.dropped += accepted.size - used
            accepted = accepted[usable]
        if not used or not k:
            return used, 0
        self.samples += used
        got = self._histograms(accepted, observation, usable)
        reach = None
        if observation.verified is not None:
            limit = observation.verified if used == usable.size else observation.verified[usable]
            reach = self._histograms(np.minimum(accepted + 1, limit), observation, usable)
        total = 0
        for index, block in enumerate(got):
            hits = _at_least(block)
            rows = block[0] + hits[0]
            if rows:
                if reach is None:  # everybody verified K: whoever took j reached j + 1
                    reached = [rows, *hits[:-1]]
                    reached[k:] = [0] * (self.max_k - k)
                else:
                    reached = _at_least(reach[index])
                self.classes[index].observe(rows, reached, hits)
                total += sum(hits)
        return used, total

    def _histograms(
        self, values: NDArray[Any], observation: StepObservation, usable: BoolArray
    ) -> list[list[int]]:
        """Count the values 0 .. max_k of usable rows, for each class."""
        width = self.max_k + 1
        keys = values if values.dtype.kind in "iu" else values.astype(np.int64)
        if observation.classes is None:
            return [np.bincount(keys, minlength=width).tolist()]
        classes = observation.classes if len(keys) == len(usable) else observation.classes[usable]
        flat = np.bincount(keys + classes * width, minlength=width * len(self.classes)).tolist()
        return [flat[start : start + width] for start in range(0, len(flat), width)]

    def seed(self, request_class: RequestClass, rates: Sequence[float], weight: float) -> None:
        """Start a class from known rates [positions] worth `weight` samples (a PD acceptance prior)."""
        if len(rates) > self.max_k or not all(0.0 <= rate <= 1.0 for rate in rates):
            raise ValueError(
                f"rates: needs at most {self.max_k} probabilities in 0..1, got {list(rates)}; "
                "drop the prior, or send the one of this draft"
            )
        state = self.classes[request_class]
        for j, rate in enumerate(rates):
            state.restart(j, weight, weight * rate)

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
    whole = accepted.dtype == np.int64  # then one comparison does, for a negative count is a huge unsigned one
    usable: BoolArray = accepted.view(np.uint64) <= limit if whole else (accepted >= 0) & (accepted <= limit)
    if observation.valid is not None:
        usable &= observation.valid
    return usable


@cache
def _kept(rows: int) -> tuple[float, float, float]:
    """What `rows` new requests leave of the long window, the short one, and of a position not verified."""
    long = min(rows / WINDOW_SAMPLES, 1.0 / WINDOW_STEPS)
    short = min(rows / SHORT_SAMPLES, 1.0 / SHORT_STEPS)
    return exp(-long), exp(-short), exp(-long / STALE_SLOWDOWN)


def _divergence(recent: float, rate: float) -> float:
    """Nats by which one sample of rate `recent` speaks against `rate`."""
    nats = recent * log(recent / rate) if recent > 0.0 else 0.0
    return nats + ((1.0 - recent) * log((1.0 - recent) / (1.0 - rate)) if recent < 1.0 else 0.0)


def _at_least(histogram: Sequence[int]) -> list[int]:
    """From counts of 0, 1, 2, ... to counts of >= 1, >= 2, ..."""
    return list(accumulate(histogram[:0:-1]))[::-1]
