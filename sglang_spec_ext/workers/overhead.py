"""What a step costs outside the worker: scheduling, detokenising, the server.

It does not change with K, so the profile, which runs the worker alone, cannot know it; serving measures it as
the time between two launches that the worker does not account for.
"""

from collections import deque
from dataclasses import replace
from statistics import median

from sglang_spec_ext.control.live_cost import LiveCost

WINDOW_STEPS = 65
REFRESH_STEPS = 16


class Overhead:
    """Keeps the fixed part of a cost table at what serving measures."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=WINDOW_STEPS)
        self._seen = 0

    def observe(self, step_s: float, worker_s: float, cost: LiveCost) -> None:
        """Take in one step that was followed at once by the next one."""
        self._recent.append(max(0.0, step_s - worker_s))
        self._seen += 1
        if self._seen % REFRESH_STEPS == 0:
            cost.table = replace(cost.table, fixed_s=median(self._recent))
