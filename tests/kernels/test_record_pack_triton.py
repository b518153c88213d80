"""The Triton kernels of `record_pack` and `record_unpack` against their twins, byte for byte."""

import pytest
import torch
from sglang_spec_ext.kernels.cases import record_case, record_layout
from sglang_spec_ext.kernels.record_pack_ref import record_pack_ref, record_unpack_ref
from sglang_spec_ext.kernels.record_pack_triton import record_pack_triton, record_unpack_triton


def moved(value, device: str):
    """Put tensors, also those in dictionaries, on the device without changing their strides."""
    if isinstance(value, dict):
        return {name: moved(item, device) for name, item in value.items()}
    wide = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return wide.copy_(value)


@pytest.mark.parametrize("hidden_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("num_requests", "hidden_width", "topk", "block"), [(1, 64, 8, 7), (7, 129, 1, 5), (33, 3, 0, 1)]
)
def test_kernels_equal_twins(num_requests, hidden_width, topk, block, hidden_dtype, triton_device):
    """Odd widths (two-byte words), pitched sources, counts, skipped and missing parts."""
    layout = record_layout(hidden_width=hidden_width, hidden_dtype=hidden_dtype, topk=topk, block=block)
    for seed in (0, 1):
        case = record_case(layout, num_requests, seed=seed)
        want = torch.full((num_requests + 3, layout.row_bytes), 0xA5, dtype=torch.uint8)
        got = want.clone().to(triton_device)
        record_pack_ref(want, layout, **case)
        record_pack_triton(got, layout, **moved(case, triton_device))
        assert torch.equal(got.cpu(), want)
        slots = case["slots"]
        parts = record_unpack_ref(want, layout.fields, slots=slots, word_bytes=layout.word_bytes)
        others = record_unpack_triton(
            got, layout.fields, slots=slots.to(triton_device), word_bytes=layout.word_bytes
        )
        for name, part in parts.items():
            assert torch.equal(others[name].cpu().view(torch.uint8), part.view(torch.uint8)), name
