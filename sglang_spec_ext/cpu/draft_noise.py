"""The noise with which DSPARK samples its draft tokens, at a price that a CPU can pay.

`gumbel` serves our own Markov step (draft_step.py). For heads that SGLang samples from, the rest stands in for
`_philox` of `kernels/ops/speculative/dspark/markov_sample.py`, whose torch form makes each random word from some two
hundred tensor operations, and decides whether a step needs noise at all. Of a step at batch 1 that was a quarter.
"""

from collections.abc import Callable
from typing import Any

import torch

_WORD = 2**32
_STEP, _OFFSET = 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15  # odd, so that neighbours get seeds far apart


def gumbel(key: int, step: int, offset: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Return Gumbel noise [rows, columns] float32, which follows from the arguments alone, so that ranks agree."""
    generator = _generator(key, step, int(offset))
    # in double, since the smallest of fifty thousand decides; torch's own exponential takes three times as long
    uniform = torch.rand(rows, columns, dtype=torch.float64, generator=generator).float()
    exponential = uniform.neg_().log1p_().neg_()
    return exponential.log_().neg_()


def random_words(
    key: int, quads: torch.Tensor, rows: torch.Tensor, step: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return four independent words in [0, 2^32), int64 [R, Q], of the quads [1, Q] of a vocabulary for rows [R, 1].

    They follow from the arguments alone, so that ranks agree, and a shard draws what the whole vocabulary would.
    """
    generator = _generator(key, int(step), int(offset))
    last = int(quads.max()) + 1
    # quads lead: a shard of the vocabulary that ends early draws the same beginning
    words = torch.randint(_WORD, (last, len(rows), 4), generator=generator)
    return words[quads[0]].permute(2, 1, 0).unbind(0)


def _generator(key: int, step: int, offset: int) -> torch.Generator:
    generator = torch.Generator()
    generator.manual_seed((key ^ (step * _STEP) ^ (offset * _OFFSET)) % 2**63)
    return generator


def only_where_sampled(
    original: Callable[..., torch.Tensor], cls: type, *, temperatures: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Around `MarkovSampleStep.torch`: greedy rows need no noise, and here it costs nothing to look."""
    if kwargs.get("has_sampled_rows") is None:
        kwargs["has_sampled_rows"] = bool((temperatures != 0).any())
    return original(cls, temperatures=temperatures, **kwargs)
