"""The record's rows as one more buffer of SGLang's metadata transfer, and where a peer may write.

SGLang pairs its metadata buffers with the peer's by position and writes `peer pointer + own row length *
slot` without comparing lengths (0.5.23: nixl/conn.py `send_aux`, mooncake/conn.py `send_aux`). So ours is
appended last, is hidden from a peer that must not write it, and carries a spare region for a peer whose own
hidden row has another length. Host memory, NumPy only.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from sglang_spec_ext.disagg.handshake import PeerVerdict, Standing
from sglang_spec_ext.disagg.schema import ALIGN_BYTES, HEADER

# hidden rows of a degraded peer up to this length (8192 bfloat16 values) have a place to go
SPARE_ROW_BYTES = 16384


class AuxRows:
    """`num_slots` rows of `row_bytes`, slot-indexed like SGLang's own buffers, then the spare region.

    One allocation, aligned to ALIGN_BYTES, registered with the transfer engine as a whole.
    """

    def __init__(self, num_slots: int, row_bytes: int, *, spare_row_bytes: int = SPARE_ROW_BYTES) -> None:
        if row_bytes % ALIGN_BYTES or spare_row_bytes % ALIGN_BYTES:
            raise ValueError(
                f"row_bytes and spare_row_bytes must be multiples of {ALIGN_BYTES}, "
                f"got {row_bytes} and {spare_row_bytes}"
            )
        self.num_slots, self.row_bytes, self.spare_row_bytes = num_slots, row_bytes, spare_row_bytes
        self.nbytes = num_slots * (row_bytes + spare_row_bytes)
        backing = np.zeros(self.nbytes + ALIGN_BYTES, np.uint8)
        start = -backing.ctypes.data % ALIGN_BYTES
        self._memory = backing[start : start + self.nbytes]
        self._rows = self._memory[: num_slots * row_bytes].reshape(num_slots, row_bytes)
        self.pointer: int = self._memory.ctypes.data
        self.spare_pointer: int = self.pointer + num_slots * row_bytes

    def row(self, slot: int) -> NDArray[np.uint8]:
        """Return a view of the slot's row ([row_bytes] uint8); raises IndexError out of range."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot must be from 0 to {self.num_slots - 1}, got {slot}")
        view: NDArray[np.uint8] = self._rows[slot]
        return view

    def clear(self, slot: int) -> None:
        """Blank the slot's header, so that its next owner sees a row that was never written."""
        self.row(slot)[: HEADER.size] = 0


def peer_pointers(
    pointers: Sequence[int], verdict: PeerVerdict, *, hidden_index: int, rows: AuxRows | None
) -> list[int]:
    """Return the buffer addresses that a prefill server is told: ours only where its records are read.

    `pointers` is SGLang's list with the row buffer last (when `rows` is not None). Where the peer's hidden
    row has another length, it is sent to the spare region instead of over its neighbours.
    """
    if rows is None:
        return list(pointers)
    if verdict.standing is Standing.WARM:
        return list(pointers)
    shown = list(pointers[:-1])
    if verdict.redirect_hidden_bytes:
        shown[hidden_index] = rows.spare_pointer
    return shown
