"""Triton kernel of `margin_features`: one program per row, every logit loaded once.

Each lane keeps its own largest, second largest and sum of exponentials over the columns it sees, and lanes
meet once at the end. Four blocks are taken together, so that the running sum is rescaled once for four
exponentials.
"""

import torch
import triton
import triton.language as tl
from sglang_spec_ext.kernels.margin_features import MarginFeatures

_NO_COLUMN = tl.constexpr(2**31 - 1)
_MAX_BLOCK_V = 2048


@triton.jit
def _enter(x, columns, inside, largest, second, largest_id, nan_id):
    """Take one block of logits into the running top two of each lane."""
    is_nan = x != x  # noqa: PLR0124
    nan_id = tl.where(is_nan & inside & (nan_id == _NO_COLUMN), columns, nan_id)
    x = tl.where(is_nan, -float("inf"), x)
    second = tl.maximum(second, tl.minimum(largest, x))
    # columns rise, so a strict comparison keeps the lowest id among equals
    largest_id = tl.where(x > largest, columns, largest_id)
    largest = tl.maximum(largest, x)
    return x, largest, second, largest_id, nan_id


@triton.jit
def _finite(x):
    """Replace an infinite maximum by 0, which is as good a shift and makes no NaN."""
    return tl.where((x > -float("inf")) & (x < float("inf")), x, 0.0)


@triton.jit
def _margin_features_kernel(
    logits_ptr,  # [N, V] f32, bf16 or f16
    top_ids_ptr,  # [N] int64 (output)
    margins_ptr,  # [N] f32 (output)
    log_sum_exps_ptr,  # [N] f32 (output)
    logits_stride,
    vocab_size,  # V
    BLOCK_V: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride
    lanes = tl.arange(0, BLOCK_V)
    minus_inf = tl.full([BLOCK_V], -float("inf"), tl.float32)
    largest, second, shift = minus_inf, minus_inf, minus_inf
    largest_id = lanes
    nan_id = tl.full([BLOCK_V], _NO_COLUMN, tl.int32)
    exp_sum = tl.zeros([BLOCK_V], tl.float32)
    for start in range(0, vocab_size, 4 * BLOCK_V):
        c0 = start + lanes
        c1, c2, c3 = c0 + BLOCK_V, c0 + 2 * BLOCK_V, c0 + 3 * BLOCK_V
        i0, i1, i2, i3 = c0 < vocab_size, c1 < vocab_size, c2 < vocab_size, c3 < vocab_size
        x0 = tl.load(row_ptr + c0, mask=i0, other=-float("inf")).to(tl.float32)
        x1 = tl.load(row_ptr + c1, mask=i1, other=-float("inf")).to(tl.float32)
        x2 = tl.load(row_ptr + c2, mask=i2, other=-float("inf")).to(tl.float32)
        x3 = tl.load(row_ptr + c3, mask=i3, other=-float("inf")).to(tl.float32)
        x0, largest, second, largest_id, nan_id = _enter(x0, c0, i0, largest, second, largest_id, nan_id)
        x1, largest, second, largest_id, nan_id = _enter(x1, c1, i1, largest, second, largest_id, nan_id)
        x2, largest, second, largest_id, nan_id = _enter(x2, c2, i2, largest, second, largest_id, nan_id)
        x3, largest, second, largest_id, nan_id = _enter(x3, c3, i3, largest, second, largest_id, nan_id)
        base = _finite(largest)
        exp_sum = exp_sum * tl.exp(_finite(shift) - base) + tl.exp(x0 - base)
        exp_sum += tl.exp(x1 - base) + tl.exp(x2 - base) + tl.exp(x3 - base)
        shift = largest

    top = tl.max(largest, axis=0)
    top_id = tl.min(tl.where(largest == top, largest_id, _NO_COLUMN), axis=0)
    # the winner's lane offers its second, all other lanes their first
    runner_up = tl.max(tl.where(largest_id == top_id, second, largest), axis=0)
    base = _finite(top)
    total = tl.sum(exp_sum * tl.exp(_finite(shift) - base), axis=0)
    log_sum_exp = base + tl.log(total)
    margin = top - runner_up
    first_nan = tl.min(nan_id, axis=0)
    has_nan = first_nan != _NO_COLUMN
    tl.store(top_ids_ptr + row, tl.where(has_nan, first_nan, top_id).to(tl.int64))
    tl.store(margins_ptr + row, tl.where(has_nan, float("nan"), margin))
    tl.store(log_sum_exps_ptr + row, tl.where(has_nan, float("nan"), log_sum_exp))


def margin_features_triton(logits: torch.Tensor) -> MarginFeatures:
    """See `margin_features`; the argument has been checked there, and N, V >= 1."""
    num_rows, vocab_size = logits.shape
    features = MarginFeatures(
        top_ids=torch.empty(num_rows, dtype=torch.int64, device=logits.device),
        margins=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        log_sum_exps=torch.empty(num_rows, dtype=torch.float32, device=logits.device),
    )
    _margin_features_kernel[(num_rows,)](
        logits,
        features.top_ids,
        features.margins,
        features.log_sum_exps,
        logits.stride(0),
        vocab_size,
        BLOCK_V=min(triton.next_power_of_2(vocab_size), _MAX_BLOCK_V),
        num_warps=8,
    )
    return features
