"""The noise with which DSPARK samples its draft tokens, at a price that a CPU can pay.

Stands in for `_philox` of `kernels/ops/speculative/dspark/markov_sample.py`, whose torch form makes each random word
from some two hundred tensor operations, and decides beside it whether a step needs noise at all. Of a step at batch 1
that was a quarter.
"""

from collections.abc import Callable
from typing import Any

import torch

_WORD = 2**32
_STEP, _OFFSET = 0xC2B2AE3D27D4EB4F, 0x9E3779B97F4A7C15  # odd, so that neighbours get seeds far apart


def random_words(
    key: int, quads: torch.Tensor, rows: torch.Tensor, step: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return four independent words in [0, 2^32), int64 [R, Q], of the quads [1, Q] of a vocabulary for rows [R, 1].

    They follow from the arguments alone, so that ranks agree, and a shard draws what the whole vocabulary would.
    """
    generator = torch.Generator()
    generator.manual_seed((key ^ (int(step) * _STEP) ^ (int(offset) * _OFFSET)) % 2**63)
    last = int(quads.max()) + 1
    # quads lead: a shard of the vocabulary that ends early draws the same beginning
    words = torch.randint(_WORD, (last, len(rows), 4), generator=generator)
    return words[quads[0]].permute(2, 1, 0).unbind(0)


def only_where_sampled(
    original: Callable[..., torch.Tensor], cls: type, *, temperatures: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Around `MarkovSampleStep.torch`: greedy rows need no noise, and here it costs nothing to look."""
    if kwargs.get("has_sampled_rows") is None:
        kwargs["has_sampled_rows"] = bool((temperatures != 0).any())
    return original(cls, temperatures=temperatures, **kwargs)
