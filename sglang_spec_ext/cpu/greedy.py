"""The target's greedy choice at each verified place, which SGLang asks `torch.argmax` for.

Stands in where SGLang makes the choice by a function of its own (DSPARK) or takes it as an argument (DFLASH). EAGLE's
verification and plain decoding call torch in the middle of larger functions and keep it.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_spec_ext.kernels.first_largest import first_largest


def row_argmax(logits: torch.Tensor, fused: bool = False) -> torch.Tensor:
    """Return the first largest column [...] of logits [..., V]; stands in for `dspark_accept._row_argmax`."""
    return first_largest(logits.flatten(0, -2)).view(logits.shape[:-1])


def accept_block(
    original: Callable[..., Any],
    worker: Any,
    *,
    next_token_logits: torch.Tensor,
    sampling_info: Any,
    target_predict: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """Around `DFlashWorkerV2._accept_block`: logits [R * width, V], where all requests are greedy."""
    greedy = sampling_info is None or sampling_info.is_all_greedy
    if greedy and target_predict is None and worker._selector_sample is None:
        target_predict = first_largest(next_token_logits)
    return original(
        worker,
        next_token_logits=next_token_logits,
        sampling_info=sampling_info,
        target_predict=target_predict,
        **kwargs,
    )
