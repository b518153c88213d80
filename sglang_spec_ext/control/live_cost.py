"""The cost table corrected by serving: residuals of the target pass, noise, and a report of drift.

The start-up profile is a prior. Each step's measured time gives a log ratio of reality to the table, which
`size_filter.py` divides between all sizes and the one that ran. A known size whose time moves is a drift: nothing is
learnt from its first steps, and if it lasts, all sizes shift.
"""

from collections import Counter
from dataclasses import dataclass, field
from math import exp, inf, isfinite, log, sqrt
from typing import Any

import numpy as np

from sglang_spec_ext.control.cost import CostTable
from sglang_spec_ext.control.size_filter import Knot, Size, SizeFilter
from sglang_spec_ext.records import FloatArray, IntArray

WINDOW_STEPS = 200  # of the exponential windows of the draft's ratio and of the noise
LOOKUPS = 4096  # table lookups that are kept
SURPRISE_STEPS = 16  # of the fast window that notices drift after correction
DRIFT_SIGMAS = 4.0
DRIFT_FLOOR = 0.03  # a smaller standing error than 3 % is not worth a warning
SETTLING_STEPS = 8  # before these, any error may be bias, and noise is not known but taken for EARLY_SD
EARLY_SD = 0.1
CLIP = 0.5  # largest log ratio one step may bring in once noise is known: a stall is no trend


