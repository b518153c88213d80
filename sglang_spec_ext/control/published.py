"""Three published rules, written from their descriptions, to stand beside ours in the simulator and nowhere
else.

- `SglangEma`: SGLang's `--speculative-adaptive`: slots by batch size, a moving average of accepted drafts,
  thresholds between neighbouring K, no cost (sgl#21599, sgl#23994, sgl#24055; 0.5.23 defaults).
- `VllmTable`: vLLM's `num_speculative_tokens_per_batch_size`: K from the batch size alone (vllm#32374).
- `VllmArgmax`: vLLM's adaptive verification reduced to one K for the batch: the highest expected rate by the
  start-up table, no margin, no dwell; the draft always runs in full (vllm#47808). It is given the true
  acceptance, which is more than a confidence head knows.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

from sglang_spec_ext.control.cost import CostTable
from sglang_spec_ext.control.scenario import Scenario
from sglang_spec_ext.control.simulator import Choice
from sglang_spec_ext.records import BatchState, StepObservation

_SLOTS = ((1, (1, 3, 5, 7), -0.25), (8, (0, 1, 3), 0.0), (32, (0, 1), 0.0), (64, (0,), 0.0))
_CAPTURED = (1, 2, 4, 8, 12, 16, 24, 32, *range(40, 161, 8), *range(176, 513, 16))
_OFFLINE_ALPHA = 0.8  # acceptance a table author would assume
_OFFLINE_BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


class _Slot:
    """One batch-size slot of SGLang's rule."""

    def __init__(self, candidates: Sequence[int], down: float) -> None:
        self.candidates = list(candidates)
        self.down = down
        self.k = self.candidates[len(self.candidates) // 2]
        self.average = float(self.k - 1)
        self.batches = 0

    def update(self, mean_accepted: float) -> None:
        if self.k:
            self.average = 0.8 * self.average + 0.2 * mean_accepted
        self.batches += 1
        if self.batches <= 10 or (self.batches - 10) % 5:
            return
        index = start = self.candidates.index(self.k)
        if self.k == 0:
            # the next decision after K = 0 always tries the smallest positive K
            index = min(index + 1, len(self.candidates) - 1)
            if self.candidates[index] and self.average < 0:
                self.average = float(self.candidates[index] - 1)
        else:
            while index and self.average <= self._drop_threshold(index):
                index -= 1
            while index >= start and index + 1 < len(self.candidates) and self._rises(index):
                index += 1
        self.k = self.candidates[index]

    def _drop_threshold(self, index: int) -> float:
        lower = self.candidates[index - 1]
        return (lower - 0.5 if lower else 0.5) + self.down

    def _rises(self, index: int) -> bool:
        return self.average > self.candidates[index] - 0.5


class SglangEma:
    """SGLang's slots, routed by the captured batch size at or above."""

    name = "sglang_ema"

    def __init__(self, scenario: Scenario) -> None:
        allowed = set(scenario.tiers)
        self._starts: list[int] = []
        self._slots: list[_Slot] = []
        for start, candidates, down in _SLOTS:
            kept = [k for k in candidates if k in allowed]
            if kept:
                self._starts.append(start)
                self._slots.append(_Slot(kept, down))
        if not self._slots:
            raise ValueError(f"tiers: {scenario.tiers} hold none of the K that SGLang's default slots use")

    def _slot(self, batch: int) -> _Slot:
        padded = batch if batch > _CAPTURED[-1] else _CAPTURED[bisect_left(_CAPTURED, batch)]
        return self._slots[max(0, bisect_right(self._starts, padded) - 1)]

    def choose(self, batch: BatchState) -> Choice:
        """K of the slot."""
        k = self._slot(batch.num_reqs).k
        return Choice(k, draft_k=k)

    def observe(self, observation: StepObservation) -> None:
        """Feed the mean of accepted drafts to the slot of this batch."""
        self._slot(observation.accepted.size).update(float(observation.accepted.mean()))


class VllmTable:
    """K by batch size, as an operator would write it from an offline sweep at an assumed acceptance."""

    name = "vllm_table"

    def __init__(self, scenario: Scenario, table: CostTable) -> None:
        self._starts = list(_OFFLINE_BATCHES)
        self._ks = [
            _argmax(
                scenario.tiers, batch, lambda k: sum(_OFFLINE_ALPHA**j for j in range(k + 1)), table, None
            )
            for batch in _OFFLINE_BATCHES
        ]

    def choose(self, batch: BatchState) -> Choice:
        """K of the band."""
        k = self._ks[bisect_right(self._starts, batch.num_reqs) - 1]
        return Choice(k, draft_k=k)

    def observe(self, observation: StepObservation) -> None:
        """Nothing is learned."""


class VllmArgmax:
    """The highest expected rate by the start-up table, step by step; the draft is never skipped."""

    name = "vllm_argmax"

    def __init__(self, scenario: Scenario, table: CostTable, expected: Callable[[int], float]) -> None:
        self._tiers = scenario.tiers
        self._table = table
        self._expected = expected  # true expected tokens per request at K, of the segment that runs
        self._chosen: dict[int, int] = {}

    def choose(self, batch: BatchState) -> Choice:
        """Argmax with the cost of a full draft at every K."""
        full, reqs = self._tiers[-1], batch.num_reqs
        if reqs not in self._chosen:
            self._chosen[reqs] = _argmax(self._tiers, reqs, self._expected, self._table, full)
        return Choice(self._chosen[reqs], draft_k=full)

    def observe(self, observation: StepObservation) -> None:
        """The start-up table is never corrected."""


def _argmax(
    tiers: Sequence[int], batch: int, expected: Callable[[int], float], table: CostTable, draft_k: int | None
) -> int:
    def rate(k: int) -> float:
        draft_s = table.draft_s(k if draft_k is None else draft_k, batch)
        return batch * expected(k) / (draft_s + table.verify_s(batch * (k + 1), batch))

    return max(tiers, key=rate)
