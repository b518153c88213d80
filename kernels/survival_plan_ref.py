"""Torch twin of `survival_plan`: a stable sort of all positions; the implementation on a CPU."""

import torch
from sglang_spec_ext.kernels.survival_plan import SMALLEST_SURVIVAL, SurvivalPlan


def survival_plan_ref(
    confidences: torch.Tensor, budget: "int | torch.Tensor", *, caps: torch.Tensor | None
) -> SurvivalPlan:
    """See `survival_plan`; the arguments have been checked there, and R >= 1."""
    num_requests, num_positions = confidences.shape
    device = confidences.device
    trusted = ((confidences >= 0.0) & (confidences <= 1.0)).all(dim=1, keepdim=True)  # NaN compares false
    # float64 inside, so that a product is rounded once, and equal to the kernel's
    survival = torch.where(trusted, confidences, 0.0).double().cumprod(dim=1).float()
    positions = torch.arange(num_positions, device=device)
    allowed = survival >= SMALLEST_SURVIVAL
    if caps is not None:
        allowed &= positions < caps[:, None]
    # Position-major, so that a stable sort breaks ties by (position, request).
    keys = torch.where(allowed, survival, 0.0).T.reshape(-1)
    order = keys.argsort(descending=True, stable=True)
    if isinstance(budget, torch.Tensor):
        budget = budget.reshape(())
    taken = torch.zeros_like(keys, dtype=torch.int32)
    taken[order] = (torch.arange(len(keys), device=device) < budget).int()
    taken = (taken * (keys > 0)).view(num_positions, num_requests)
    verify_lens = 1 + taken.sum(dim=0, dtype=torch.int32)
    if caps is not None:
        verify_lens = torch.where(caps < 0, 0, verify_lens)
    offsets = torch.nn.functional.pad(verify_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return SurvivalPlan(verify_lens, offsets)
