"""Survivals of a fixed earlier step, the only ones a budget may be planned from.

The age is fixed, not "whatever has landed": ranks that took the newest one disagreed and hung. A request that
was not in that step gets the acceptance prior of its class, not certainty: a burst of admissions must not
inflate the budget. Where fewer tokens were drafted than a block holds, the prior says how survival goes on.
"""

from collections import deque

import numpy as np

from sglang_spec_ext.records import FloatArray, IntArray

LAG_STEPS = 2


class LaggedSurvivals:
    """The survivals of the last steps, by request id."""

    def __init__(self, lag: int = LAG_STEPS) -> None:
        if lag < 1:
            raise ValueError(f"lag: must be >= 1 step, got {lag}; a budget from live ones is not lossless")
        self.lag = lag
        self._steps: deque[tuple[int, IntArray, FloatArray]] = deque(maxlen=lag + 2)

    def push(self, step: int, request_ids: IntArray, survival: FloatArray) -> None:
        """Keep survivals [R, k] of the k <= G drafts that step `step` made, for requests [R]."""
        self._steps.append((step, request_ids, survival))

    def at(self, step: int, request_ids: IntArray, prior: FloatArray) -> FloatArray | None:
        """Return survivals [R, G] of step `step - lag`, `prior` [R, G] for requests it lacked.

        None when that step was never pushed: then no budget can be planned.
        """
        for pushed, ids, survival in self._steps:
            if pushed != step - self.lag:
                continue
            if np.array_equal(ids, request_ids):
                return _widened(survival, prior)
            if not ids.size:
                return prior
            order = np.argsort(ids, kind="stable")
            place = np.minimum(np.searchsorted(ids, request_ids, sorter=order), ids.size - 1)
            rows = order[place]
            known = ids[rows] == request_ids
            return np.where(known[:, None], _widened(survival[rows], prior), prior)
        return None

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()


def _widened(survival: FloatArray, prior: FloatArray) -> FloatArray:
    """Return survivals [R, k] carried on to the prior's [R, G] as the prior falls."""
    drafted = survival.shape[1]
    if drafted == prior.shape[1]:
        return survival
    last = prior[:, drafted - 1 : drafted]
    scale = np.divide(survival[:, -1:], last, out=np.zeros_like(last), where=last > 0.0)
    return np.concatenate([survival, np.minimum(prior[:, drafted:] * scale, survival[:, -1:])], axis=1)
