"""What a handoff costs on the CPU: bytes per request, and pack plus unpack (`pytest --benchmark-only`)."""

import numpy as np
import pytest
from sglang_spec_ext.disagg.record import DraftRecord, Expectation, RecordCodec
from sglang_spec_ext.disagg.schema import RecordShape, Schema

EAGLE_4096 = RecordShape(hidden_width=4096, hidden_dtype="bfloat16", max_hidden_rows=1, max_topk=8, max_prior=8)


@pytest.mark.parametrize(
    ("shape", "row_bytes"),
    [
        (EAGLE_4096, 64 + 8192 + 64 + 64 + 64),  # header, hidden, p, index, prior
        (RecordShape(max_block=15, max_prior=16), 64 + 64 + 64 + 64),  # header, ids, confidence, prior
    ],
    ids=["eagle-4096-top8", "dspark-15"],
)
def test_bytes_per_request_are_the_fields_and_their_alignment(shape, row_bytes):
    assert Schema(shape).row_bytes == row_bytes


def test_pack_and_unpack(benchmark):
    codec = RecordCodec(Schema(EAGLE_4096))
    rng = np.random.default_rng(0)
    record = DraftRecord(
        bootstrap_room=1,
        generation=1,
        seq_len=100,
        prompt_crc=5,
        anchor_token=3,
        active_k=3,
        hidden=rng.integers(0, 1 << 16, (1, 4096)).astype(np.uint16),
        topk_p=rng.random(8).astype(np.float32),
        topk_index=rng.integers(0, 1 << 17, 8),
        accept_prior=rng.random(8).astype(np.float32),
    )
    expected = Expectation(bootstrap_room=1, seq_len=100, prompt_crc=5, anchor_token=3)
    row = np.zeros(codec.row_bytes, np.uint8)

    def handoff():
        codec.encode_into(record, row)
        return codec.decode(row, expected)

    assert benchmark(handoff) == record
