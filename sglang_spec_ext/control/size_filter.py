"""What serving says about the cost table: one log ratio for all sizes, and one more for each size.

A Kalman filter over c, common to all sizes, and d_i, the table's own error at size i (Kalman 1960; the ladder of a
handful of sizes keeps it small). A step of size i measures c + d_i with noise. Three things follow that separate
averages do not give: an error at a size seen for the first time is mostly that size's own; an error at a size that is
known is mostly a change of the machine, which all others share, used or not; and how well two sizes can be compared
is a number, so that a size of which nothing is known can be told from one that was measured.
"""

from math import exp, sqrt

import numpy as np

SizeBin = tuple[int, int]  # context bucket, power of two of the tokens

COMMON_SD = 1.0  # what is believed of c before the first step: a profile may be off by a factor
SIZE_SD = 0.08  # and of d_i: the sizes of one profile are comparable to within this
FADE_STEPS = 20_000  # after which a size that was not visited is believed a third
WINDOW_STEPS = 200  # c follows changes within about these steps
NOISE_FLOOR = 1e-4  # variance of a step: no clock and no machine is steadier than 1 %


class SizeFilter:
    """Estimates of c and of all d_i with their covariance."""

    def __init__(self) -> None:
        self._places: dict[SizeBin, int] = {}
        self._visited: list[int] = [0]  # step of the last visit, by place
        self._mean = np.zeros(1)
        self._cov = np.full((1, 1), COMMON_SD**2)

    @property
    def common(self) -> float:
        """Log ratio that all sizes share."""
        return float(self._mean[0])

    def ratio(self, size: SizeBin, step: int) -> float:
        """Return the log ratio of measured to tabulated seconds at a size, as believed at a step."""
        place = self._places.get(size)
        if place is None:
            return self.common
        return self.common + float(self._mean[place]) * self._kept(place, step)

    def spread(self, one: SizeBin, other: SizeBin, step: int) -> float:
        """Return the standard deviation of the difference between the log ratios of two sizes."""
        if one == other:
            return 0.0
        places = [self._places.get(size) for size in (one, other)]
        variance, kept = 0.0, []
        for place in places:
            share = 0.0 if place is None else self._kept(place, step)
            own = 0.0 if place is None else float(self._cov[place, place])
            variance += share * share * own + (1.0 - share * share) * SIZE_SD**2
            kept.append(share)
        if None not in places:
            variance -= 2.0 * kept[0] * kept[1] * float(self._cov[places[0], places[1]])
        return sqrt(max(0.0, variance))

    def learn(self, size: SizeBin, error: float, *, noise: float, step: int) -> None:
        """Take in what a step of a size took beyond `ratio`, a log ratio; `noise` is its variance."""
        place = self._places.get(size)
        if place is None:
            place = self._add(size)
        else:
            self._fade(place, step)
        self._visited[place] = step
        noise, cov = max(noise, NOISE_FLOOR), self._cov
        cov[0, 0] += noise / WINDOW_STEPS**2
        gains = cov[0] + cov[place]
        total = float(gains[0] + gains[place]) + noise
        self._mean += gains * (error / total)
        cov -= gains[:, None] * (gains / total)

    def shift(self, amount: float) -> None:
        """Move all sizes alike."""
        self._mean[0] += amount

    def _add(self, size: SizeBin) -> int:
        place = self._places[size] = len(self._mean)
        self._visited.append(0)
        self._mean = np.append(self._mean, 0.0)
        self._cov = np.pad(self._cov, (0, 1))
        self._cov[place, place] = SIZE_SD**2
        return place

    def _kept(self, place: int, step: int) -> float:
        return exp((self._visited[place] - step) / FADE_STEPS)

    def _fade(self, place: int, step: int) -> None:
        """Let what is known of a size that was away give way to what was believed before it was known."""
        kept = self._kept(place, step - 1)
        if kept < 1.0:
            self._mean[place] *= kept
            self._cov[place] *= kept
            self._cov[:, place] *= kept
            self._cov[place, place] += (1.0 - kept * kept) * SIZE_SD**2