@dataclass(slots=True)
class LiveCost:
    """A cost table and its online correction."""

    table: CostTable
    sizes: SizeFilter = field(default_factory=SizeFilter)  # log ratio of measured to tabulated target seconds
    draft_ratio: float = 0.0  # log ratio for the draft
    variance: float = 0.0  # of one step's log ratio
    surprise: float = 0.0  # fast mean of what correction still misses
    steps: int = 0
    draft_steps: int = 0
    dropped: int = 0
    shifts: int = 0  # lasting changes of all times together
    _drift: list[float] = field(default_factory=list)  # errors of the drift under way
    _steps_at: Counter[Knot] = field(default_factory=Counter)
    _looked_up: dict[tuple[int, int, int, int], float] = field(default_factory=dict)
    _ratios: dict[tuple[int, int], float] = field(default_factory=dict)  # corrections until the next observation

    @property
    def fixed_s(self) -> float:
        """See StepCost."""
        return self.table.fixed_s

    def draft_s(self, k: int, batch: int, context_len: int = 0) -> float:
        """Corrected seconds of drafting."""
        return self._tabulated(k, -1, batch, self.table.bucket_index(context_len)) * exp(self.draft_ratio)

    def verify_s(self, tokens: int, batch: int, context_len: int = 0) -> float:
        """Corrected seconds of a target pass."""
        bucket = self.table.bucket_index(context_len)
        ratio = self._ratios.get((bucket, tokens))
        if ratio is None:
            ratio = exp(self.sizes.ratio(Size.of(bucket, tokens), self.steps))
            self._ratios[bucket, tokens] = ratio
        return self._tabulated(-1, tokens, batch, bucket) * ratio

    def known(self, tokens: int, context_len: int = 0) -> bool:
        """Return whether serving has measured this size, or one near it, for SURPRISE_STEPS steps."""
        return self._steps_at[self._size(tokens, context_len).nearest] >= SURPRISE_STEPS

    def spread(self, tokens: int, others: int, context_len: int = 0) -> float:
        """Return the standard deviation of the log ratio of two sizes' times, beyond what the table says."""
        return self.sizes.spread(self._size(tokens, context_len), self._size(others, context_len), self.steps)

    def _size(self, tokens: int, context_len: int) -> Size:
        return Size.of(self.table.bucket_index(context_len), tokens)

    def _tabulated(self, k: int, tokens: int, batch: int, bucket: int) -> float:
        """Look up draft (k >= 0) or target (tokens >= 0) seconds; the same sizes come back every step."""
        key = (k, tokens, batch, bucket)
        seconds = self._looked_up.get(key)
        if seconds is None:
            if len(self._looked_up) >= LOOKUPS:
                self._looked_up.clear()
            curves = self.table.buckets[bucket]
            seconds = curves.draft_s(k, batch) if k >= 0 else curves.verify_s(tokens, batch)
            self._looked_up[key] = seconds
        return seconds

    def verify_many(self, tokens: IntArray, batch: int, context_len: int = 0) -> FloatArray:
        """Corrected seconds [N] of target passes over tokens [N]."""
        bucket = self.table.bucket_index(context_len)
        ratios = np.exp(self.sizes.ratio_many(bucket, tokens, self.steps))
        result: FloatArray = self.table.verify_many(tokens, batch, context_len) * ratios
        return result

    def observe(
        self,
        *,
        k: int,
        tokens: int,
        batch: int,
        context_len: int = 0,
        draft_s: float | None = None,
        verify_s: float | None = None,
        step_s: float | None = None,
    ) -> None:
        """Take in one step's times; unusable ones are counted and dropped.

        Where only `step_s` is known, what the table does not explain is laid to the target pass.
        """
        bucket = self.table.bucket_index(context_len)
        if draft_s is not None:
            tabulated = self._tabulated(k, -1, batch, bucket)
            if _usable(draft_s) and tabulated > 0:
                self.draft_steps += 1
                weight = max(1.0 / self.draft_steps, 1.0 / WINDOW_STEPS)
                self.draft_ratio += weight * (log(draft_s / tabulated) - self.draft_ratio)
            elif not _usable(draft_s):
                self.dropped += 1
        if verify_s is None and step_s is not None:
            verify_s = step_s - self.table.fixed_s - self._tabulated(k, -1, batch, bucket) * exp(self.draft_ratio)
        if verify_s is None:
            return
        if not _usable(verify_s):
            self.dropped += 1
            return
        size = Size.of(bucket, tokens)
        raw = log(verify_s / self._tabulated(-1, tokens, batch, bucket)) - self.sizes.ratio(size, self.steps)
        self._learn(raw, size)

    def _learn(self, raw: float, size: Size) -> None:
        """Take in what one target pass took beyond its prediction, a log ratio."""
        limit = max(CLIP, DRIFT_SIGMAS * sqrt(self.variance)) if self.steps >= SETTLING_STEPS else inf
        error = min(max(raw, -limit), limit)
        self._ratios.clear()
        self.steps += 1
        self._steps_at[size.nearest] += 1
        if self._steps_at[size.nearest] > SURPRISE_STEPS:  # a new size may be off by itself; a known one is news
            self.surprise += (error - self.surprise) / SURPRISE_STEPS
        if self.drifting:
            self._wait_for_a_shift(raw)
            return
        self._drift.clear()
        noise = max(self.variance, EARLY_SD**2) if self.steps <= SETTLING_STEPS else self.variance
        self.sizes.learn(size, error, noise=noise, step=self.steps)
        if self.steps > 1:  # the first error is bias, not noise
            weight = max(1.0 / (self.steps - 1), 1.0 / WINDOW_STEPS)
            self.variance += weight * (error * error - self.variance)

    def _wait_for_a_shift(self, error: float) -> None:
        """Learn nothing from the first steps of a drift; if it lasts, all sizes have shifted alike."""
        self._drift.append(error)
        if len(self._drift) == SURPRISE_STEPS:
            self.sizes.shift(sorted(self._drift)[SURPRISE_STEPS // 2])
            self.shifts += 1
            self.surprise = 0.0
            self._drift.clear()

    @property
    def noise(self) -> float:
        """Standard deviation of one step's log time around its prediction."""
        return sqrt(self.variance)

    @property
    def standard_error(self) -> float:
        """Standard error of a corrected time; the predicted gain of a switch carries it twice."""
        return self.noise / sqrt(max(1.0, 2.0 * min(self.steps, WINDOW_STEPS) - 1.0))

    @property
    def drifting(self) -> bool:
        """Whether reality moves faster than the correction: then the margin of a switch is widened."""
        limit = max(DRIFT_FLOOR, DRIFT_SIGMAS * self.noise / sqrt(SURPRISE_STEPS))
        return abs(self.surprise) > limit

    def report(self) -> dict[str, Any]:
        """Plain facts on table against reality: ratios are measured over tabulated seconds."""
        worst = max(map(abs, self.sizes.ratios(self.steps)), default=0.0)
        return {
            "steps": self.steps,
            "dropped": self.dropped,
            "verify_ratio": exp(self.sizes.common),
            "draft_ratio": exp(self.draft_ratio),
            "worst_ratio": exp(worst),
            "noise": self.noise,
            "standing_error": self.surprise,
            "drifting": self.drifting,
            "shifts": self.shifts,
        }


def _usable(seconds: float) -> bool:
    return isfinite(seconds) and seconds > 0
