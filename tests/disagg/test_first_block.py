"""The first block: slots are borrowed page by page and given back, and shipped rows replace drafted ones."""

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from sglang_spec_ext.disagg import first_block, session  # noqa: E402
from sglang_spec_ext.disagg.builders import FirstBlocks  # noqa: E402
from sglang_spec_ext.disagg.record import DraftRecord, Expectation, RecordCodec  # noqa: E402
from sglang_spec_ext.disagg.schema import RecordShape, Schema  # noqa: E402

TABLE_WIDTH = 96
CODEC = RecordCodec(Schema(RecordShape(max_block=7)))


class PagePool:
    """SGLang's allocator contract: whole pages in, whole pages out, None when there are too few."""

    def __init__(self, num_pages, page_size):
        self.page_size = page_size
        self.pages = list(range(1, num_pages + 1))

    def alloc(self, need_size):
        assert need_size % self.page_size == 0
        count = need_size // self.page_size
        if count > len(self.pages):
            return None
        taken, self.pages = self.pages[:count], self.pages[count:]
        starts = torch.tensor(taken).unsqueeze(1) * self.page_size
        return (starts + torch.arange(self.page_size)).reshape(-1)

    def free(self, slots):
        freed = sorted(set((slots // self.page_size).tolist()))
        assert not set(freed) & set(self.pages), "freed twice"
        self.pages += freed


def batch_of(pool, seq_lens):
    """A batch whose prompts lie in whole pages of their own."""
    table = torch.zeros((len(seq_lens) + 2, TABLE_WIDTH), dtype=torch.int32)
    reqs = []
    for row, length in enumerate(seq_lens, start=1):
        table[row, :length] = pool.alloc(-(-length // pool.page_size) * pool.page_size)[:length]
        reqs.append(SimpleNamespace(kv=SimpleNamespace(req_pool_idx=row)))
    return SimpleNamespace(
        reqs=reqs,
        seq_lens_cpu=torch.tensor(seq_lens),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        token_to_kv_pool_allocator=pool,
    )


@settings(max_examples=100, deadline=None)
@given(
    page_size=st.sampled_from([1, 4, 16]),
    seq_lens=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    width=st.integers(2, 17),
)
def test_borrowed_slots_keep_pages_whole_and_all_come_back(page_size, seq_lens, width):
    pool = PagePool(400, page_size)
    batch = batch_of(pool, seq_lens)
    table = batch.req_to_token_pool.req_to_token
    before, free_before = table.clone(), sorted(pool.pages)
    slots = first_block.BorrowedSlots.take(batch, width)
    used = []
    for row, length in enumerate(seq_lens, start=1):
        mapped = table[row, : length + width].tolist()
        used += mapped
        for position, slot in enumerate(mapped):
            assert slot % page_size == position % page_size
            assert slot // page_size == mapped[position - position % page_size] // page_size
    assert len(set(used)) == len(used), "no slot serves two positions"
    slots.give_back()
    assert torch.equal(table, before)
    assert sorted(pool.pages) == free_before


def test_without_room_nothing_is_taken():
    pool = PagePool(6, 4)
    batch = batch_of(pool, [8, 8])
    before = batch.req_to_token_pool.req_to_token.clone()
    free = list(pool.pages)
    assert first_block.BorrowedSlots.take(batch, 8) is None
    assert first_block.BorrowedSlots.take(batch, TABLE_WIDTH) is None
    assert pool.pages == free
    assert torch.equal(batch.req_to_token_pool.req_to_token, before)


def request_with(block_ids=None, confidence=None, *, prompt_len=3):
    req = SimpleNamespace(origin_input_ids=list(range(prompt_len)), output_ids=[9])
    if block_ids is not None:
        known = {"bootstrap_room": 1, "seq_len": prompt_len, "prompt_crc": 0, "anchor_token": 9}
        arrays = {
            "block_ids": np.array(block_ids, np.int32),
            "block_confidence": np.array(confidence or [], np.float32),
        }
        row = CODEC.encode(DraftRecord(**known, generation=1, **arrays))
        FirstBlocks.put(req, CODEC.decode(row, Expectation(**known)))
    return req


@pytest.fixture
def on_decode(monkeypatch):
    monkeypatch.setattr(first_block, "current_session", lambda: SimpleNamespace(role="decode", codec=CODEC))


def drafted(bs, *, sampled=False):
    return SimpleNamespace(
        draft_block=SimpleNamespace(
            draft_tokens=torch.full((bs, 3), 50),
            corrected_logits=torch.randn(bs, 3, 64) if sampled else None,
        ),
        confidence=torch.full((bs, 3), 0.9),
        verify_ids=torch.full((bs, 4), 50),
    )


@pytest.mark.parametrize("sampled", [False, True])
def test_in_a_mixed_step_the_fresh_rows_are_replaced_and_the_others_are_not(on_decode, sampled):
    reqs = [request_with(), request_with([4, 5, 6], [0.5, 0.25, 0.125]), request_with()]
    proposal = drafted(3, sampled=sampled)
    others = proposal.draft_block.corrected_logits.clone()[[0, 2]] if sampled else None
    proposer = SimpleNamespace(gamma=3, deferred_commit=None, _dp_moe_sync=False)
    calls = []
    original = lambda _, **arguments: calls.append(arguments) or proposal  # noqa: E731
    batch = SimpleNamespace(reqs=reqs)
    assert first_block.around_propose(original, proposer, batch=batch) is proposal
    assert proposal.draft_block.draft_tokens.tolist() == [[50] * 3, [4, 5, 6], [50] * 3]
    assert proposal.verify_ids.tolist() == [[50] * 4, [50, 4, 5, 6], [50] * 4]
    assert proposal.confidence[1].tolist() == [0.5, 0.25, 0.125]
    if sampled:
        probs = torch.softmax(proposal.draft_block.corrected_logits[1] / 0.7, -1)
        assert torch.equal(probs, torch.nn.functional.one_hot(torch.tensor([4, 5, 6]), 64).float())
        assert torch.equal(proposal.draft_block.corrected_logits[[0, 2]], others)
    first_block.around_propose(original, proposer, batch=batch)
    assert len(calls) == 2
    assert not any(hasattr(req, FirstBlocks.ATTRIBUTE) for req in reqs)


def test_a_step_of_fewer_tokens_takes_the_first_of_a_block(on_decode):
    proposal = drafted(1)
    proposer = SimpleNamespace(gamma=3, deferred_commit=None, _dp_moe_sync=True)
    batch = SimpleNamespace(reqs=[request_with([4, 5, 6, 7, 8], [0.5, 0.25, 0.125, 0.1, 0.1])])
    assert first_block.around_propose(lambda *_, **__: proposal, proposer, batch=batch) is proposal
    assert proposal.draft_block.draft_tokens.tolist() == [[4, 5, 6]]
    assert proposal.confidence.tolist() == [[0.5, 0.25, 0.125]]


def test_a_block_whose_request_has_moved_on_is_not_used(on_decode):
    req = request_with([4, 5, 6])
    req.output_ids.append(7)
    proposal = drafted(1)
    proposer = SimpleNamespace(gamma=3, deferred_commit=None, _dp_moe_sync=False)
    first_block.around_propose(lambda *_, **__: proposal, proposer, batch=SimpleNamespace(reqs=[req]))
    assert proposal.draft_block.draft_tokens.tolist() == [[50] * 3]


def test_without_a_session_both_seams_leave_sglang_as_it_is():
    assert session.current_session() is None
    marker = object()
    batch = SimpleNamespace(reqs=[request_with([4, 5, 6])])
    assert first_block.around_propose(lambda *_, **__: marker, None, batch=batch) is marker
    assert first_block.after_forward_prefill(None, None, None) is None
