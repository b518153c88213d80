"""The Triton kernel of `margin_features` against its twin."""

import pytest
import torch
from sglang_spec_ext.kernels.cases import logits_case
from sglang_spec_ext.kernels.margin_features_ref import margin_features_ref
from sglang_spec_ext.kernels.margin_features_triton import margin_features_triton


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "vocab_size"), [(1, 1), (7, 97), (33, 1021), (6, 8197), (5, 17_000)])
def test_kernel_equals_twin(num_rows, vocab_size, dtype, triton_device):
    """Ids and margins exactly, ties, NaN and empty rows included; log-sum-exps to float32."""
    logits = logits_case(num_rows, vocab_size, dtype=dtype, seed=vocab_size)
    want = margin_features_ref(logits)
    got = margin_features_triton(logits.to(triton_device))
    nothing = want.log_sum_exps == -float("inf")  # no logit above -inf: any id
    assert torch.equal(got.top_ids.cpu()[~nothing], want.top_ids[~nothing])
    torch.testing.assert_close(got.margins.cpu(), want.margins, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(
        got.log_sum_exps.cpu(), want.log_sum_exps, rtol=1e-6, atol=1e-5, equal_nan=True
    )


def test_infinite_and_huge_logits(triton_device):
    """+inf wins with an infinite margin; large logits do not overflow the sum."""
    logits = torch.full((2, 5000), 3.0e4)
    logits[0, 4321] = float("inf")
    want = margin_features_ref(logits)
    got = margin_features_triton(logits.to(triton_device))
    assert got.top_ids.tolist() == want.top_ids.tolist() == [4321, 0]
    torch.testing.assert_close(got.margins.cpu(), want.margins, rtol=0, atol=0)
    torch.testing.assert_close(got.log_sum_exps.cpu(), want.log_sum_exps, rtol=1e-6, atol=1e-5)
