"""Triton kernel of `chain_accept`: one program per request, one launch, the row of p read once.

All K coins are tested side by side, so the time does not grow with the chain. The last token is drawn by
inverse CDF: one pass leaves the mass of each block of the row in registers, then only the block that the draw
falls into is read again.
"""

import torch
import triton
import triton.language as tl
from sglang_spec_ext.kernels.chain_accept import NO_TOKEN, AcceptMode, ChainAcceptResult

_GREEDY = tl.constexpr(0)
_TARGET_ONLY = tl.constexpr(1)
_REJECTION = tl.constexpr(2)
_MODE_CODES = {"greedy": _GREEDY.value, "target_only": _TARGET_ONLY.value, "rejection": _REJECTION.value}
_NO_TOKEN = tl.constexpr(NO_TOKEN)

# Widest block of the vocabulary that a program holds in registers (16 floats a thread at 8 warps).
_MAX_BLOCK_V = 4096


@triton.jit
def _last_token_weights(
    p_row_ptr,  # f32, row of p
    q_row_ptr,  # f32, row of q at the rejected place; read in rejection mode only
    offsets,  # [BLOCK_V] columns
    vocab_size,
    rejected,  # bool: was a draft rejected here
    rejected_token,  # the draft that was
    MODE: tl.constexpr,
):
    inside = offsets < vocab_size
    p = tl.load(p_row_ptr + offsets, mask=inside, other=0.0)
    p = tl.where(p > 0, p, 0.0)  # NaN compares false
    if MODE == _REJECTION:
        q = tl.load(q_row_ptr + offsets, mask=inside & rejected, other=0.0)
        q = tl.where((q > 0) & (q < float("inf")), q, 0.0)
        residual = tl.maximum(p - q, 0.0)
    else:
        residual = tl.where(rejected & (offsets == rejected_token), 0.0, p)
    return p, residual


