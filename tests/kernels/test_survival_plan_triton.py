"""The Triton kernel of `survival_plan` against its twin, integer for integer."""

import pytest
import torch
from sglang_spec_ext.kernels.cases import confidence_case
from sglang_spec_ext.kernels.survival_plan_ref import survival_plan_ref
from sglang_spec_ext.kernels.survival_plan_triton import survival_plan_triton


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize(("num_requests", "num_positions"), [(1, 7), (7, 5), (33, 15), (5, 0), (512, 7)])
def test_kernel_equals_twin(num_requests, num_positions, capped, triton_device):
    """Ties, bad rows, caps and padding requests; the budget as a number and as a tensor."""
    case = confidence_case(num_requests, num_positions, seed=num_requests)
    caps = case["caps"] if capped else None
    confidences = case["confidences"].to(triton_device)
    moved_caps = caps.to(triton_device) if capped else None
    for budget in (-1, 0, 1, 3, 40, 100_000):
        want = survival_plan_ref(case["confidences"], budget, caps=caps)
        for given in (budget, torch.tensor([budget], device=triton_device)):
            got = survival_plan_triton(confidences, given, caps=moved_caps)
            assert torch.equal(want.verify_lens, got.verify_lens.cpu()), budget
            assert torch.equal(want.offsets, got.offsets.cpu()), budget


def test_kernel_equals_twin_without_ties(triton_device):
    """Survivals of full precision, down to denormals: the product is rounded once in both."""
    confidences = torch.rand(37, 15, generator=torch.Generator().manual_seed(0)) ** 8
    for budget in (1, 17, 200, 500):
        want = survival_plan_ref(confidences, budget, caps=None)
        got = survival_plan_triton(confidences.to(triton_device), budget, caps=None)
        assert torch.equal(want.verify_lens, got.verify_lens.cpu())
