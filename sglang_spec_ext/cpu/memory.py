"""Torch forms of the K/V pool copy, and the dtype of the draft's input embeddings.

Stands in for `mem_cache/memory_pool.py: MHATokenToKVPool._init_kv_copy_and_warmup, _move_kv_cache_impl` and
`model_executor/model_runner.py: ModelRunner._extend_forward_kwargs`.
"""

from collections.abc import Callable
from typing import Any

import torch


def skip_kv_copy_warmup(pool: Any) -> None:
    """Leave out the Triton copy that upstream compiles at start; `move_kv_cache` below needs no plan."""
    pool._kv_copy_config = None


def move_kv_cache(pool: Any, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
    """Copy K and V rows `src_loc` to `tgt_loc` in every layer; the rows may overlap."""
    target, source = tgt_loc.reshape(-1).long(), src_loc.reshape(-1).long()
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[target] = buffer[source]


def keep_embedding_dtype(
    original: Callable[..., dict[str, Any]], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """Give the draft block its input embeddings in the runner's dtype; upstream casts to bfloat16 always."""
    found = original(runner, forward_batch, *args, **kwargs)
    if forward_batch.input_embeds is not None and "input_embeds" in found:
        found["input_embeds"] = forward_batch.input_embeds.to(runner.dtype)
    return found