# a new batch must not compile anew
@triton.jit(do_not_specialize=["num_rows", "num_drafts", "drafts_stride", "uniforms_stride"])
def _chain_accept_kernel(
    drafts_ptr,  # [R, K] int32 or int64
    row_starts_ptr,  # [R] int32 or int64, or None: dense
    verify_lens_ptr,  # [R] int32 or int64, or None: K + 1
    target_ids_ptr,  # [N] int32 or int64, greedy
    target_probs_ptr,  # [N, V] f32, sampled modes
    draft_probs_ptr,  # [R, K, V] f32, rejection
    uniforms_ptr,  # [R, K] f32, sampled modes
    final_uniforms_ptr,  # [R] f32, sampled modes
    num_accepted_ptr,  # [R] int32 (output)
    bonus_ptr,  # [R] int64 (output)
    committed_ptr,  # [R, K + 1] int64 (output)
    bonus_valid_ptr,  # [R] bool (output)
    drafts_stride,
    target_stride,
    draft_probs_request_stride,
    draft_probs_step_stride,
    uniforms_stride,
    num_rows,  # N
    num_drafts,  # K
    vocab_size,  # V
    MODE: tl.constexpr,
    WIDTH: tl.constexpr,  # power of two >= K + 1
    BLOCK_V: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,  # power of two >= ceil(V / BLOCK_V)
):
    request = tl.program_id(0).to(tl.int64)
    steps = tl.arange(0, WIDTH)
    width = num_drafts + 1
    if verify_lens_ptr is None:
        verify_len = width
    else:
        verify_len = tl.minimum(tl.maximum(tl.load(verify_lens_ptr + request), 0), width).to(tl.int32)
    row_start = request * width if row_starts_ptr is None else tl.load(row_starts_ptr + request).to(tl.int64)
    padding = verify_len == 0
    last_step = tl.maximum(verify_len - 1, 0)
    live = steps < last_step

    drafts = tl.load(drafts_ptr + request * drafts_stride + steps, mask=steps < num_drafts, other=0).to(
        tl.int64
    )
    if MODE == _GREEDY:
        hits = tl.load(target_ids_ptr + row_start + steps, mask=live, other=0).to(tl.int64) == drafts
    else:
        known = live & (drafts >= 0) & (drafts < vocab_size)
        p = tl.load(target_probs_ptr + (row_start + steps) * target_stride + drafts, mask=known, other=0.0)
        coins = tl.load(uniforms_ptr + request * uniforms_stride + steps, mask=live, other=1.0)
        if MODE == _REJECTION:
            q_ptr = draft_probs_ptr + request * draft_probs_request_stride + steps * draft_probs_step_stride
            q = tl.load(q_ptr + drafts, mask=known, other=0.0)
            hits = (q > 0) & (coins * q < p)
        else:
            hits = coins < p
    num_accepted = tl.min(tl.where(hits & live, WIDTH, steps), axis=0)
    # A padding request may point behind the tensor.
    final_row = tl.minimum(row_start + num_accepted, num_rows - 1)

    if MODE == _GREEDY:
        bonus = tl.load(target_ids_ptr + final_row).to(tl.int64)
        valid = verify_len > 0
    else:
        rejected = num_accepted < last_step
        rejected_token = tl.sum(tl.where(steps == num_accepted, drafts, 0), axis=0)
        p_row_ptr = target_probs_ptr + final_row * target_stride
        if MODE == _REJECTION:
            q_row_ptr = draft_probs_ptr + request * draft_probs_request_stride
            q_row_ptr += tl.minimum(num_accepted, num_drafts - 1) * draft_probs_step_stride
        else:
            q_row_ptr = p_row_ptr
        blocks = tl.arange(0, NUM_BLOCKS)
        p_mass = tl.zeros([NUM_BLOCKS], tl.float32)
        residual_mass = tl.zeros([NUM_BLOCKS], tl.float32)
        for block in range(tl.cdiv(vocab_size, BLOCK_V)):
            offsets = block * BLOCK_V + tl.arange(0, BLOCK_V)
            whole, rest = _last_token_weights(
                p_row_ptr, q_row_ptr, offsets, vocab_size, rejected, rejected_token, MODE
            )
            p_mass = tl.where(blocks == block, tl.sum(whole, axis=0), p_mass)
            residual_mass = tl.where(blocks == block, tl.sum(rest, axis=0), residual_mass)
        # An empty residual means p == q up to rounding: p itself is the distribution to draw from.
        from_residual = tl.sum(residual_mass, axis=0) > 0
        mass = tl.where(from_residual, residual_mass, p_mass)
        ends = tl.cumsum(mass, axis=0)
        total = tl.max(ends, axis=0)
        goal = tl.load(final_uniforms_ptr + request) * total
        # Where rounding leaves nothing above the goal, the last block with mass holds the draw.
        above = tl.min(tl.where((ends > goal) & (mass > 0), blocks, NUM_BLOCKS), axis=0)
        last = tl.max(tl.where(mass > 0, blocks, 0), axis=0)
        chosen = tl.minimum(above, last)
        before = tl.sum(tl.where(blocks < chosen, mass, 0.0), axis=0)
        offsets = chosen * BLOCK_V + tl.arange(0, BLOCK_V)
        whole, rest = _last_token_weights(
            p_row_ptr, q_row_ptr, offsets, vocab_size, rejected, rejected_token, MODE
        )
        weights = tl.where(from_residual, rest, whole)
        inside = before + tl.cumsum(weights, axis=0)
        token = tl.min(tl.where((inside > goal) & (weights > 0), offsets, vocab_size), axis=0)
        last_token = tl.max(tl.where(weights > 0, offsets, 0), axis=0)
        has_mass = (total > 0) & (total < float("inf"))
        bonus = tl.where(has_mass, tl.minimum(token, last_token), 0).to(tl.int64)
        valid = has_mass & (verify_len > 0)

    bonus = tl.where(padding, _NO_TOKEN, bonus)
    tl.store(num_accepted_ptr + request, num_accepted)
    tl.store(bonus_ptr + request, bonus)
    tl.store(bonus_valid_ptr + request, valid)
    committed = tl.where(steps < num_accepted, drafts, tl.where(steps == num_accepted, bonus, _NO_TOKEN))
    tl.store(committed_ptr + request * width + steps, committed, mask=steps < width)


def chain_accept_triton(
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
    device = drafts.device
    result = ChainAcceptResult(
        num_accepted=torch.empty(num_requests, dtype=torch.int32, device=device),
        bonus=torch.empty(num_requests, dtype=torch.int64, device=device),
        committed=torch.empty((num_requests, num_drafts + 1), dtype=torch.int64, device=device),
        bonus_valid=torch.empty(num_requests, dtype=torch.bool, device=device),
    )
    target = target_ids if target_probs is None else target_probs
    assert target is not None
    vocab_size = 1 if target_probs is None else target_probs.shape[1]
    block_v = min(triton.next_power_of_2(vocab_size), _MAX_BLOCK_V)
    _chain_accept_kernel[(num_requests,)](
        drafts,
        row_starts,
        verify_lens,
        target_ids,
        target_probs,
        draft_probs,
        uniforms,
        final_uniforms,
        result.num_accepted,
        result.bonus,
        result.committed,
        result.bonus_valid,
        drafts.stride(0),
        target.stride(0),
        0 if draft_probs is None else draft_probs.stride(0),
        0 if draft_probs is None else draft_probs.stride(1),
        0 if uniforms is None else uniforms.stride(0),
        target.shape[0],
        num_drafts,
        vocab_size,
        MODE=_MODE_CODES[mode],
        WIDTH=triton.next_power_of_2(num_drafts + 1),
        BLOCK_V=block_v,
        NUM_BLOCKS=triton.next_power_of_2(triton.cdiv(vocab_size, block_v)),
        num_warps=1 if mode == "greedy" else 8,
    )
    return result
