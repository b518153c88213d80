"""DSPARK's sequential head on a CPU: one position is one call of `kernels.markov_step`.

SGLang's torch form makes the bias, a rounded sum and a table of candidates for ranks, each an [R, V] tensor or an op
of its own. Heads with another bias (gated, recurrent), and those that split the vocabulary over ranks, keep it.
"""

from collections.abc import Callable
from typing import Any

import torch

from sglang_spec_ext.cpu.draft_noise import gumbel
from sglang_spec_ext.cpu.packed import kept_with
from sglang_spec_ext.kernels.markov_step import markov_step


def draft_step(
    original: Callable[..., tuple[torch.Tensor, Any]],
    markov_head: Any,
    prev_tokens: torch.Tensor,
    base_logits: torch.Tensor,
    *,
    hidden_states: torch.Tensor | None,
    state: Any,
    temperatures: torch.Tensor,
    noise: Any,
    step: int,
    logits_out: torch.Tensor | None,
) -> tuple[torch.Tensor, Any]:
    """Around `dspark_draft._draft_step`: tokens [R] int64 of one position, and the head's state."""
    w2 = _wide(markov_head.greedy_w2_weight())
    w1 = None if w2 is None else _wide(markov_head.markov_w1.weight)
    if w1 is None or w2 is None or w2.shape[0] != base_logits.shape[-1]:
        return original(
            markov_head,
            prev_tokens,
            base_logits,
            hidden_states=hidden_states,
            state=state,
            temperatures=temperatures,
            noise=noise,
            step=step,
            logits_out=logits_out,
        )
    # rows sample at their temperatures only where their logits are kept; to look at them is free on a CPU
    sampled = logits_out is not None and bool((temperatures != 0).any())
    drawn = markov_step(
        base_logits,
        prev_tokens.contiguous(),  # the first position's are a column of the block
        w1=w1,
        w2=w2,
        temperatures=temperatures if sampled else None,
        gumbel=gumbel(noise.key, step, noise.offset, *base_logits.shape) if sampled else None,
        logits_out=logits_out,
        statistics=False,
    )
    return drawn.tokens, state


def _wide(weight: torch.Tensor | None) -> torch.Tensor | None:
    """Return a weight in float32: at the small rank of a head that is twice as quick here as bfloat16."""
    if weight is None or weight.dtype is torch.float32:
        return weight
    return kept_with(weight, "_spec_ext_wide", torch.Tensor.float)
