"""`record_pack` and `record_unpack` on the CPU: bytes against `struct`-like assembly, and refusals."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.kernels.cases import record_case, record_layout
from sglang_spec_ext.kernels.record_pack import record_pack, record_unpack
from sglang_spec_ext.kernels.row_layout import FieldLayout, RowLayout

SENTINEL = 0xA5


def expected_row(layout: RowLayout, case: dict, request: int) -> bytes:
    """Assemble one row, field by field."""
    row = bytearray(layout.row_bytes)
    row[: layout.reserved_bytes] = bytes([SENTINEL]) * layout.reserved_bytes
    for field in layout.fields:
        if field.name not in case["sources"]:
            continue
        index = case["source_rows"].get(field.name)
        values = case["sources"][field.name][request if index is None else int(index[request])]
        count = case["counts"].get(field.name)
        if count is not None:
            values = values[: int(count[request]) * field.entry_width]
        raw = values.contiguous().view(torch.uint8).numpy().tobytes()
        row[field.offset : field.offset + len(raw)] = raw
    return bytes(row)


@settings(max_examples=30, deadline=None)
@given(
    num_requests=st.sampled_from([1, 7, 33]),
    hidden_width=st.sampled_from([0, 3, 64, 129]),
    hidden_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    topk=st.sampled_from([0, 1, 8]),
    block=st.sampled_from([1, 7]),
    seed=st.integers(0, 100),
)
def test_rows_hold_exactly_the_fields(num_requests, hidden_width, hidden_dtype, topk, block, seed):
    """Every byte of every row: fields, zeros between them, reserved bytes and other slots untouched."""
    layout = record_layout(hidden_width=hidden_width, hidden_dtype=hidden_dtype, topk=topk, block=block)
    case = record_case(layout, num_requests, seed=seed)
    rows = torch.full((num_requests + 3, layout.row_bytes), SENTINEL, dtype=torch.uint8)
    record_pack(rows, layout, **case)
    written = {int(slot): request for request, slot in enumerate(case["slots"]) if slot >= 0}
    for slot in range(num_requests + 3):
        got = rows[slot].numpy().tobytes()
        if slot in written:
            assert got == expected_row(layout, case, written[slot])
        else:
            assert got == bytes([SENTINEL]) * layout.row_bytes

    names = [field.name for field in layout.fields]
    back = record_unpack(rows, layout, slots=case["slots"], names=names)
    for field in layout.fields:
        assert back[field.name].shape == (num_requests, field.width)
        assert back[field.name].dtype is field.dtype
        for request, slot in enumerate(case["slots"].tolist()):
            raw = bytes(field.nbytes)
            if slot >= 0:
                raw = rows[slot, field.offset : field.offset + field.nbytes].numpy().tobytes()
            assert back[field.name][request].view(torch.uint8).numpy().tobytes() == raw


BAD_FIELDS = {
    "begin at byte 64 or later": FieldLayout("a", 32, 4, torch.float32),
    "multiple of 4 bytes": FieldLayout("a", 66, 4, torch.float32),
    "whole entries of 3": FieldLayout("a", 64, 4, torch.float32, 3),
    "row_bytes must be at least 192": FieldLayout("a", 64, 32, torch.float32),
}


@pytest.mark.parametrize("message", BAD_FIELDS)
def test_a_layout_that_cannot_be_is_refused(message):
    """Overlap, misalignment, part of an entry, beyond the row."""
    with pytest.raises(ValueError, match=message):
        RowLayout(row_bytes=128, fields=(BAD_FIELDS[message],), reserved_bytes=64)


def test_empty_batches_and_refusals():
    """R = 0 changes nothing; unknown fields, wrong dtypes and wide sources are named."""
    layout = record_layout(hidden_width=4, hidden_dtype=torch.float32, topk=2, block=3)
    rows = torch.full((2, layout.row_bytes), SENTINEL, dtype=torch.uint8)
    none = torch.zeros(0, dtype=torch.int64)
    record_pack(rows, layout, slots=none, sources={"topk_p": torch.zeros(0, 2)})
    assert (rows == SENTINEL).all()
    assert record_unpack(rows, layout, slots=none, names=["topk_p"])["topk_p"].shape == (0, 2)
    slots = torch.tensor([0])
    with pytest.raises(ValueError, match="field must be one of hidden, topk_p"):
        record_pack(rows, layout, slots=slots, sources={"topk": torch.zeros(1, 2)})
    with pytest.raises(TypeError, match=r"sources\['topk_p'\] must be torch.float32"):
        record_pack(rows, layout, slots=slots, sources={"topk_p": torch.zeros(1, 2).double()})
    with pytest.raises(ValueError, match="at most 2 columns"):
        record_pack(rows, layout, slots=slots, sources={"topk_p": torch.zeros(1, 3)})
    with pytest.raises(ValueError, match="counts must name fields of sources"):
        record_pack(rows, layout, slots=slots, sources={}, counts={"hidden": slots})
