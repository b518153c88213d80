"""Trials: a dwell spent on a K whose price at the present size is not known as well as it could be.

Serving corrects the price of the sizes that run. A profile that took one size for dearer than it is would keep the K
of that size out for good, and whatever K runs instead would look best for ever. So a K that would be the better one
if its size were cheaper by one standard deviation is run for a dwell, after which both are measured: optimism in the
face of uncertainty (Lai and Robbins 1985). The deviation is SIZE_SD's before a size is known, so at most about a tenth
of a dwell is lost, and next to nothing after it.
"""

from collections.abc import Iterable
from math import exp

from sglang_spec_ext.control.live_cost import LiveCost
from sglang_spec_ext.control.tiers import Score
from sglang_spec_ext.records import BatchState

WORTHWHILE = 0.03  # a price that is known better than this needs no trial
PAUSE_STEPS = 128  # from the first trial of a size to its second; each further pause is twice as long


class Trials:
    """Picks what to try and remembers when."""

    def __init__(self) -> None:
        self.begun = 0
        self._not_before: dict[int, int] = {}  # step of the next trial of a size, by power of two of its tokens
        self._pause: dict[int, int] = {}

    def pick(self, step: int, batch: BatchState, current: Score, others: Iterable[Score], cost: LiveCost) -> int | None:
        """Return the most hopeful K to try at a step in place of the one in use, and count it as tried.

        None while the size in use is not measured itself, in a step with prompts, and where no other K is both
        uncertain and within reach.
        """
        reqs, context = batch.num_reqs, batch.context_len
        in_use = reqs * (current.k + 1)
        if batch.prefill_tokens or not cost.known(in_use, context):
            return None
        best, best_rate = None, current.rate
        for score in others:
            tokens = reqs * (score.k + 1)
            if step < self._not_before.get(tokens.bit_length(), 0):
                continue
            spread = cost.spread(in_use, tokens, context)
            if spread > WORTHWHILE and score.rate * exp(spread) > best_rate:
                best, best_rate = score, score.rate * exp(spread)
        if best is None:
            return None
        size = (reqs * (best.k + 1)).bit_length()
        pause = self._pause.get(size, PAUSE_STEPS)
        self._not_before[size], self._pause[size] = step + pause, 2 * pause
        self.begun += 1
        return best.k
