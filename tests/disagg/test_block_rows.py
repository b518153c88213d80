"""First blocks packed on the device are what the host coder would have written, byte by byte."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.disagg.block_rows import pack_blocks, row_layout, unpack_blocks  # noqa: E402
from sglang_spec_ext.disagg.record import DraftRecord, RecordCodec  # noqa: E402
from sglang_spec_ext.disagg.schema import HEADER, RecordShape, Schema  # noqa: E402

BLOCK = Schema(RecordShape(max_block=7, max_prior=7))
WITH_HIDDEN = Schema(RecordShape(48, "bfloat16", max_hidden_rows=2, max_topk=8, max_block=5, max_prior=5))
IDS = torch.tensor([[5, 6, 7], [49_151, 0, 2**30]])
CONFIDENCE = torch.tensor([[0.5, 0.25, 0.0], [1.0, 0.75, 0.125]], dtype=torch.bfloat16)


@pytest.mark.parametrize("schema", [BLOCK, WITH_HIDDEN])
@pytest.mark.parametrize("confidence", [None, CONFIDENCE])
def test_rows_have_the_bytes_of_the_host_coder(schema, confidence):
    packed = pack_blocks(schema, IDS, confidence)
    codec = RecordCodec(schema)
    for row, arrays in enumerate(packed.arrays()):
        assert arrays["block_ids"].dtype == np.int32
        assert arrays["block_ids"].tolist() == IDS[row].tolist()
        if confidence is None:
            assert set(arrays) == {"block_ids"}
        else:
            assert arrays["block_confidence"].dtype == np.float32
            assert arrays["block_confidence"].tolist() == confidence[row].tolist()
        record = DraftRecord(bootstrap_room=1, generation=1, seq_len=1, prompt_crc=0, anchor_token=1, **arrays)
        assert codec.encode(record)[HEADER.size :].tobytes() == packed.rows[row, HEADER.size :].numpy().tobytes()


def test_the_layout_is_the_schemas():
    layout = row_layout(WITH_HIDDEN)
    assert layout.reserved_bytes == HEADER.size
    assert layout.row_bytes == WITH_HIDDEN.row_bytes
    for field, placed in zip(layout.fields, WITH_HIDDEN.placed_fields, strict=True):
        assert (field.name, field.offset, field.nbytes) == (placed.spec.name, placed.offset, placed.nbytes)
    assert layout.field("hidden").entry_width == 48


def test_more_drafts_than_a_row_holds_are_refused():
    with pytest.raises(ValueError, match="block_ids"):
        pack_blocks(BLOCK, torch.zeros((1, 8), dtype=torch.long), None)


def test_an_empty_batch_packs_no_row():
    packed = pack_blocks(BLOCK, torch.zeros((0, 7), dtype=torch.long), None)
    assert packed.arrays() == []


@pytest.mark.parametrize("schema", [BLOCK, WITH_HIDDEN])
@pytest.mark.parametrize("tokens", [0, 2, 3])
def test_blocks_come_out_as_they_went_in(schema, tokens):
    rows = list(pack_blocks(schema, IDS, CONFIDENCE).rows.numpy())
    ids, confidence = unpack_blocks(schema, rows[::-1], tokens=tokens, device="cpu")
    assert torch.equal(ids, IDS.flip(0)[:, :tokens].int())
    assert torch.equal(confidence, CONFIDENCE.flip(0)[:, :tokens].float())
