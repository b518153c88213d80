"""What a draft starts from: facts about the target, and heads that look somewhere from step 0."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_spec_ext.models.draft_modules import Projections
from sglang_spec_ext.models.target import apply_rope, rope_table

Tensor = torch.Tensor
NOISE_BESIDE_AIM = 0.3  # how much of the random query and key weights is kept


def constant_probe(rows: Tensor, *, ridge: float = 1e-3) -> Tensor:
    """Return the vector whose product with every row of [n, hidden] is as near to 1 as can be."""
    gram = rows.T @ rows / len(rows)
    gram += ridge * gram.diagonal().mean() * torch.eye(len(gram))
    return torch.linalg.solve(gram, rows.mean(0))


@dataclass(frozen=True)
class Start:
    """What a draft starts from: facts about the target, measured on its own text.

    `features` [n, taps * hidden] are tapped outputs and `final` [n, hidden] normed last states of some text;
    `final_norm` [hidden] and `head` [vocab, hidden] are the target's weights.
    """

    features: Tensor
    final: Tensor
    final_norm: Tensor
    head: Tensor

    def mean_state(self) -> tuple[Tensor, float]:
        """Return (u, s): u [hidden] of unit scale whose norm with weights s * final_norm is the mean `final`.

        Random states would make logits so wide that the first steps only narrow them.
        """
        before = self.final.mean(0) / self.final_norm
        scale = float(before.pow(2).mean().sqrt())
        return before / scale, scale


@torch.no_grad()
def aim_heads(
    attention: Projections,
    *,
    query_rows: Tensor,
    key_rows: Tensor,
    distances: Sequence[int],
    theta: float,
    loudness: float = 1.0,
) -> None:
    """Make head h look distances[h] tokens back at the start.

    Random heads spread evenly over the context, and a draft learns nothing from it until one of them narrows.
    A query and a key that are the same vector for every token, apart from noise, leave the rotation alone to
    decide: energy in its fast pairs gives a peak two tokens wide. `query_rows` and `key_rows` [n, width] are
    inputs that the projections see; `loudness` is the vectors' scale where no norm sets it.
    """
    dim = attention.head_dim
    key = torch.zeros(1, 1, dim)
    key[..., : dim // 8] = loudness
    cosine, sine = rope_table(-torch.tensor(distances[: attention.heads]), head_dim=dim, theta=theta)
    query = apply_rope(key, cosine, sine)[:, 0]  # [heads, d]
    for weight, vector, rows in (
        (attention.q_proj.weight, query, query_rows),
        (attention.k_proj.weight, key[0].expand(attention.kv_heads, -1), key_rows),
    ):
        weight.mul_(NOISE_BESIDE_AIM).add_(torch.outer(vector.flatten(), constant_probe(rows)))
