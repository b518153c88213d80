"""Probing back up from K = 0, where nothing is accepted because nothing is drafted.

Each step at K = 0 earns `max_fraction` of a probe step, so probing never exceeds that share. The interval
doubles after every probe that found nothing and starts again when the batch changes its bin; what is saved up
during long intervals is spent in a row once a probe succeeds. A probe happens only if drafts that are always
accepted would pay.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """Limits of probing."""

    max_fraction: float = 0.01
    max_backoff: int = 4  # longest interval, in intervals of 1 / max_fraction steps
    steps: int = 1  # of one probe; more where the draft needs steps to catch up

    def __post_init__(self) -> None:
        if not 0.0 <= self.max_fraction <= 0.5:
            raise ValueError(f"probe max_fraction: must be in 0..0.5, got {self.max_fraction}; use 0.01")
        if self.max_backoff < 1 or self.steps < 1:
            raise ValueError(f"probe max_backoff, steps: must be >= 1, got {self.max_backoff}, {self.steps}")


class Probe:
    """Decides which steps at K = 0 draft anyway; one call of `due` per such step."""

    def __init__(self, settings: ProbeSettings) -> None:
        self.settings = settings
        self.probes = 0
        self._credit = 0.0
        self._backoff = 1
        self._left = 0  # steps of the running probe still to come
        self._size_bin = -1

    def due(self, batch: int) -> bool:
        """Whether this step is a probe; `batch` is the number of decode requests."""
        if not self.settings.max_fraction:
            return False
        size_bin = batch.bit_length()
        if size_bin != self._size_bin:
            self._size_bin, self._backoff = size_bin, 1
        if self._left:
            self._left -= 1
            return True
        cost = float(self.settings.steps)
        self._credit = min(self._credit + self.settings.max_fraction, cost * self.settings.max_backoff)
        if self._credit < cost * self._backoff - 1e-9:
            return False
        self._credit -= cost
        self._left = self.settings.steps - 1
        self.probes += 1
        return True

    def report(self, promising: bool) -> None:
        """Tell what the estimates say after a probe: promising ones are repeated, others back off."""
        self._backoff = 1 if promising else min(self._backoff * 2, self.settings.max_backoff)
        if not promising:
            self._credit = min(self._credit, 0.0)

    @property
    def running(self) -> bool:
        """Whether a probe of several steps is under way."""
        return self._left > 0

    def snapshot(self) -> dict[str, Any]:
        """Plain facts."""
        return {"probes": self.probes, "credit": self._credit, "backoff": self._backoff}
