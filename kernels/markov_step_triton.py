"""Triton kernels of `markov_step`: tiles of the vocabulary, then rows. The [R, V] bias is never in memory.

The first kernel multiplies a tile of W2 with the previous tokens' embeddings, adds the base logits and leaves
one record per row and tile: largest and second largest logit, sum of exponentials, and the best draw with its
id and logit. The second folds a row's records.
"""

import torch
import triton
import triton.language as tl
from sglang_spec_ext.kernels.gumbel import UNIFORM_SCALE
from sglang_spec_ext.kernels.markov_step import GumbelKey, MarkovStep

_NO_COLUMN = tl.constexpr(2**31 - 1)
_UNIFORM_SCALE = tl.constexpr(UNIFORM_SCALE)
_PHILOX_ROUNDS = tl.constexpr(10)
_RECORD = tl.constexpr(6)  # float32 words of one record
_TILE_V = 128


@triton.jit
def _philox_gumbel(key, offset, step, rows, first_column, TILE_R: tl.constexpr, TILE_V: tl.constexpr):
    """Noise [TILE_R, TILE_V] of `gumbel.gumbel_noise`; `first_column` is a multiple of four."""
    quads = first_column // 4 + tl.arange(0, TILE_V // 4)
    zero = tl.zeros([TILE_R, TILE_V // 4], tl.int64)
    w0, w1, w2, w3 = tl.philox(
        key,
        (zero + quads[None, :]).to(tl.uint32),
        (zero + rows[:, None]).to(tl.uint32),
        (zero + step).to(tl.uint32),
        (zero + offset).to(tl.uint32),
        _PHILOX_ROUNDS,
    )
    bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    # Small words convert exactly, so the small exponentials, which win, are precise.
    uniform = (bits.to(tl.float32) + 0.5) * _UNIFORM_SCALE
    # -log(1 - u) without cancellation (Kahan): `lost` is what 1 - u kept of u
    rest = 1.0 - uniform
    lost = 1.0 - rest
    exponential = tl.where(lost == 0.0, uniform, -tl.log(rest) * (uniform / tl.where(lost == 0.0, 1.0, lost)))
    return -tl.log(exponential)


@triton.jit(do_not_specialize=["num_requests", "step", "key"])
def _markov_tile_kernel(
    base_ptr,  # [R, V] f32, bf16 or f16
    prev_ptr,  # [R] int32 or int64
    w1_ptr,  # [V', r]
    w2_ptr,  # [V, r]
    temperatures_ptr,  # [R] f32, or None: greedy
    noise_ptr,  # [R, V] f32, or None: Philox
    offset_ptr,  # [1] int64, Philox
    logits_out_ptr,  # [R, V] (output), or None
    records_ptr,  # [R, P, 6] f32 (output)
    base_stride,
    w1_stride,
    w2_stride,
    noise_stride,
    logits_out_stride,
    num_requests,  # R
    vocab_size,  # V
    num_embeddings,  # V'
    num_tiles,  # P
    key,
    step,
    RANK: tl.constexpr,
    TILE_R: tl.constexpr,
    TILE_V: tl.constexpr,
    TILE_K: tl.constexpr,
):
    tile = tl.program_id(0)
    rows = tl.program_id(1) * TILE_R + tl.arange(0, TILE_R)
    columns = tile * TILE_V + tl.arange(0, TILE_V)
    real_row = rows < num_requests
    real_column = columns < vocab_size
    inside = real_row[:, None] & real_column[None, :]
    wide_rows = rows.to(tl.int64)

    prev = tl.load(prev_ptr + rows, mask=real_row, other=-1).to(tl.int64)
    known = (prev >= 0) & (prev < num_embeddings)
    bias = tl.zeros([TILE_R, TILE_V], tl.float32)
    for k in range(0, RANK, TILE_K):
        ks = k + tl.arange(0, TILE_K)
        inner = ks < RANK
        latent_mask = known[:, None] & inner[None, :]
        latent = tl.load(w1_ptr + prev[:, None] * w1_stride + ks[None, :], mask=latent_mask, other=0.0)
        w2_tile_ptr = w2_ptr + columns.to(tl.int64)[None, :] * w2_stride + ks[:, None]
        w2 = tl.load(w2_tile_ptr, mask=real_column[None, :] & inner[:, None], other=0.0)
        bias = tl.dot(latent, w2, bias, input_precision="ieee")
    base = tl.load(base_ptr + wide_rows[:, None] * base_stride + columns[None, :], mask=inside, other=0.0)
    logits = base.to(tl.float32) + bias.to(w2_ptr.dtype.element_ty).to(tl.float32)
    if logits_out_ptr is not None:
        out = logits.to(logits_out_ptr.dtype.element_ty)
        tl.store(logits_out_ptr + wide_rows[:, None] * logits_out_stride + columns[None, :], out, mask=inside)
        logits = out.to(tl.float32)  # what is drawn from is what rejection will read

    is_nan = (logits != logits) & inside  # noqa: PLR0124
    first_nan = tl.min(tl.where(is_nan, columns[None, :], _NO_COLUMN), axis=1)
    has_nan = first_nan != _NO_COLUMN
    logits = tl.where(inside & ~is_nan, logits, -float("inf"))
    top = tl.max(logits, axis=1)
    top_id = tl.min(tl.where(logits == top[:, None], columns[None, :], _NO_COLUMN), axis=1)
    second = tl.max(tl.where(columns[None, :] == top_id[:, None], -float("inf"), logits), axis=1)
    shift = tl.where(top > -float("inf"), top, 0.0)
    best, best_id, chosen = top, top_id, top
    if temperatures_ptr is None:
        exp_sum = tl.sum(tl.exp(logits - shift[:, None]), axis=1)
    else:
        temperature = tl.load(temperatures_ptr + rows, mask=real_row, other=0.0)
        sampled = temperature > 0.0
        scale = tl.where(sampled, temperature, 1.0)
        exp_sum = tl.sum(tl.exp((logits - shift[:, None]) / scale[:, None]), axis=1)
        if noise_ptr is None:
            offset = tl.load(offset_ptr) & 0xFFFFFFFF
            noise = _philox_gumbel(key, offset, step, rows, tile * TILE_V, TILE_R, TILE_V)
        else:
            noise_tile_ptr = noise_ptr + wide_rows[:, None] * noise_stride + columns[None, :]
            noise = tl.load(noise_tile_ptr, mask=inside, other=0.0)
        keys = logits / scale[:, None] + noise
        best_key = tl.max(keys, axis=1)
        drawn_id = tl.min(tl.where(keys == best_key[:, None], columns[None, :], _NO_COLUMN), axis=1)
        drawn = tl.max(tl.where(columns[None, :] == drawn_id[:, None], logits, -float("inf")), axis=1)
        best = tl.where(sampled, best_key, best)
        best_id = tl.where(sampled, drawn_id, best_id)
        chosen = tl.where(sampled, drawn, chosen)
    best = tl.where(has_nan, float("nan"), best)
    best_id = tl.where(has_nan, first_nan, best_id)

    record_ptr = records_ptr + (wide_rows * num_tiles + tile) * _RECORD
    tl.store(record_ptr, top, mask=real_row)
    tl.store(record_ptr + 1, second, mask=real_row)
    tl.store(record_ptr + 2, exp_sum, mask=real_row)
    tl.store(record_ptr + 3, best, mask=real_row)
    tl.store(record_ptr + 4, best_id.to(tl.float32, bitcast=True), mask=real_row)
    tl.store(record_ptr + 5, chosen, mask=real_row)


@triton.jit
def _markov_row_kernel(
    records_ptr,  # [R, P, 6] f32
    temperatures_ptr,  # [R] f32, or None
    tokens_ptr,  # [R] int64 (output)
    log_probs_ptr,  # [R] f32 (output)
    margins_ptr,  # [R] f32 (output)
    log_sum_exps_ptr,  # [R] f32 (output)
    num_tiles,  # P
    TILES: tl.constexpr,  # power of two >= P
):
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    real = tiles < num_tiles
    record_ptr = records_ptr + (row * num_tiles + tiles) * _RECORD
    tops = tl.load(record_ptr, mask=real, other=-float("inf"))
    seconds = tl.load(record_ptr + 1, mask=real, other=-float("inf"))
    exp_sums = tl.load(record_ptr + 2, mask=real, other=0.0)
    bests = tl.load(record_ptr + 3, mask=real, other=-float("inf"))
    ids = tl.load(record_ptr + 4, mask=real, other=0.0).to(tl.int32, bitcast=True)
    chosen = tl.load(record_ptr + 5, mask=real, other=0.0)

    is_nan = real & (bests != bests)  # noqa: PLR0124
    has_nan = tl.sum(is_nan.to(tl.int32), axis=0) > 0
    best = tl.max(tl.where(is_nan, -float("inf"), bests), axis=0)
    winners = tl.where(has_nan, is_nan, real & (bests == best))
    token = tl.min(tl.where(winners, ids, _NO_COLUMN), axis=0)
    top = tl.max(tops, axis=0)
    first = tl.min(tl.where(tops == top, tiles, TILES), axis=0)
    second = tl.max(tl.where(tiles == first, seconds, tops), axis=0)

    scale = 1.0
    if temperatures_ptr is not None:
        temperature = tl.load(temperatures_ptr + row)
        scale = tl.where(temperature > 0.0, temperature, 1.0)
    shift = tl.where(top > -float("inf"), top, 0.0)
    tile_shifts = tl.where(tops > -float("inf"), tops, 0.0)
    total = tl.sum(exp_sums * tl.exp((tile_shifts - shift) / scale), axis=0)
    log_sum_exp = shift / scale + tl.log(total)
    logit = tl.max(tl.where(winners & (ids == token), chosen, -float("inf")), axis=0)
    nan = float("nan")
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(log_probs_ptr + row, tl.where(has_nan, nan, logit / scale - log_sum_exp))
    tl.store(margins_ptr + row, tl.where(has_nan, nan, top - second))
    tl.store(log_sum_exps_ptr + row, tl.where(has_nan, nan, log_sum_exp))


def markov_step_triton(
    base_logits: torch.Tensor,
    prev_tokens: torch.Tensor,
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    temperatures: torch.Tensor | None,
    gumbel: "GumbelKey | torch.Tensor | None",
    logits_out: torch.Tensor | None,
    statistics: bool = True,  # noqa: ARG001 - they come with the tiles
) -> MarkovStep:
    """See `markov_step`; the arguments have been checked there, and R >= 1."""
    num_requests, vocab_size = base_logits.shape
    device = base_logits.device
    rank = w1.shape[1]
    num_tiles = triton.cdiv(vocab_size, _TILE_V)
    tile_r = min(max(triton.next_power_of_2(num_requests), 16), 64)  # a tensor-core product takes 16 rows or more
    records = torch.empty((num_requests, num_tiles, _RECORD.value), dtype=torch.float32, device=device)
    philox = gumbel if isinstance(gumbel, GumbelKey) else None
    noise = gumbel if isinstance(gumbel, torch.Tensor) else None
    _markov_tile_kernel[(num_tiles, triton.cdiv(num_requests, tile_r))](
        base_logits,
        prev_tokens,
        w1,
        w2,
        temperatures,
        noise,
        None if philox is None else philox.offset,
        logits_out,
        records,
        base_logits.stride(0),
        w1.stride(0),
        w2.stride(0),
        0 if noise is None else noise.stride(0),
        0 if logits_out is None else logits_out.stride(0),
        num_requests,
        vocab_size,
        w1.shape[0],
        num_tiles,
        0 if philox is None else philox.key,
        0 if philox is None else philox.step,
        RANK=rank,
        TILE_R=tile_r,
        TILE_V=_TILE_V,
        TILE_K=next((k for k in (64, 32, 16) if rank % k == 0), 32),
        num_warps=4 if tile_r <= 16 else 8,
    )
    outputs = [torch.empty(num_requests, dtype=torch.float32, device=device) for _ in range(3)]
    step = MarkovStep(torch.empty(num_requests, dtype=torch.int64, device=device), *outputs)
    _markov_row_kernel[(num_requests,)](
        records,
        temperatures,
        step.tokens,
        step.log_probs,
        step.margins,
        step.log_sum_exps,
        num_tiles,
        TILES=triton.next_power_of_2(num_tiles),
        num_warps=4,
    )
    return step
