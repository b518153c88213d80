"""The plan that workers run is the rule that the simulator runs: `kernels.survival_plan` against `control.verify`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_spec_ext.control.verify import allocate, survival_of


@settings(max_examples=150, deadline=None)
@given(
    requests=st.sampled_from([1, 2, 7, 33, 64]),
    positions=st.sampled_from([1, 5, 7, 15]),
    fraction=st.sampled_from([0.0, 0.1, 0.5, 0.9, 2.0]),
    tied=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_one_rule(requests, positions, fraction, tied, seed) -> None:
    """Rows with NaN and values outside 0..1 among the others; coarse confidences, so most survivals tie, and fine."""
    torch = pytest.importorskip("torch")
    from sglang_spec_ext.kernels.cases import confidence_case
    from sglang_spec_ext.kernels.survival_plan import SMALLEST_SURVIVAL, survival_plan

    confidences = confidence_case(requests, positions, seed=seed)["confidences"]
    if not tied:
        confidences = confidences * torch.rand(confidences.shape, generator=torch.Generator().manual_seed(seed))
    budget = int(fraction * requests * positions)
    # the kernel ranks in float32 and counts what is below its smallest normal number as zero
    survival = survival_of(confidences.numpy()).astype(np.float32)
    survival[survival < SMALLEST_SURVIVAL] = 0.0
    assert (allocate(survival, budget) + 1).tolist() == survival_plan(confidences, budget).verify_lens.tolist()
