"""Time as a function of one size: a staircase inside captured graph sizes, straight lines above.

A captured graph pads every size up to the next captured one, so inside the captured range time is the time of
the next point at or above. Leaving the graphs is a jump, so lines are drawn only between points above the
range. Beyond the last point a unit is never cheaper than an average unit there: a table that ends early must
not make extra tokens look free.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite

import numpy as np

from sglang_spec_ext.records import FloatArray, IntArray


class CostTableError(ValueError):
    """A cost table that must not be used: the message names the field, the rule, the value and the cure."""


def check_points(
    label: str, points: Sequence[int], seconds: Sequence[float], *, zero_ok: bool = False
) -> None:
    """Raise CostTableError unless sizes are sorted and positive and times finite, positive and rising.

    `zero_ok` admits zero seconds, for a part that is added to another one.
    """
    if len(points) != len(seconds):
        raise CostTableError(
            f"{label}: {len(points)} sizes but {len(seconds)} times; the table is truncated, measure it again"
        )
    if not points:
        raise CostTableError(f"{label}: no points; measure at least two sizes")
    if points[0] < 1 or any(b <= a for a, b in pairwise(points)):
        raise CostTableError(f"{label}: sizes must be >= 1 and strictly increasing, got {list(points)}")
    for size, value in zip(points, seconds, strict=True):
        if not isfinite(value) or value < 0 or (value == 0 and not zero_ok):
            raise CostTableError(
                f"{label}: seconds at size {size} must be finite and > 0, got {value}; measure it again"
            )
    for (size, value), later in zip(zip(points, seconds, strict=True), seconds[1:], strict=False):
        if later < value:
            raise CostTableError(
                f"{label}: seconds fall after size {size}, {value} -> {later}; build the table from samples, "
                "which smooths noise"
            )


def isotonic(values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Return the non-decreasing sequence nearest to `values` in weighted least squares (pool adjacent)."""
    blocks: list[tuple[float, float, int]] = []  # mean, weight, length
    for index, value in enumerate(values):
        blocks.append((value, 1.0 if weights is None else weights[index], 1))
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean_b, weight_b, length_b = blocks.pop()
            mean_a, weight_a, length_a = blocks.pop()
            weight = weight_a + weight_b
            mean = (mean_a * weight_a + mean_b * weight_b) / weight
            blocks.append((mean, weight, length_a + length_b))
    return [mean for mean, _, length in blocks for _ in range(length)]


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds by size. `captured_max` is the largest captured graph size, 0 without graphs."""

    points: tuple[int, ...]
    seconds: tuple[float, ...]
    captured_max: int = 0
    # first size from which lines are drawn; at or below it the next point at or above counts
    _line_start: float = field(init=False, repr=False, compare=False)
    _tail_slope: float = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.captured_max and self.captured_max not in self.points:
            raise CostTableError(
                f"captured_max={self.captured_max} is not a measured size of {list(self.points)}; "
                "measure the largest captured graph"
            )
        above = [p for p in self.points if p > self.captured_max]
        line_start = float(self.points[0] if not self.captured_max else (above or [self.captured_max])[0])
        object.__setattr__(self, "_line_start", line_start)
        slope = self.seconds[-1] / self.points[-1]
        if len(above) > 1:
            rise = self.seconds[-1] - self.seconds[-2]
            slope = max(slope, rise / (self.points[-1] - self.points[-2]))
        object.__setattr__(self, "_tail_slope", slope)

    @property
    def largest(self) -> int:
        """Largest measured size."""
        return self.points[-1]

    def at(self, size: int) -> float:
        """Return the seconds at one size."""
        points, seconds = self.points, self.seconds
        if size >= points[-1]:
            return seconds[-1] + (size - points[-1]) * self._tail_slope
        index = bisect_left(points, size)
        if size <= self._line_start or points[index] == size:
            return seconds[index]
        low, high = points[index - 1], points[index]
        return seconds[index - 1] + (seconds[index] - seconds[index - 1]) * (size - low) / (high - low)

    def at_many(self, sizes: IntArray) -> FloatArray:
        """Return the seconds [N] at sizes [N]; equals `at` for each."""
        points = np.asarray(self.points)
        seconds = np.asarray(self.seconds)
        index = np.minimum(np.searchsorted(points, sizes, side="left"), len(points) - 1)
        steps = seconds[index]
        lines = np.interp(sizes, points, seconds)
        tail = np.maximum(sizes - points[-1], 0) * self._tail_slope
        result: FloatArray = np.where(sizes <= self._line_start, steps, lines) + tail
        return result
