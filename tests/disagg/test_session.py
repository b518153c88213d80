"""A prefill and a decode session with rows moved by hand: what is packed, collected, refused and counted."""

import logging

import numpy as np
import pytest
from sglang_spec_ext.disagg.counters import PdCounters
from sglang_spec_ext.disagg.handshake import Capability, PeerVerdict, Standing, StockRows, encode_answer
from sglang_spec_ext.disagg.session import ControllerState, HandedRequest, PdOptions, PdSession

WARM = PeerVerdict(standing=Standing.WARM)
ROWS = StockRows(row_bytes=(64, 128, 64), hidden_index=1)
OURS = Capability(
    algorithm="DSPARK",
    draft_digest="d",
    num_draft_tokens=7,
    topk_entries=0,
    hidden_width=0,
    hidden_dtype="bfloat16",
    tap_layers=(1, 2),
    vocab_size=100,
    transport="aux",
)
BLOCK = {
    "block_ids": np.arange(7, dtype=np.int32),
    "block_confidence": np.linspace(0.9, 0.3, 7, dtype=np.float32),
}


def request(room, *, prompt=(5, 6, 7), anchor=9):
    return HandedRequest(bootstrap_room=room, prompt_ids=prompt, anchor_token=anchor)


class Link:
    """Two sessions and the transfer between their rows."""

    def __init__(self, **options):
        make = lambda role: PdSession(  # noqa: E731
            OURS, role=role, num_slots=4, options=PdOptions(**options), counters=PdCounters()
        )
        self.prefill, self.decode = make("prefill"), make("decode")
        self.prefill.stock_rows = self.decode.stock_rows = ROWS

    def move(self, source, target):
        self.decode.rows.row(target)[:] = self.prefill.rows.row(source)


@pytest.fixture
def link():
    return Link()


def test_what_prefill_packs_decode_collects(link):
    link.prefill.controller_state = lambda _: ControllerState(
        active_k=3, accept_prior=np.array([0.8, 0.5], np.float32)
    )
    assert link.prefill.pack(3, request(11), BLOCK)
    link.move(3, 1)
    record = link.decode.collect(1, request(11), WARM)
    assert np.array_equal(record.block_ids, BLOCK["block_ids"])
    assert np.array_equal(record.block_confidence, BLOCK["block_confidence"])
    assert (record.active_k, record.anchor_token, record.seq_len) == (3, 9, 3)
    assert record.accept_prior.tolist() == pytest.approx([0.8, 0.5])
    sent, received = link.prefill.counters, link.decode.counters
    assert (sent.records_sent, received.records_received) == (1, 1)
    assert sent.bytes_sent == received.bytes_received == link.decode.codec.row_bytes
    assert sent.pack_seconds > 0
    assert received.unpack_seconds > 0


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (request(12), "bootstrap_room"),
        (request(11, prompt=(5, 6, 8)), "prompt_crc"),
        (request(11, prompt=(5, 6, 7, 7)), "seq_len"),
        (request(11, anchor=8), "anchor_token"),
    ],
)
def test_a_row_of_another_request_is_stale(link, other, field):
    link.prefill.pack(0, request(11), BLOCK)
    link.move(0, 0)
    assert link.decode.collect(0, other, WARM) is None
    assert link.decode.counters.records_stale == 1
    assert link.decode.counters.records_refused == {field: 1}


def test_a_row_is_used_once_even_if_its_room_comes_again(link):
    link.prefill.pack(0, request(11), BLOCK)
    link.move(0, 0)
    assert link.decode.collect(0, request(11), WARM) is not None
    assert link.decode.collect(0, request(11), WARM) is None
    assert link.decode.counters.records_refused == {"generation": 1}
    link.prefill.pack(0, request(11), BLOCK)  # the same room, handed over anew
    link.move(0, 2)
    assert link.decode.collect(2, request(11), WARM) is not None


def test_a_restarted_prefill_server_begins_elsewhere():
    generations = set()
    for _ in range(8):
        link = Link()
        link.prefill.pack(0, request(11), BLOCK)
        link.move(0, 0)
        generations.add(link.decode.collect(0, request(11), WARM).generation)
    assert len(generations) == 8


def test_absent_cleared_and_cold_rows_are_missing_each_by_its_reason(link):
    assert link.decode.collect(0, request(11), WARM) is None
    link.prefill.pack(0, request(11), BLOCK)
    link.move(0, 0)
    for verdict in (None, PeerVerdict(standing=Standing.COLD), PeerVerdict(standing=Standing.REFUSED)):
        assert link.decode.collect(0, request(11), verdict) is None
    link.decode.clear(0)
    assert link.decode.collect(0, request(11), WARM) is None
    assert link.decode.counters.records_missing == {"absent": 2, "cold_peer": 3}
    assert link.decode.counters.records_received == 0


def test_a_record_that_does_not_fit_is_not_sent_and_leaves_no_old_row(link, caplog):
    link.prefill.pack(0, request(11), BLOCK)
    with caplog.at_level(logging.ERROR):
        for room in (12, 13):
            assert not link.prefill.pack(0, request(room), {"block_ids": np.arange(8, dtype=np.int32)})
    assert len(caplog.records) == 1, "logged once, counted each time"
    assert link.prefill.counters.records_refused == {"block_ids.shape": 2}
    link.move(0, 0)
    assert link.decode.collect(0, request(12), WARM) is None
    assert link.decode.counters.records_missing == {"absent": 1}


def test_judging_counts_logs_and_shows_a_peer(link, caplog):
    assert link.decode.judge(link.prefill.answer(), "10.0.0.1:1").standing is Standing.WARM
    with caplog.at_level(logging.ERROR):
        link.decode.judge(None, "10.0.0.2:1")
        other = encode_answer(OURS, StockRows(row_bytes=(64, 128), hidden_index=1))
        assert link.decode.judge(other, "10.0.0.3:1").standing is Standing.REFUSED
    assert len(caplog.records) == 2
    assert link.decode.counters.peers == {"warm": 1, "cold": 1, "refused": 1}
    assert link.decode.counters.peer_mismatches == {"no_extension": 1, "stock_rows": 1}
    assert [info["standing"] for info in link.decode.peers.values()] == ["warm", "cold", "refused"]


def test_counters_come_as_flat_rows(link):
    counters = link.decode.counters
    counters.records_missing["lost"] += 2
    counters.note_first_step(5, warm=True)
    counters.note_first_step(99, warm=True)
    counters.note_first_step(1, warm=False)
    rows = {(name, label): value for name, label, value in counters.rows()}
    assert rows["records_missing", "lost"] == 2
    assert rows["first_accept_len_with_bonus_warm", "5"] == 1
    assert rows["first_accept_len_with_bonus_warm", "64"] == 1
    assert rows["first_accept_len_with_bonus_cold", "1"] == 1
    assert rows["records_sent", ""] == 0
