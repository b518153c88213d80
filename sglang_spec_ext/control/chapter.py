"""Three tables that show the case for speculation by load, computed with this library's own planner.

An 8B model on one accelerator as a roofline: a step reads the weights once or computes its tokens,
whichever takes longer. `best_k`: the best draft length falls with the batch. `markov`: a head that links
the positions of a block raises acceptance. `adaptive_verification`: a budget by survival keeps the gain
where a fixed K loses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_spec_ext.control.tiers import score_tiers
from sglang_spec_ext.control.torch_cpu import TorchRandom, vecmat
from sglang_spec_ext.control.verify import allocate, plan_budget, survival_of
from sglang_spec_ext.records import BatchState, FloatArray, IntArray, RequestClass

BATCHES = (1, 32, 128, 512)
LARGEST_K = 8
ALPHA = 0.8


@dataclass(frozen=True, slots=True)
class RooflineCost:
    """StepCost of a model from its weights and its accelerator."""

    draft_pass_s: float
    parallel: bool  # one pass drafts the whole block
    weight_bytes: float = 16e9
    bytes_per_s: float = 3.35e12 * 0.8
    flop_per_token: float = 2 * 8e9
    flop_per_s: float = 989e12 * 0.5

    @property
    def fixed_s(self) -> float:
        """See StepCost."""
        return 0.0

    def draft_s(self, k: int, batch: int, context_len: int = 0) -> float:  # noqa: ARG002
        """See StepCost."""
        passes = min(k, 1) if self.parallel else k
        return passes * self.draft_pass_s

    def verify_s(self, tokens: int, batch: int, context_len: int = 0) -> float:  # noqa: ARG002
        """See StepCost."""
        return max(self.weight_bytes / self.bytes_per_s, tokens * self.flop_per_token / self.flop_per_s)

    def verify_many(self, tokens: IntArray, batch: int, context_len: int = 0) -> FloatArray:  # noqa: ARG002
        """See StepCost."""
        compute: FloatArray = tokens * (self.flop_per_token / self.flop_per_s)
        return np.maximum(self.weight_bytes / self.bytes_per_s, compute)


class KnownAcceptance:
    """Acceptance that is given, not estimated: the same for every class of requests."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._expected = np.cumsum(np.cumprod([1.0, *rates])).tolist()
        self.classes = (self,) * len(RequestClass)

    def expected(self) -> list[float]:
        """See Expectation."""
        return list(self._expected)


def best_k_rows(
    draft_costs_s: Sequence[float] = (0.00025, 0.001), batches: Sequence[int] = BATCHES
) -> list[dict[str, Any]]:
    """Best K of 0..8 by draft cost, batch and way of drafting, and its gain over plain decoding."""
    known = KnownAcceptance([ALPHA] * LARGEST_K)
    rows = []
    for draft_s in draft_costs_s:
        for batch in batches:
            for parallel in (False, True):
                scores = score_tiers(
                    range(LARGEST_K + 1),
                    [(RequestClass.PLAIN, LARGEST_K, batch)],
                    batch=BatchState(step=0, num_reqs=batch),
                    acceptance=known,
                    cost=RooflineCost(draft_s, parallel),
                )
                best = max(scores, key=lambda score: score.rate)
                rows.append(
                    {
                        "t_draft_s": draft_s,
                        "batch": batch,
                        "parallel": parallel,
                        "no_spec_tok_s": scores[0].rate,
                        "best_k": best.k,
                        "speedup": best.rate / scores[0].rate,
                    }
                )
    return rows


def markov_acceptance(vocab: int = 64, k: int = 6, seed: int = 0) -> dict[str, float]:
    """Expected accepted drafts of a block with and without links between its positions.

    The target is a Markov chain: each token has two continuations of 45 %, the rest share 10 %.
    """
    random = TorchRandom(seed)
    chain = np.full((vocab, vocab), np.float32(0.1 / (vocab - 2)))
    for token in range(vocab):
        chain[token, random.randperm(vocab)[:2]] = np.float32(0.45)
    return {
        "parallel": _mean_accepted(chain, [_parallel_block(chain, token, k) for token in range(vocab)]),
        "markov": _mean_accepted(chain, [_markov_block(chain, token, k) for token in range(vocab)]),
    }


def _parallel_block(chain: FloatArray, last: int, k: int) -> list[int]:
    """The likeliest token of each position's own distribution: positions do not know each other."""
    marginal = np.zeros(len(chain), chain.dtype)
    marginal[last] = 1
    block = []
    for _ in range(k):
        marginal = vecmat(marginal, chain)
        block.append(int(marginal.argmax()))
    return block


def _markov_block(chain: FloatArray, last: int, k: int) -> list[int]:
    """Left to right: the likeliest token after the one just chosen."""
    block = []
    for _ in range(k):
        last = int(chain[last].argmax())
        block.append(last)
    return block


def _mean_accepted(chain: FloatArray, blocks: Sequence[Sequence[int]]) -> float:
    """Mean over start tokens of the sum over positions of the chance that the target takes that path."""
    total = 0.0
    for start, block in enumerate(blocks):
        path = [start, *block]
        total += float(np.cumprod(chain[path[:-1], path[1:]].astype(np.float64)).sum())
    return total / len(blocks)


def adaptive_verification_rows(
    batches: Sequence[int] = (16, 128, 512), k: int = 7, draft_s: float = 0.00025, seed: int = 0
) -> list[dict[str, Any]]:
    """Plain decoding, verifying everything and a budget by survival, by batch.

    Half of the requests have accurate drafts (confidences around 0.9), half have not (around 0.55).
    """
    random = TorchRandom(seed)
    cost = RooflineCost(draft_s, parallel=True)
    rows = []
    for batch in batches:
        half = batch // 2
        level = np.repeat(np.array([0.9, 0.55], np.float32), [half, batch - half])[:, None]
        spread = random.rand(batch, k) * np.float32(0.2) + np.float32(0.9)
        survival = survival_of(np.minimum(level * spread, np.float32(0.99)))
        plan = plan_budget(survival, cost)
        kept = allocate(survival, plan.budget)
        everything = draft_s + cost.verify_s(batch * (1 + k), batch)
        rows.append(
            {
                "batch": batch,
                "admitted": plan.budget,
                "kept_accurate": float(kept[:half].mean()),
                "kept_inaccurate": float(kept[half:].mean()),
                "no_spec": batch / cost.verify_s(batch, batch),
                "verify_all": (batch + float(survival.sum())) / everything,
                "adaptive": plan.rate,
            }
        )
    return rows
