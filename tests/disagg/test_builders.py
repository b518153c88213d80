"""Draft state between tensors and records: exact, checked, and never another request's."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.disagg import builders  # noqa: E402
from sglang_spec_ext.disagg.record import DraftRecord, Expectation, RecordCodec  # noqa: E402
from sglang_spec_ext.disagg.schema import RecordShape, Schema  # noqa: E402

VOCAB, WIDTH, TOPK = 1000, 48, 20
KNOWN = {"bootstrap_room": 1, "seq_len": 3, "prompt_crc": 4, "anchor_token": 5}


def record_with(**arrays):
    return DraftRecord(**KNOWN, generation=1, **arrays)


def eagle_request(dtype):
    generator = torch.Generator().manual_seed(0)
    probs, ids = torch.softmax(torch.randn(VOCAB, generator=generator), 0).topk(TOPK)
    return SimpleNamespace(
        hidden_states_tensor=torch.randn(WIDTH, generator=generator).to(dtype),
        output_topk_p=probs,
        output_topk_index=ids,
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_eagle_state_crosses_bit_for_bit(dtype):
    req = eagle_request(dtype)
    name = str(dtype).removeprefix("torch.")
    codec = RecordCodec(Schema(RecordShape(WIDTH, name, max_hidden_rows=1, max_topk=TOPK)))
    row = codec.encode(record_with(**builders.eagle_arrays(req)))
    record = codec.decode(row, Expectation(**KNOWN))
    builders.check_values(record, vocab_size=VOCAB)
    builders.check_eagle(record, num_topk=TOPK)
    other = SimpleNamespace(
        hidden_states_tensor=torch.full((WIDTH,), 7.0, dtype=dtype),
        output_topk_p=torch.full((16,), 0.5),
        output_topk_index=torch.full((16,), 3),
    )
    builders.warm_eagle(other, record)
    for field in vars(req):
        ours, theirs = getattr(other, field), getattr(req, field)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    builders.cold_eagle(other, num_topk=TOPK)
    assert other.hidden_states_tensor.dtype == dtype
    assert not other.hidden_states_tensor.any()
    assert not other.output_topk_p.any()
    assert other.output_topk_index.shape == (TOPK,)
    assert not other.output_topk_index.any()


def test_a_request_without_draft_state_has_no_arrays():
    assert builders.eagle_arrays(SimpleNamespace(hidden_states_tensor=None)) is None


@pytest.mark.parametrize(
    ("arrays", "field"),
    [
        ({"topk_p": np.zeros(2, np.float32), "topk_index": np.array([0, VOCAB])}, "topk_index"),
        ({"topk_p": np.zeros(2, np.float32), "topk_index": np.array([-1, 0])}, "topk_index"),
        ({"block_ids": np.array([3, VOCAB], np.int32)}, "block_ids"),
        ({"topk_p": np.array([0.5, np.nan], np.float32), "topk_index": np.array([0, 1])}, "topk_p"),
        ({"topk_p": np.array([1.5], np.float32), "topk_index": np.array([0])}, "topk_p"),
        ({"accept_prior": np.array([-0.1], np.float32)}, "accept_prior"),
        ({"hidden": np.array([[1.0, np.inf]], np.float32)}, "hidden"),
        ({"hidden": np.array([[0x7FC0, 0]], np.uint16)}, "hidden"),  # bfloat16 NaN
    ],
)
def test_values_that_cannot_be_used_are_refused_by_name(arrays, field):
    with pytest.raises(builders.UnusableValueError) as caught:
        builders.check_values(record_with(**arrays), vocab_size=VOCAB)
    assert caught.value.field == field


def test_an_anchor_outside_the_vocabulary_is_refused_and_nan_confidence_passes():
    record = record_with(block_ids=np.array([1], np.int32), block_confidence=np.array([np.nan], np.float32))
    builders.check_values(record, vocab_size=VOCAB)
    with pytest.raises(builders.UnusableValueError, match="anchor_token"):
        builders.check_values(record, vocab_size=5)


def test_eagle_records_of_another_shape_are_refused():
    one = {"topk_p": np.zeros(2, np.float32), "topk_index": np.zeros(2, np.int64)}
    with pytest.raises(builders.UnusableValueError, match="num_hidden_rows"):
        builders.check_eagle(record_with(**one), num_topk=2)
    with pytest.raises(builders.UnusableValueError, match="num_topk"):
        builders.check_eagle(record_with(**one, hidden=np.zeros((1, 4), np.float32)), num_topk=3)


def test_a_first_block_is_given_out_once_and_only_at_its_position():
    block = {"block_ids": np.array([4, 5, 6], np.int32), "block_confidence": np.full(3, 0.5, np.float32)}
    codec = RecordCodec(Schema(RecordShape(max_block=7)))
    with_confidence, without = (
        codec.decode(codec.encode(record), Expectation(**KNOWN))
        for record in (record_with(**block), record_with(block_ids=block["block_ids"]))
    )
    fresh, plain, moved, longer, shorter, empty = (SimpleNamespace() for _ in range(6))
    for req in (fresh, moved, longer, shorter):
        builders.FirstBlocks.put(req, with_confidence)
    builders.FirstBlocks.put(plain, without)
    reqs = [empty, fresh, plain, moved]
    taken = builders.FirstBlocks.take(reqs, [3, 3, 3, 4], num_draft_tokens=3)
    assert sorted(taken) == [1, 2]
    assert codec.decode(taken[1].row, Expectation(**KNOWN)) == with_confidence
    assert [taken[row].has_confidence for row in (1, 2)] == [True, False]
    assert builders.FirstBlocks.take(reqs, [3, 3, 3, 3], num_draft_tokens=3) == {}
    assert list(builders.FirstBlocks.take([longer], [3], num_draft_tokens=2)) == [0]
    assert builders.FirstBlocks.take([shorter], [3], num_draft_tokens=4) == {}
    assert builders.FirstBlocks.take([shorter], [3], num_draft_tokens=3) == {}
