"""Probing: single steps at a K above the one in use, to measure what is not measured there.

At K = 0 nothing is drafted, so nothing is accepted and a recovery would go unseen; at a small K the same
holds for later positions. Never more than `max_fraction` of any WINDOW_PROBES / max_fraction steps in a row
are probe steps. The interval grows by a factor after every probe that found nothing, so it is a fixed share
of the time spent in vain and a recovery is late by about that share. A probe that found something is
repeated at once, and a batch that has halved or doubled since the last such change starts again with a probe at once.
"""

from collections import deque
from dataclasses import dataclass
from typing import Any

WINDOW_PROBES = 10  # probe steps that may follow each other before their share is spent


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """Limits of probing."""

    max_fraction: float = 0.01
    growth: float = 1.02  # of the interval after a probe that found nothing
    max_backoff: float = 8.0  # longest interval, in intervals of 1 / max_fraction steps
    steps: int = 1  # of one probe; more where the draft needs steps to catch up

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_fraction <= 0.5:
            raise ValueError(f"probe max_fraction: must be in 0..0.5, got {self.max_fraction}; use 0.01")
        if not (1.0 < self.growth <= 4.0 and 1.0 <= self.max_backoff < float("inf")):
            raise ValueError(
                f"probe growth must be in 1..4 and max_backoff >= 1, got {self.growth} and {self.max_backoff}"
            )
        if not 1 <= self.steps <= WINDOW_PROBES:
            raise ValueError(f"probe steps: must be in 1..{WINDOW_PROBES}, got {self.steps}")


class Probe:
    """Keeps the budget and the rhythm of probes; `tick` is called once in every step."""

    def __init__(self, settings: ProbeSettings) -> None:
        self.settings = settings
        self.probes = 0
        self.promising = False
        self._tick = 0
        self._recent: deque[int] = deque(maxlen=WINDOW_PROBES // settings.steps)  # ticks of the last probes
        self._last = 0
        self._backoff = 1.0
        self._left = 0
        self._urgent = False
        self._size: int | None = None  # batch of the last change

    def tick(self, batch: int) -> bool:
        """Whether a probe may start in this step; `batch` is the number of decode requests."""
        self._tick += 1
        fraction, recent = self.settings.max_fraction, self._recent
        # measured from that batch and not by fixed bins: one that flips across an edge would spend the whole share
        if self._size is None or not self._size < 2 * batch < 4 * self._size:
            self._urgent = self._size is not None
            self._size, self._backoff = batch, 1.0
        if not fraction:
            return False
        if len(recent) == recent.maxlen and self._tick - recent[0] < WINDOW_PROBES / fraction:
            return False
        waited = (self._tick - self._last) * fraction / self.settings.steps
        return self._urgent or self.promising or waited >= self._backoff

    def start(self) -> None:
        """Begin a probe in this step."""
        self._recent.append(self._tick)
        self._last, self._urgent = self._tick, False
        self._left = self.settings.steps - 1
        self.probes += 1

    def join(self) -> None:
        """Count a step that another rank probes in: the share is the group's."""
        self._recent.append(self._tick)
        self._last, self._urgent = self._tick, False

    def proceed(self) -> bool:
        """Whether this step belongs to a probe of several steps that is under way."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def report(self, promising: bool) -> None:
        """Tell what the estimates say after a probe."""
        self.promising = promising
        longer = min(self._backoff * self.settings.growth, self.settings.max_backoff)
        self._backoff = 1.0 if promising else longer

    def snapshot(self) -> dict[str, Any]:
        """Plain facts."""
        return {"probes": self.probes, "backoff": self._backoff, "promising": self.promising}
