"""Where a peer's writes land, with SGLang's arithmetic: peer pointer + own row length * slot."""

import ctypes

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.disagg.aux import AuxRows, peer_pointers
from sglang_spec_ext.disagg.handshake import PeerVerdict, Standing
from sglang_spec_ext.disagg.schema import ALIGN_BYTES

ROW, SPARE, HIDDEN_INDEX = 128, 256, 1
WARM = PeerVerdict(standing=Standing.WARM)
COLD = PeerVerdict(standing=Standing.COLD)


def test_rows_are_aligned_disjoint_and_registered_as_one_region():
    rows = AuxRows(5, ROW, spare_row_bytes=SPARE)
    assert rows.pointer % ALIGN_BYTES == 0
    assert rows.nbytes == 5 * (ROW + SPARE)
    assert rows.spare_pointer == rows.pointer + 5 * ROW
    for slot in range(5):
        assert rows.row(slot).ctypes.data == rows.pointer + slot * ROW
        rows.row(slot)[:] = slot + 1
    rows.clear(2)
    assert [int(rows.row(slot)[0]) for slot in range(5)] == [1, 2, 0, 4, 5]
    for slot in (-1, 5):
        with pytest.raises(IndexError):
            rows.row(slot)


@pytest.mark.parametrize("sizes", [(100, 64), (64, 100)])
def test_unaligned_rows_are_refused(sizes):
    with pytest.raises(ValueError, match="multiples of 64"):
        AuxRows(2, sizes[0], spare_row_bytes=sizes[1])


def write_as_sglang(pointers, lengths, slot):
    """What nixl and mooncake do on the wire, for the shorter of both lists."""
    for pointer, length in zip(pointers, lengths, strict=False):
        ctypes.memset(pointer + length * slot, 0xEE, length)


@settings(max_examples=150, deadline=None)
@given(
    num_slots=st.integers(1, 9),
    slot=st.integers(0, 8),
    their_hidden=st.integers(1, SPARE // 64).map(lambda n: 64 * n),
    has_row_buffer=st.booleans(),
    data=st.data(),
)
def test_a_peer_writes_its_slot_and_nothing_else(num_slots, slot, their_hidden, has_row_buffer, data):
    """Warm, cold, cold with another hidden length; the peer with or without a row buffer of its own."""
    slot %= num_slots
    our_hidden = data.draw(st.sampled_from([64, 128, their_hidden]))
    stock = [np.zeros((num_slots, length), np.uint8) for length in (64, our_hidden, 64)]
    rows = AuxRows(num_slots, ROW, spare_row_bytes=SPARE)
    ours = [*(buffer.ctypes.data for buffer in stock), rows.pointer]
    redirect = their_hidden if their_hidden != our_hidden else 0
    warm = not redirect and data.draw(st.booleans())
    verdict = WARM if warm else PeerVerdict(standing=Standing.COLD, redirect_hidden_bytes=redirect)
    shown = peer_pointers(ours, verdict, hidden_index=HIDDEN_INDEX, rows=rows)
    write_as_sglang(shown, [64, their_hidden, 64, *([ROW] if has_row_buffer else [])], slot)
    for index, buffer in enumerate(stock):
        untouched = index == HIDDEN_INDEX and redirect
        assert (buffer[slot] == (0 if untouched else 0xEE)).all()
        assert not np.delete(buffer, slot, axis=0).any()
    assert (rows.row(slot) == (0xEE if warm and has_row_buffer else 0)).all()
    others = [rows.row(other) for other in range(num_slots) if other != slot]
    assert not any(row.any() for row in others)


def test_without_a_row_buffer_the_list_is_sglangs():
    assert peer_pointers([1, 2, 3], COLD, hidden_index=1, rows=None) == [1, 2, 3]
