"""Torch forms of the draft-tree bookkeeping that SGLang launches as CUDA or Triton kernels.

Stands in for `kernels/ops/speculative/spec_tree.py: build_tree_kernel_efficient_func, verify_tree_greedy_func`
and `kernels/ops/speculative/eagle.py: fill_bonus_tokens_func`. A tree of bs requests has n nodes each; node 0
is the last committed token. `retrieve_next_token[b, i]` is the first child of node i and
`retrieve_next_sibling[b, i]` its next sibling, both -1 for none.
"""

from typing import Any

import torch


def build_tree(
    parent_list: torch.Tensor,
    top_scores_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    spec_steps: int,
    num_verify_tokens: int,
    tree_mask_mode: int,
) -> None:
    """Fill positions and links of a chain (topk 1), in place; `tree_mask` is not read by our attention.

    Trees (topk > 1) are refused at start (`refusals.py`).
    """
    if topk != 1:
        raise NotImplementedError("the CPU reference platform builds chains: --speculative-eagle-topk must be 1")
    bs, n = seq_lens.numel(), num_verify_tokens
    column = torch.arange(n)
    positions.copy_((seq_lens.long()[:, None] + column).reshape(-1))
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    retrieve_next_token.copy_(torch.where(column + 1 < n, column + 1, -1).expand(bs, n))
    retrieve_next_sibling.fill_(-1)


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Follow the target's argmax [bs, n] down each tree; all walks advance together, in place.

    Writes `predicts` [bs * n] at the visited nodes, `accept_index` [bs, depth] (-1 where unused) and
    `accept_token_num` [bs], which counts drafts only.
    """
    bs, n = candidates.shape
    rows = torch.arange(bs)
    node = torch.zeros(bs, dtype=torch.int64)
    accepted = torch.zeros(bs, dtype=torch.int64)
    accept_index[:, 0] = retrieve_index[:, 0].to(accept_index.dtype)
    walking = torch.ones(bs, dtype=torch.bool)
    for _ in range(1, min(n, accept_index.shape[1])):
        wanted = target_predict[rows, node]
        child = matching_child(candidates, retrieve_next_token, retrieve_next_sibling, node, wanted)
        walking &= child >= 0
        if not bool(walking.any()):
            break
        predicts[retrieve_index[rows, node][walking]] = wanted[walking].to(predicts.dtype)
        node = torch.where(walking, child, node)
        accepted += walking
        found = rows[walking]
        accept_index[found, accepted[walking]] = retrieve_index[found, node[walking]].to(accept_index.dtype)
    predicts[retrieve_index[rows, node]] = target_predict[rows, node].to(predicts.dtype)
    accept_token_num.copy_(accepted)
    return predicts, accept_index, accept_token_num


def matching_child(
    candidates: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    node: torch.Tensor,
    token: torch.Tensor,
) -> torch.Tensor:
    """Return the child [bs] of `node` [bs] whose draft token is `token` [bs], or -1."""
    rows = torch.arange(node.numel())
    child = retrieve_next_token[rows, node].long()
    while True:
        live = child >= 0
        match = live & (candidates[rows, child.clamp(min=0)] == token)
        missed = live & ~match
        if not bool(missed.any()):
            return torch.where(match, child, -1)
        child = torch.where(missed, retrieve_next_sibling[rows, child.clamp(min=0)].long(), child)
        child = torch.where(match | missed, child, -1)


def fill_bonus_tokens(
    accept_tokens: torch.Tensor,
    accept_lens: torch.Tensor,
    bonus_tokens: torch.Tensor,
    accept_stride: int,
    batch_size: int,
) -> None:
    """Write each request's last accepted token to `bonus_tokens` [bs], in place.

    `accept_lens` counts the bonus token; `accept_tokens` is [bs * accept_stride].
    """
    last = torch.arange(batch_size) * accept_stride + accept_lens[:batch_size].long() - 1
    bonus_tokens[:batch_size].copy_(accept_tokens.reshape(-1)[last].to(bonus_tokens.dtype))


def reconstruct_from_tree_mask(
    tree_mask: torch.Tensor,
    verified_seq_len: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
) -> None:
    """Derive positions and links from an ancestor matrix [bs, n, n], in place.

    Stands in for `kernels/ops/speculative/reconstruct_tree.py: reconstruct_indices_from_tree_mask_func`, whose
    module docstring states the contract.
    """
    n = draft_token_num
    column = torch.arange(n)
    ancestors = tree_mask.view(batch_size, n, n).bool() & (column[None, :] < column[:, None])
    parent = torch.where(ancestors, column, -1).amax(-1)  # [bs, n]
    later = column[None, :, None] < column[None, None, :]
    child = ancestors.transpose(1, 2)  # child[b, i, k]: i is an ancestor of k
    same = (parent[:, :, None] == parent[:, None, :]) & later & (parent[:, :, None] >= 0)
    positions.copy_((ancestors.sum(-1) + verified_seq_len.long()[:, None]).reshape(-1))
    retrieve_index.copy_(torch.arange(batch_size * n).view(batch_size, n))
    retrieve_next_token.copy_(_first(child, column))
    retrieve_next_sibling.copy_(_first(same, column))


def _first(found: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    n = column.numel()
    first: Any = torch.where(found, column, n).amin(-1)
    return torch.where(first < n, first, -1)
