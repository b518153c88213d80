"""The Triton kernel of `chain_accept` against its twin, integer for integer."""

import itertools

import pytest
import torch
from sglang_spec_ext.kernels.cases import chain_case
from sglang_spec_ext.kernels.chain_accept_ref import chain_accept_ref
from sglang_spec_ext.kernels.chain_accept_triton import chain_accept_triton

ARGUMENTS = (
    "target_ids",
    "target_probs",
    "draft_probs",
    "uniforms",
    "final_uniforms",
    "row_starts",
    "verify_lens",
)


def both(case: dict, device: str) -> tuple:
    """Run twin and kernel on the same arguments."""
    full = dict.fromkeys(ARGUMENTS) | case
    moved = {name: v.to(device) if isinstance(v, torch.Tensor) else v for name, v in full.items()}
    return chain_accept_ref(**full), chain_accept_triton(**moved)


def assert_equal(want, got) -> None:
    """Compare all fields, dtypes included."""
    for field in ("num_accepted", "bonus", "committed", "bonus_valid"):
        a, b = getattr(want, field), getattr(got, field).cpu()
        assert a.dtype is b.dtype, field
        assert torch.equal(a, b), (field, a, b)


@pytest.mark.parametrize("layout", ["dense", "capped", "ragged"])
@pytest.mark.parametrize("mode", ["greedy", "target_only", "rejection"])
@pytest.mark.parametrize(
    ("num_requests", "num_drafts", "vocab_size"),
    [(1, 7, 1021), (7, 5, 97), (33, 3, 33), (2, 0, 3), (3, 15, 8200)],
)
def test_kernel_equals_twin(num_requests, num_drafts, vocab_size, mode, layout, triton_device):
    """Odd sizes, pitched buffers full of NaN, padding rows, one and several blocks of the vocabulary."""
    case = chain_case(num_requests, num_drafts, vocab_size, mode=mode, layout=layout, seed=num_requests)
    assert_equal(*both(case, triton_device))


def test_kernel_equals_twin_at_the_edges(triton_device):
    """Coins 0 and almost 1, zero and NaN rows, q that is no probability."""
    almost = 1.0 - 2.0**-24
    nan = float("nan")
    rows = torch.tensor([[0.0, 1.0, 0.0], [0.25, 0.25, 0.5], [nan] * 3, [0.0] * 3])
    rivals = torch.tensor([[0.0, 0.0, 1.0], [nan, 1.0, 0.0], [0.5, 0.5, 0.0], [0.25] * 3])
    everything = itertools.product(range(4), range(4), (0.0, 0.5, almost), (0.0, almost), (-1, 0, 1, 2, 3))
    p_row, q_row, final, coin, token = (torch.tensor(column) for column in zip(*everything, strict=True))
    case = {
        "drafts": token[:, None].expand(-1, 2).contiguous(),
        "target_probs": rows[p_row].repeat_interleave(3, dim=0),
        "uniforms": coin[:, None].expand(-1, 2).contiguous(),
        "final_uniforms": final,
    }
    assert_equal(*both(case | {"mode": "target_only"}, triton_device))
    q = rivals[q_row][:, None].expand(-1, 2, -1)
    assert_equal(*both(case | {"mode": "rejection", "draft_probs": q}, triton_device))
