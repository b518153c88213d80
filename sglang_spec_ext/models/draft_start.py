"""What a draft starts from: facts about the target, and heads that look somewhere from step 0."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang_spec_ext.models.draft_modules import Projections
from sglang_spec_ext.models.target import apply_rope, rope_table

Tensor = torch.Tensor
NOISE_BESIDE_AIM = 0.15  # how much of the random query and key weights is kept
# The attention logit of what a head looks for, at the start. With it six of 32 rotated pairs, the fastest, put four
# fifths of a head's attention on one distance; more pairs or a smaller peak blur it, fewer repeat it far away.
PEAK = 14.0
FAST_SHARE = 3 / 32
CONTENT_RIDGE = 1e-2  # beside the mean variance of a row's channels


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
) -> None:
    """Make head h look distances[h] tokens back at the start.

    Random heads spread evenly over the context, and a draft learns nothing from it until one of them narrows.
    A query and a key that are the same vector for every token, apart from noise, leave the rotation alone to
    decide. `query_rows` and `key_rows` [n, width] are inputs that the projections see.
    """
    dim = attention.head_dim
    key = torch.zeros(1, 1, dim)
    fast = max(1, int(dim * FAST_SHARE))
    key[..., :fast] = (PEAK * dim**0.5 / fast) ** 0.5
    cosine, sine = rope_table(-torch.tensor(distances[: attention.heads]), head_dim=dim, theta=theta)
    query = apply_rope(key, cosine, sine)[:, 0]  # [heads, d]
    for weight, vector, rows in (
        (attention.q_proj.weight, query, query_rows),
        (attention.k_proj.weight, key[0].expand(attention.kv_heads, -1), key_rows),
    ):
        weight.mul_(NOISE_BESIDE_AIM).add_(torch.outer(vector.flatten(), constant_probe(rows)))


@dataclass(frozen=True)
class ContentPairs:
    """Rows that should find each other: what a query knows, and the key it looks for the like of.

    `query` [n, width], `key` [n, width] are inputs of the projections; `sequence` [n] int64 numbers the text
    a row is from and `token` [n] int64 names what it is about: rare tokens count as much as frequent ones.
    """

    query: Tensor
    key: Tensor
    sequence: Tensor
    token: Tensor

    def directions(self, count: int) -> tuple[Tensor, Tensor]:
        """Return the canonical pairs (query [count, width], key [count, width]), the most correlated first.

        Each product has variance 1. Means of a sequence are left out: what a whole text has in common does not
        tell its places apart.
        """
        weight = 1.0 / torch.bincount(self.token)[self.token]
        weight /= weight.sum()
        query, key = (self._centred(rows) * weight[:, None].sqrt() for rows in (self.query, self.key))
        root_q, root_k = (_root(rows.T @ rows) for rows in (query, key))
        cross = torch.linalg.solve_triangular(root_q, query.T @ key, upper=False)
        cross = torch.linalg.solve_triangular(root_k, cross.T, upper=False).T
        left, _, right = torch.linalg.svd(cross)
        sides = ((root_q, left[:, :count]), (root_k, right[:count].T))
        first, second = (torch.linalg.solve_triangular(root.T, part, upper=True).T for root, part in sides)
        return first, second

    def _centred(self, rows: Tensor) -> Tensor:
        number = int(self.sequence.max()) + 1
        sums = torch.zeros(number, rows.shape[1]).index_add_(0, self.sequence, rows)
        counts = torch.bincount(self.sequence, minlength=number).clamp(min=1)
        return rows - (sums / counts[:, None])[self.sequence]


def _root(covariance: Tensor) -> Tensor:
    ridge = CONTENT_RIDGE * covariance.diagonal().mean() * torch.eye(len(covariance))
    root: Tensor = torch.linalg.cholesky(covariance + ridge)
    return root


def telling_directions(rows: Tensor, target: Tensor, count: int) -> Tensor:
    """Return the directions [count, width] of rows [n, width] that tell most of target [n, any], linearly.

    Reduced-rank regression: products have variance 1 and come in the order of the variance that they explain.
    """
    rows, target = (part - part.mean(0) for part in (rows, target))
    root = _root(rows.T @ rows / len(rows))
    left, _, _ = torch.linalg.svd(torch.linalg.solve_triangular(root, rows.T @ target, upper=False))
    found: Tensor = torch.linalg.solve_triangular(root.T, left[:, :count], upper=True).T
    return found


@torch.no_grad()
def aim_values(attention: Projections, groups: Sequence[Sequence[int]], directions: Tensor) -> None:
    """Make the heads of each group carry the first `directions` [at least group * head_dim, width] among them."""
    values = attention.v_proj.weight.unflatten(0, (attention.kv_heads, attention.head_dim))
    for group in groups:
        for number, head in enumerate(group):
            values[head] = directions[number :: len(group)][: attention.head_dim]


@torch.no_grad()
def aim_by_content(attention: Projections, heads: Sequence[int], pairs: ContentPairs) -> None:
    """Make some heads look for places like the one that is being foretold, at the start.

    Text that a small model writes repeats itself: the best guess is often what came after the last place where
    the target stood as it stands now. Such a head takes thousands of steps to form by itself. Pairs of
    rotation that turn slowly carry the content, so distance hardly matters. Heads that share keys must not be in
    `heads` twice.
    """
    dim = attention.head_dim
    slow = torch.cat([torch.arange(dim // 4, dim // 2), torch.arange(3 * dim // 4, dim)])
    query, key = pairs.directions(len(slow) * len(heads))
    scale = (PEAK * dim**0.5 / len(slow)) ** 0.5
    q_weight = attention.q_proj.weight.unflatten(0, (attention.heads, dim))
    k_weight = attention.k_proj.weight.unflatten(0, (attention.kv_heads, dim))
    for number, head in enumerate(heads):
        chosen = slice(number, None, len(heads))  # in turn, so that all heads are equally good
        q_weight[head] = 0.0  # was aimed at a distance
        q_weight[head, slow] = query[chosen] * scale
        k_weight[head * attention.kv_heads // attention.heads, slow] += key[chosen] * scale
