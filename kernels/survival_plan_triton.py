"""Triton kernel of `survival_plan`: one program holds the whole batch and selects instead of sorting.

Survivals are floats in [0, 1], whose bit patterns order as integers below 2**30. The budget-th largest
pattern is found by fixing two bits at a time: three counts packed into one 64-bit sum, fifteen reductions in
all. Positions equal to it are ranked by a running count in (position, request) order. No atomics, so the same
on every run.
"""

import torch
import triton
import triton.language as tl
from sglang_spec_ext.kernels.survival_plan import SMALLEST_SURVIVAL, SurvivalPlan

_SMALLEST_SURVIVAL = tl.constexpr(SMALLEST_SURVIVAL)
_ROUNDS = tl.constexpr(15)  # two bits each: patterns of [0, 1] are below 2**30
_FIRST_UNIT = tl.constexpr(1 << 28)
_COUNT_BITS = tl.constexpr(21)  # room for MAX_POSITIONS three times in an int64
_COUNT_MASK = tl.constexpr((1 << 21) - 1)


# a new budget or batch size must not compile anew
@triton.jit(do_not_specialize=["budget", "confidences_stride", "num_requests", "num_positions"])
def _survival_plan_kernel(
    confidences_ptr,  # [R, G] f32
    budget_ptr,  # [1] int32 or int64, or None
    caps_ptr,  # [R] int32 or int64, or None
    verify_lens_ptr,  # [R] int32 (output)
    offsets_ptr,  # [R + 1] int32 (output)
    budget,  # used where budget_ptr is None
    confidences_stride,
    num_requests,  # R
    num_positions,  # G
    REQUESTS: tl.constexpr,  # power of two >= R
    POSITIONS: tl.constexpr,  # power of two >= G
):
    # Position-major: the flat order is (position, request), the order of ties.
    flat = tl.arange(0, POSITIONS * REQUESTS)
    request = flat % REQUESTS
    position = flat // REQUESTS
    inside = (request < num_requests) & (position < num_positions)
    row_ptr = confidences_ptr + request.to(tl.int64) * confidences_stride

    survival = tl.full([POSITIONS * REQUESTS], 1.0, tl.float64)
    trusted = inside
    for j in range(num_positions):
        # Each lane multiplies its own prefix, left to right: survivals of a request never rise.
        confidence = tl.load(row_ptr + j, mask=inside, other=0.0)
        good = (confidence >= 0.0) & (confidence <= 1.0)  # NaN compares false
        trusted = trusted & good
        survival *= tl.where(good & (j <= position), confidence, 1.0).to(tl.float64)
    allowed = trusted
    if caps_ptr is not None:
        allowed = allowed & (position < tl.load(caps_ptr + request, mask=inside, other=0))
    key = survival.to(tl.float32)
    allowed = allowed & (key >= _SMALLEST_SURVIVAL)
    bits = tl.where(allowed, key, 0.0).to(tl.int32, bitcast=True)

    wanted = budget if budget_ptr is None else tl.load(budget_ptr)
    available = tl.sum(allowed.to(tl.int32), axis=0)
    wanted = tl.minimum(tl.maximum(wanted, 0), available).to(tl.int32)
    # The largest pattern that at least `wanted` positions reach.
    threshold = tl.full([], 0, tl.int32)
    unit = tl.full([], _FIRST_UNIT, tl.int32)
    for _ in range(_ROUNDS):
        low, middle, high = threshold + unit, threshold + 2 * unit, threshold + 3 * unit
        packed = (bits >= low).to(tl.int64)
        packed += (bits >= middle).to(tl.int64) << _COUNT_BITS
        packed += (bits >= high).to(tl.int64) << (2 * _COUNT_BITS)
        counts = tl.sum(packed, axis=0)
        at_low = (counts & _COUNT_MASK).to(tl.int32)
        at_middle = ((counts >> _COUNT_BITS) & _COUNT_MASK).to(tl.int32)
        at_high = (counts >> (2 * _COUNT_BITS)).to(tl.int32)
        threshold = tl.where(
            at_high >= wanted,
            high,
            tl.where(at_middle >= wanted, middle, tl.where(at_low >= wanted, low, threshold)),
        )
        unit = unit >> 2
    above = bits > threshold
    tied = (bits == threshold) & allowed
    room = wanted - tl.sum(above.to(tl.int32), axis=0)
    rank = tl.cumsum(tied.to(tl.int32), axis=0)
    taken = above | (tied & (rank <= room))

    drafts = tl.sum(tl.reshape(taken.to(tl.int32), [POSITIONS, REQUESTS]), axis=0)
    requests = tl.arange(0, REQUESTS)
    real = requests < num_requests
    lens = tl.where(real, drafts + 1, 0)
    if caps_ptr is not None:
        lens = tl.where(tl.load(caps_ptr + requests, mask=real, other=-1) < 0, 0, lens)
    tl.store(verify_lens_ptr + requests, lens, mask=real)
    tl.store(offsets_ptr, 0)
    tl.store(offsets_ptr + 1 + requests, tl.cumsum(lens, axis=0), mask=real)


def survival_plan_triton(
    confidences: torch.Tensor, budget: "int | torch.Tensor", *, caps: torch.Tensor | None
) -> SurvivalPlan:
    """See `survival_plan`; the arguments have been checked there, and R >= 1."""
    num_requests, num_positions = confidences.shape
    device = confidences.device
    verify_lens = torch.empty(num_requests, dtype=torch.int32, device=device)
    offsets = torch.empty(num_requests + 1, dtype=torch.int32, device=device)
    requests = triton.next_power_of_2(num_requests)
    positions = triton.next_power_of_2(max(num_positions, 1))
    on_device = isinstance(budget, torch.Tensor)
    _survival_plan_kernel[(1,)](
        confidences,
        budget if on_device else None,
        caps,
        verify_lens,
        offsets,
        0 if on_device else min(budget, num_requests * num_positions),
        confidences.stride(0),
        num_requests,
        num_positions,
        REQUESTS=requests,
        POSITIONS=positions,
        # About eight positions a thread, from one warp up to the 1024 threads of a program.
        num_warps=max(1, min(32, requests * positions // 256)),
    )
    return SurvivalPlan(verify_lens, offsets)
