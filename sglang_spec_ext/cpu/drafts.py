"""Torch forms of two kernels that the block drafts use in bfloat16 only.

Stands in for `kernels/ops/attention/table_qk_norm_rope.py: table_qk_norm_rope_` and for
`models/dspark.py: DSparkDraftMixin._fused_kv_write_bundle`.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812


def table_qk_norm_rope(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    num_q_heads: int,
    num_k_heads: int,
    head_dim: int,
    eps: float,
) -> None:
    """Norm and rotate (neox) the query and key heads of `qkv` [tokens, (q + 2 * kv) * head_dim], in place."""
    tokens = qkv.shape[0]
    heads = qkv[:, : (num_q_heads + num_k_heads) * head_dim].view(tokens, -1, head_dim)
    normed = torch.cat(
        (
            F.rms_norm(heads[:, :num_q_heads], (head_dim,), q_weight, eps),
            F.rms_norm(heads[:, num_q_heads:], (head_dim,), k_weight, eps),
        ),
        dim=1,
    ).float()
    cos, sin = cos_sin_cache.index_select(0, positions.long()).float().unsqueeze(1).chunk(2, dim=-1)
    first, second = normed.chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    heads.copy_(turned)


def no_fused_kv_write(model: Any, pool: Any) -> None:
    """Let DSpark write its context K and V layer by layer, as it does in float32."""
