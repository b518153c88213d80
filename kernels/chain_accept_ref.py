"""Torch twin of `chain_accept`: the same rule, vectorised over requests; the implementation on a CPU."""

import torch
from sglang_spec_ext.kernels.chain_accept import NO_TOKEN, AcceptMode, ChainAcceptResult


def chain_accept_ref(
    drafts: torch.Tensor,
    *,
    mode: AcceptMode,
    target_ids: torch.Tensor | None,
    target_probs: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    final_uniforms: torch.Tensor | None,
    row_starts: torch.Tensor | None,
    verify_lens: torch.Tensor | None,
) -> ChainAcceptResult:
    """See `chain_accept`; the arguments have been checked there, and R >= 1."""
    num_requests, num_drafts = drafts.shape
    width = num_drafts + 1
    device = drafts.device
    drafts = drafts.long()
    starts = torch.arange(num_requests, device=device) * width if row_starts is None else row_starts.long()
    if verify_lens is None:
        lens = torch.full((num_requests,), width, device=device)
    else:
        lens = verify_lens.long().clamp(0, width)
    steps = torch.arange(width, device=device)
    last_step = (lens - 1).clamp(min=0)
    target = target_ids if target_probs is None else target_probs
    assert target is not None
    num_rows = target.shape[0]
    # Places that are not verified are read at the request's last row instead: they may lie behind the tensor.
    rows = (starts[:, None] + torch.minimum(steps, last_step[:, None])).clamp(max=num_rows - 1)  # [R, K + 1]
    live = steps[:num_drafts] < last_step[:, None]  # [R, K]

    if mode == "greedy":
        hits = target[rows[:, :num_drafts]] == drafts
    else:
        assert target_probs is not None
        assert uniforms is not None
        hits = _coin_hits(drafts, rows[:, :num_drafts], target_probs, draft_probs, uniforms)
    num_accepted = (hits & live).long().cumprod(dim=1).sum(dim=1)  # [R]
    final_rows = rows.gather(1, num_accepted[:, None]).squeeze(1)

    padding = lens == 0
    if mode == "greedy":
        bonus, valid = target[final_rows].long(), ~padding
    else:
        assert target_probs is not None
        assert final_uniforms is not None
        rejected = num_accepted < last_step
        weights = _final_weights(target_probs[final_rows], drafts, draft_probs, num_accepted, rejected)
        bonus, valid = _draw(weights, final_uniforms)
        valid = valid & ~padding
    bonus = torch.where(padding, NO_TOKEN, bonus)

    padded_drafts = torch.nn.functional.pad(drafts, (0, 1))
    tail = torch.where(steps == num_accepted[:, None], bonus[:, None], NO_TOKEN)
    committed = torch.where(steps < num_accepted[:, None], padded_drafts, tail)
    return ChainAcceptResult(num_accepted.int(), bonus, committed, valid)


def _coin_hits(
    drafts: torch.Tensor,
    rows: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor,
) -> torch.Tensor:
    # [R, K] bool. Strict comparisons: a draft of probability zero loses even against a coin of 0.0.
    vocab_size = target_probs.shape[1]
    known = (drafts >= 0) & (drafts < vocab_size)
    tokens = torch.where(known, drafts, 0)
    p = torch.where(known, target_probs[rows, tokens], 0.0)
    if draft_probs is None:
        return uniforms < p
    q = draft_probs.gather(2, tokens[:, :, None]).squeeze(2)
    return (q > 0) & (uniforms * q < p)


def _final_weights(
    p: torch.Tensor,
    drafts: torch.Tensor,
    draft_probs: torch.Tensor | None,
    num_accepted: torch.Tensor,
    rejected: torch.Tensor,
) -> torch.Tensor:
    # [R, V]: p where every verified draft was accepted, else what the rejected draft leaves of p.
    p = torch.where(p > 0, p, 0.0)  # NaN compares false
    num_drafts = drafts.shape[1]
    if num_drafts == 0:
        return p
    step = num_accepted.clamp(max=num_drafts - 1)
    if draft_probs is None:
        token = drafts.gather(1, step[:, None]).clamp(0, p.shape[1] - 1)
        # A rejected token outside the vocabulary leaves p whole.
        drop = rejected[:, None] & (token == drafts.gather(1, step[:, None]))
        residual = p.scatter(1, token, torch.where(drop, 0.0, p.gather(1, token)))
    else:
        q = draft_probs[torch.arange(len(step), device=p.device), step]
        q = torch.where((q > 0) & rejected[:, None] & q.isfinite(), q, 0.0)
        residual = (p - q).clamp_(min=0.0)
    # An empty residual means p <= q everywhere, so p == q up to rounding: the exact rule would not have
    # rejected (or the coin was 1.0), and p itself is the distribution to draw from.
    return torch.where(residual.sum(dim=1, keepdim=True) > 0, residual, p)


def _draw(weights: torch.Tensor, uniforms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # Inverse CDF: the first token whose inclusive sum exceeds u * total, so never one of weight zero.
    cdf = weights.cumsum(dim=1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    valid = (total > 0) & total.isfinite()
    picked = torch.searchsorted(cdf, uniforms[:, None] * total, right=True)
    last_positive = torch.searchsorted(cdf, total)
    picked = torch.where(valid, torch.minimum(picked, last_positive), 0)
    return picked.squeeze(1), valid.squeeze(1)
