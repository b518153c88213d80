"""What serving says about the cost table: one log ratio for all sizes, and one more for each size.

A Kalman filter over c, common to all sizes, and d_i, the table's own error at i, a power of two of tokens (Kalman
1960; a ladder of a handful of sizes keeps it small). Between powers of two errors lie on lines, so that a batch that
grows by one request is not another size. A step of t tokens measures c + (1 - f) d_i + f d_j with noise. Three things
follow that separate averages do not give: an error at a size seen for the first time is mostly that size's own; an
error at a size that is known is mostly a change of the machine, which all others share, used or not; and how well two
sizes can be compared is a number, so that a size of which nothing is known can be told from one that was measured.
"""

from math import exp, frexp, sqrt
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sglang_spec_ext.records import FloatArray, IntArray

Knot = tuple[int, int]  # context bucket, power of two


class Size(NamedTuple):
    """A number of tokens between two knots: `share` of the upper one."""

    lower: Knot
    upper: Knot
    share: float

    @classmethod
    def of(cls, bucket: int, tokens: int) -> "Size":
        """Return the size of `tokens` >= 1 in a context bucket."""
        fraction, power = frexp(tokens)  # tokens = fraction * 2**power with fraction in 0.5..1
        return cls((bucket, power - 1), (bucket, power), 2.0 * fraction - 1.0)

    @property
    def nearest(self) -> Knot:
        """The knot that counts most."""
        return self.lower if self.share < 0.5 else self.upper

    @property
    def weights(self) -> list[tuple[Knot, float]]:
        """Knots that count, with their weights, which sum to 1."""
        if not self.share:
            return [(self.lower, 1.0)]
        return [(self.lower, 1.0 - self.share), (self.upper, self.share)]


COMMON_SD = 1.0  # what is believed of c before the first step: a profile may be off by a factor
SIZE_SD = 0.08  # and of each d_i: the sizes of one profile are comparable to within this
FADE_STEPS = 20_000  # after which a size that was not visited is believed a third
WINDOW_STEPS = 200  # c follows changes within about these steps
NOISE_FLOOR = 1e-4  # variance of a step: no clock and no machine is steadier than 1 %


class SizeFilter:
    """Estimates of c and of all d_i with their covariance."""

    def __init__(self) -> None:
        self._places: dict[Knot, int] = {}
        self._visited: list[int] = [0]  # step of the last visit, by place
        self._mean = np.zeros(1)
        self._cov = np.full((1, 1), COMMON_SD**2)

    @property
    def common(self) -> float:
        """Log ratio that all sizes share."""
        return float(self._mean[0])

    def ratio(self, size: Size, step: int) -> float:
        """Return the log ratio of measured to tabulated seconds at a size, as believed at a step."""
        found = self.common
        for knot, weight in size.weights:
            place = self._places.get(knot)
            if place is not None:
                found += weight * float(self._mean[place]) * self._kept(place, step)
        return found

    def ratio_many(self, bucket: int, tokens: "IntArray", step: int) -> "FloatArray":
        """Return `ratio` [N] of sizes of `tokens` [N] in a context bucket."""
        fraction, power = np.frexp(tokens)
        low, high = int(power.min()) - 1, int(power.max())
        knots = [self.ratio(Size.of(bucket, 1 << knot), step) for knot in range(low, high + 1)]
        result: FloatArray = np.interp(power + 2.0 * fraction - 2.0, np.arange(low, high + 1), knots)
        return result

    def ratios(self, step: int) -> list[float]:
        """Return the log ratios of all knots that were measured."""
        return [self.ratio(Size(knot, knot, 0.0), step) for knot in self._places]

    def spread(self, one: Size, other: Size, step: int) -> float:
        """Return the standard deviation of the difference between the log ratios of two sizes; c cancels in it."""
        row: dict[Knot, float] = dict(one.weights)
        for knot, weight in other.weights:
            row[knot] = row.get(knot, 0.0) - weight
        known, variance = np.zeros(len(self._mean)), 0.0
        for knot, weight in row.items():
            place = self._places.get(knot)
            kept = 0.0 if place is None else self._kept(place, step)
            variance += weight * weight * (1.0 - kept * kept) * SIZE_SD**2
            if place is not None:
                known[place] = weight * kept
        return sqrt(max(0.0, variance + float(known @ self._cov @ known)))

    def learn(self, size: Size, error: float, *, noise: float, step: int) -> None:
        """Take in what a step of a size took beyond `ratio`, a log ratio; `noise` is its variance."""
        row = [(self._visit(knot, step), weight) for knot, weight in size.weights]
        noise, cov = max(noise, NOISE_FLOOR), self._cov
        cov[0, 0] += noise / WINDOW_STEPS**2
        gains = cov[0].copy()
        for place, weight in row:
            gains += weight * cov[place]
        total = noise + float(gains[0]) + sum(weight * float(gains[place]) for place, weight in row)
        self._mean += gains * (error / total)
        cov -= gains[:, None] * (gains / total)

    def shift(self, amount: float) -> None:
        """Move all sizes alike."""
        self._mean[0] += amount

    def _visit(self, knot: Knot, step: int) -> int:
        """Return the place of a knot that a step measures, made or brought up to date."""
        place = self._places.get(knot)
        if place is None:
            place = self._places[knot] = len(self._mean)
            self._visited.append(step)
            self._mean = np.append(self._mean, 0.0)
            self._cov = np.pad(self._cov, (0, 1))
            self._cov[place, place] = SIZE_SD**2
        else:
            self._fade(place, step)
            self._visited[place] = step
        return place

    def _kept(self, place: int, step: int) -> float:
        return exp((self._visited[place] - step) / FADE_STEPS)

    def _fade(self, place: int, step: int) -> None:
        """Let what is known of a knot that was away give way to what was believed before it was known."""
        kept = self._kept(place, step - 1)
        if kept < 1.0:
            self._mean[place] *= kept
            self._cov[place] *= kept
            self._cov[:, place] *= kept
            self._cov[place, place] += (1.0 - kept * kept) * SIZE_SD**2
