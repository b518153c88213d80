"""Fused ops in fewer torch calls than SGLang's `native` forwards; the arithmetic is upstream's.

At batch 1 a decode step of a small model is mostly the cost of calling small ops. Registered through
`sglang/kernels/fused_op.py: BaseFusedOp.register_oot_forward`.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def register_forwards() -> None:
    """Make the `native` dispatch key of the two most frequent ops run the forms below."""
    from sglang.kernels.fused_op import BaseFusedOp
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding

    BaseFusedOp.register_oot_forward(RMSNorm, rms_norm, "native")
    BaseFusedOp.register_oot_forward(RotaryEmbedding, rotary, "native")


def rms_norm(
    op: Any,
    x: torch.Tensor,
    residual: torch.Tensor | None = None,
    post_residual_addition: torch.Tensor | None = None,
    quant_linear: Any = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Return norm(x + residual) [tokens, hidden] and the new residual, as `RMSNorm.forward_native` does.

    In bfloat16 the norm reads the rounded sum, like SGLang's fused kernel and unlike its native form.
    """
    plain = op.variance_size_override is None and op.override_orig_dtype is None and not op.fp32_residual
    if not plain or op.cast_x_before_out_mul or post_residual_addition is not None:
        return op.forward_native(x, residual, post_residual_addition, quant_linear)  # type: ignore[no-any-return]
    if residual is None:
        return F.rms_norm(x, (op.hidden_size,), op.weight, op.variance_epsilon)
    residual = residual + x
    return F.rms_norm(residual, (op.hidden_size,), op.weight, op.variance_epsilon), residual


def rotary(
    op: Any,
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    offsets: torch.Tensor | None = None,
    fused_set_kv_buffer_arg: Any = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rotate query [tokens, heads * d] and key [tokens, kv_heads * d] in one go (neox style, whole heads)."""
    if not op.is_neox_style or op.rotary_dim != op.head_size or offsets is not None or hasattr(op, "sin_cos_cache"):
        return op.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)  # type: ignore[no-any-return]
    width = query.shape[-1]
    cos_sin = op.cos_sin_cache.index_select(0, positions.reshape(-1)).unsqueeze(1)
    cos, sin = cos_sin.to(query.dtype).chunk(2, dim=-1)  # [tokens, 1, d / 2] each
    both = torch.cat((query, key), dim=-1)
    both = both.unflatten(1, (both.shape[1] // op.head_size, op.head_size))  # no -1: an idle rank has no token
    first, second = both.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(1)
    return turned[:, :width], turned[:, width:]
