"""Spend a budget of verify tokens on the positions most likely to be reached, over all requests of a batch.

Survival of position j is the product of a request's confidences up to j: the chance that verification gets as
far as accepting it. It never rises along a request, so the `budget` best positions of the batch are a prefix
of each request, and the plan is one length per request (DSpark paper, confidence-scheduled verification;
upstream `sglang/kernels/ops/speculative/dspark/dspark_schedule.py`).

Lossless rule: ranking live confidences is safe, because a position can only lose its place to others by its
own earlier tokens and by other requests; the budget must not come from the confidences ranked here (take it
from an earlier step, `control.verify.plan_budget`). Ties are broken by (position, request), never by a value.

Twin: `survival_plan_ref`. Kernel: `survival_plan_triton`.
"""

from dataclasses import dataclass

import torch
from sglang_spec_ext.kernels.contracts import INDEX_DTYPES, check_tensor
from sglang_spec_ext.kernels.dispatch import runs_on_triton

# The kernel holds all positions of the batch in one program.
MAX_POSITIONS = 16384

# Survivals below the smallest normal float32 count as zero: a GPU may flush them, a CPU does not.
SMALLEST_SURVIVAL = 2.0**-126


@dataclass(frozen=True, slots=True)
class SurvivalPlan:
    """The verified prefix of each request, and where its rows start in a compact batch."""

    verify_lens: torch.Tensor  # [R] int32, drafts verified + 1 (the anchor); 0 for a padding request
    offsets: torch.Tensor  # [R + 1] int32, exclusive sums of verify_lens (a query indptr)

    @property
    def total(self) -> torch.Tensor:
        """Verify tokens of the batch, [] int32; a view, no launch."""
        return self.offsets[-1]

    @property
    def row_starts(self) -> torch.Tensor:
        """First row of each request, [R] int32; a view, what `chain_accept` takes."""
        return self.offsets[:-1]


def survival_plan(
    confidences: torch.Tensor, budget: "int | torch.Tensor", *, caps: torch.Tensor | None = None
) -> SurvivalPlan:
    """Choose how many drafts of each request are verified. One launch, nothing read on the host.

    Args:
        confidences: [R, G] float32, chance that draft j is accepted once the earlier ones were. Row stride
            free. A row holding NaN or a value outside 0..1 is planned as if nothing of it survived: its
            anchor alone.
        budget: draft tokens to verify in the batch, anchors not counted; below 0 counts as 0. A Python int,
            or an integer tensor of one element on the same device (what a captured graph needs).
        caps: [R] int32 or int64, most drafts to verify of each request; a negative cap marks a padding row of
            a captured graph, which gets no anchor either. None: G for all.

    Positions with survival zero are never taken, so fewer than `budget` tokens may be planned.

    Returns: SurvivalPlan; for R = 0 offsets is [0]; for G = 0 every request gets its anchor. R = 0 launches
        nothing.
    Raises: ValueError or TypeError on a wrong shape, dtype or device, or more than MAX_POSITIONS positions.
    """
    check_tensor("confidences", confidences, shape=(None, None), dtypes=(torch.float32,))
    num_requests, num_positions = confidences.shape
    device = confidences.device
    if num_requests * max(num_positions, 1) > MAX_POSITIONS:
        raise ValueError(
            f"confidences must hold at most {MAX_POSITIONS} positions (R * G), got {num_requests} * "
            f"{num_positions}; split the batch"
        )
    if isinstance(budget, torch.Tensor):
        check_tensor("budget", budget.reshape(-1), shape=(1,), dtypes=INDEX_DTYPES, device=device)
    elif not isinstance(budget, int) or isinstance(budget, bool):
        raise TypeError(f"budget must be an int or an integer tensor, got {type(budget).__name__}")
    if caps is not None:
        check_tensor("caps", caps, shape=(num_requests,), dtypes=INDEX_DTYPES, device=device)
    if num_requests == 0:
        return SurvivalPlan(
            verify_lens=torch.empty(0, dtype=torch.int32, device=device),
            offsets=torch.zeros(1, dtype=torch.int32, device=device),
        )
    if runs_on_triton(confidences):
        from sglang_spec_ext.kernels.survival_plan_triton import survival_plan_triton as implementation
    else:
        from sglang_spec_ext.kernels.survival_plan_ref import survival_plan_ref as implementation
    return implementation(confidences, budget, caps=caps)
