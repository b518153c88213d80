"""Torch forms of the slot bookkeeping that SGLang launches as Triton kernels.

Stands in for `mem_cache/allocation.py: assign_req_to_token_pool_func` and for
`kernels/ops/speculative/cache_locs.py: assign_extend_cache_locs_func`, `assign_draft_cache_locs_contiguous_func`
and `fill_front_out_cache_loc_func`, and for `kernels/ops/speculative/eagle.py: fill_accept_out_cache_loc_func`.
Names and argument order are upstream's.
"""

from typing import Any

import torch


def _window(req_to_token: torch.Tensor, rows: torch.Tensor, start: torch.Tensor, width: int) -> torch.Tensor:
    """Return the pool slots [bs, width] int64 of `width` positions from `start` [bs] on."""
    positions = start.long()[:, None] + torch.arange(width)
    return req_to_token[rows.long()[:, None], positions].long()


def _ragged_entries(
    rows: torch.Tensor, start: torch.Tensor, lens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (row, column) [sum(lens)] int64 of `lens[i]` positions from `start[i]` on in row `rows[i]`."""
    row = torch.repeat_interleave(rows.long(), lens)
    first = torch.repeat_interleave(start.long(), lens)
    offset = torch.arange(row.numel()) - torch.repeat_interleave(torch.cumsum(lens, 0) - lens, lens)
    return row, first + offset


def assign_req_to_token(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write each request's new slots to its row: `req_to_token[row, start:end] = out_cache_loc[...]`, in place."""
    lens = (end_offset - start_offset)[:batch_size].long()
    row, column = _ragged_entries(req_pool_indices[:batch_size], start_offset[:batch_size], lens)
    req_to_token[row, column] = out_cache_loc[: row.numel()].to(req_to_token.dtype)


def extend_cache_locs(
    *,
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: Any,
) -> torch.Tensor:
    """Return slots [sum(end - start)] int64, request after request.

    `draft_token_num` is the mean width that upstream sizes its buffer with; a ragged verify has unequal rows.
    """
    lens = (end_offset - start_offset)[:batch_size].long()
    if bool((lens == draft_token_num).all()):
        return _window(req_to_token, req_pool_indices[:batch_size], start_offset, draft_token_num).reshape(-1)
    row, column = _ragged_entries(req_pool_indices[:batch_size], start_offset[:batch_size], lens)
    return req_to_token[row, column].long()


def draft_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    topk: int,
    num_cols: int,
    positions: torch.Tensor | None = None,
    mrope: torch.Tensor | None = None,
) -> None:
    """Fill `out_cache_loc` [bs * topk * num_cols] and `positions` [bs * topk] for the draft steps, in place."""
    if mrope is not None:
        raise NotImplementedError("the CPU reference platform serves no multimodal rotary positions (mrope)")
    slots = _window(req_to_token, req_pool_indices, seq_lens, topk * num_cols)
    out_cache_loc.copy_(slots.reshape(-1).to(out_cache_loc.dtype))
    if positions is not None:
        positions.copy_(seq_lens.repeat_interleave(topk).to(positions.dtype))


def front_slots(num_front: torch.Tensor, out_cache_loc: torch.Tensor, front_out_cache_loc: torch.Tensor) -> None:
    """Pack the first `num_front[i]` slots of each request's verify window, in place."""
    window = out_cache_loc.view(num_front.numel(), -1)
    chosen = window[torch.arange(window.shape[1]) < num_front.long()[:, None]]
    front_out_cache_loc[: chosen.numel()] = chosen.to(front_out_cache_loc.dtype)


def accepted_slots(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, size: int
) -> None:
    """Pack the slots of the accepted nodes (index -1 is none), in order, in place."""
    index = accept_index.reshape(-1)[:size]
    chosen = out_cache_loc[index[index >= 0].long()]
    accept_out_cache_loc[: chosen.numel()] = chosen.to(accept_out_cache_loc.dtype)
