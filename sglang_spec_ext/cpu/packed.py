"""Matrix products with weights that oneDNN has laid out for itself.

At the few rows of a decode or verify step a product costs what reading its weight costs, if the rows are few enough
and the kernel is good. oneDNN reads a bfloat16 weight in rows of 64 columns at half the speed of its own blocked
layout; in float32 torch asks MKL, which takes twice to four times as long as oneDNN's blocked layout for 4 to 16 rows
(and 15 rows cost it more than 16). torch keeps that layout behind `mkldnn::_reorder_linear_weight` and
`mkldnn::_linear_pointwise`, which its compiler uses for frozen graphs. Sums are float32 and rounded once, as torch's
own are, in another order. A weight that was used stands in memory twice. What is left to torch: bfloat16 on a CPU
without bfloat16 units, where the conversion and not the reading is what takes the time, and float32 of one to three
rows.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from sglang_spec_ext.kernels.first_largest import first_largest

TYPICAL_ROWS = 8  # what the layout is chosen for: a block of draft tokens; other sizes use it as well
FLOAT32_ROWS = 4  # from here on oneDNN is the faster one in float32


def product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
    """Return x [N, K] @ weight [M, K].T + bias [M]; None where torch's own product must do it."""
    if torch.is_grad_enabled() and (weight.requires_grad or x.requires_grad):
        return None
    if weight.dtype is not x.dtype or x.numel() == 0 or not _pays(x):  # before a layout that would not be used
        return None
    packed = _packed(weight)
    if packed is None:
        return None
    found: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return found


def _pays(x: torch.Tensor) -> bool:
    """Return whether oneDNN's layout is the faster one for rows [..., K]."""
    if x.dtype is torch.float32:
        return torch.backends.mkldnn.is_available() and x.numel() >= FLOAT32_ROWS * x.shape[-1]
    return x.dtype is torch.bfloat16 and served()


@cache
def served() -> bool:
    """Return whether oneDNN multiplies bfloat16 with this CPU's own instructions."""
    return multiplies() and bool(torch.cpu._is_avx512_bf16_supported())


def multiplies() -> bool:
    """Return whether oneDNN multiplies bfloat16 on this CPU, be it by way of float32."""
    return torch.backends.mkldnn.is_available() and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def _packed(weight: torch.Tensor) -> torch.Tensor | None:
    """Return the weight in oneDNN's layout, made on first use and again when the weight was written to."""
    return None if weight.dim() != 2 else kept_with(weight, "_spec_ext_packed", _reordered)


def _reordered(weight: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS)
    return found


def kept_with(
    weight: torch.Tensor, name: str, make: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor | None:
    """Return what `make` makes of a weight, kept as its attribute and made again when the weight was written to.

    None for an inference tensor, which does not tell that it was written to.
    """
    if weight.is_inference():
        return None
    state = (weight._version, weight.data_ptr())
    kept = getattr(weight, name, None)
    if kept is None or kept[0] != state:
        kept = (state, make(weight.detach()))
        setattr(weight, name, kept)
    found: torch.Tensor = kept[1]
    return found


def linear(
    original: Callable[..., torch.Tensor],
    method: Any,
    layer: Any,
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `UnquantizedLinearMethod.apply`."""
    found = product(x, layer.weight, bias)
    return original(method, layer, x, bias) if found is None else found


def logits(
    original: Callable[..., torch.Tensor],
    processor: Any,
    hidden_states: torch.Tensor,
    lm_head: Any,
    embedding_bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Around `LogitsProcessor._compute_lm_head`: a head that upstream would multiply by as it is."""
    found = None
    if not processor.use_fp32_lm_head and processor.rl_on_policy_target is None and _dense(lm_head):
        found = product(hidden_states, lm_head.weight)
    return original(processor, hidden_states, lm_head, embedding_bias, out=out) if found is None else found


def draft_logits(original: Callable[..., torch.Tensor], hidden: torch.Tensor, lm_head: Any) -> torch.Tensor:
    """Around `dspark.project_through_lm_head`."""
    found = product(hidden, lm_head.weight) if _dense(lm_head) else None
    return original(hidden, lm_head) if found is None else found


def markov_bias(original: Callable[..., torch.Tensor], head: Any, latent_states: torch.Tensor) -> torch.Tensor:
    """Around `VanillaMarkov.project_bias`."""
    found = product(latent_states, head.markov_w2.weight)
    return original(head, latent_states) if found is None else found


def greedy_tokens(
    original: Callable[..., torch.Tensor],
    worker: Any,
    *,
    hidden_states: torch.Tensor,
    lm_head: Any,
    chunk_size: int = 256,
) -> torch.Tensor:
    """Around `DFlashWorkerV2._greedy_sample_from_vocab_parallel_head`: where one rank has the whole head."""
    shard = getattr(lm_head, "shard_indices", None)
    whole = shard is None or shard.num_org_elements == lm_head.org_vocab_size == lm_head.weight.shape[0]
    found = product(hidden_states, lm_head.weight) if whole and _dense(lm_head) else None
    if found is None:
        return original(worker, hidden_states=hidden_states, lm_head=lm_head, chunk_size=chunk_size)
    return first_largest(found)


def _dense(lm_head: Any) -> bool:
    """Return whether a head is a plain matrix, without quantisation and without LoRA around it."""
    from sglang.srt.layers.logits_processor import should_apply_lm_head_quant_method

    if hasattr(lm_head, "set_lora") or not hasattr(lm_head, "weight"):
        return False
    return not should_apply_lm_head_quant_method(lm_head, getattr(lm_head, "quant_method", None))
