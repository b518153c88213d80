"""The Triton kernels of `markov_step` against the twin."""

import dataclasses

import pytest
import torch
from sglang_spec_ext.kernels.cases import markov_case
from sglang_spec_ext.kernels.markov_step import GumbelKey
from sglang_spec_ext.kernels.markov_step_ref import markov_step_ref
from sglang_spec_ext.kernels.markov_step_triton import markov_step_triton


def moved(value, device: str):
    """Put tensors, also those inside a GumbelKey, on the device."""
    if isinstance(value, GumbelKey):
        return dataclasses.replace(value, offset=value.offset.to(device))
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("noise", ["greedy", "given", "philox"])
@pytest.mark.parametrize(
    ("num_requests", "vocab_size", "rank", "half"),
    [(1, 97, 16, False), (7, 1021, 28, True), (33, 257, 64, False), (65, 33, 16, True), (3, 129, 5, False)],
)
def test_kernel_equals_twin(num_requests, vocab_size, rank, half, noise, triton_device):
    """Tokens, margins and biased logits exactly; sums of exponentials to float32."""
    # the interpreter multiplies bfloat16 by its bit patterns
    half_dtype = torch.float16 if triton_device == "cpu" else torch.bfloat16
    dtype = half_dtype if half else torch.float32
    case = markov_case(num_requests, vocab_size, rank, dtype=dtype, noise=noise, seed=rank)
    if half and case["logits_out"] is not None:
        case["logits_out"] = case["logits_out"].to(dtype)  # rounds, and the draw with it
    other = {name: moved(value, triton_device) for name, value in case.items()}
    if case["logits_out"] is not None:
        other["logits_out"] = case["logits_out"].clone().to(triton_device)
    want = markov_step_ref(**case)
    got = markov_step_triton(**other)
    assert torch.equal(got.tokens.cpu(), want.tokens)
    torch.testing.assert_close(got.margins.cpu(), want.margins, rtol=0, atol=0, equal_nan=True)
    for name in ("log_probs", "log_sum_exps"):
        torch.testing.assert_close(getattr(got, name).cpu(), getattr(want, name), rtol=1e-6, atol=2e-5, equal_nan=True)
    if case["logits_out"] is not None:
        torch.testing.assert_close(other["logits_out"].cpu(), case["logits_out"], rtol=0, atol=0, equal_nan=True)
