"""The record path of one scheduler process: what it ships, what it accepts, and from whom.

A PdSession joins schema, coding, rows or sidecar, verdicts and counters: `pack` on prefill, `collect` on
decode, `clear` on both, `judge` per peer. It knows slots, rooms and NumPy arrays; SGLang's objects are
taken apart in `seams`, tensors in `builders`.
"""

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from sglang_spec_ext.disagg.aux import SPARE_ROW_BYTES, AuxRows
from sglang_spec_ext.disagg.counters import PdCounters
from sglang_spec_ext.disagg.handshake import (
    Capability,
    MismatchPolicy,
    PeerVerdict,
    Standing,
    StockRows,
    encode_answer,
    judge,
)
from sglang_spec_ext.disagg.record import (
    DraftRecord,
    Expectation,
    RecordCodec,
    RecordError,
    StaleRecordError,
    is_blank,
    prompt_crc,
)
from sglang_spec_ext.disagg.sidecar import SidecarPublisher, SidecarSubscriber
from sglang_spec_ext.disagg.slots import GENERATION_LIMIT

logger = logging.getLogger("sglang.spec_ext.disagg")

REMEMBERED_ROOMS = 4096
REMEMBERED_PEERS = 256
Role = Literal["prefill", "decode"]
Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class PdOptions:
    """What the operator chose.

    `key` signs sidecar messages; `late_grace_s`: how long a finished KV transfer waits for its sidecar record.
    """

    transport: Literal["aux", "sidecar"] = "aux"
    policy: MismatchPolicy = MismatchPolicy.DEGRADE
    key: bytes | None = None
    late_grace_s: float = 0.05


@dataclass(frozen=True, eq=False, kw_only=True)
class ControllerState:
    """What prefill's controller hands on: the K it would verify and its acceptance per position ([p])."""

    active_k: int = 0
    accept_prior: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))


@dataclass(frozen=True, kw_only=True)
class HandedRequest:
    """A request as both servers see it."""

    bootstrap_room: int
    prompt_ids: Sequence[int]
    anchor_token: int

    def expectation(self, *, prior_generation: int = 0) -> Expectation:
        """Return what a record of this request must say."""
        return Expectation(
            bootstrap_room=self.bootstrap_room,
            seq_len=len(self.prompt_ids),
            prompt_crc=prompt_crc(self.prompt_ids),
            anchor_token=self.anchor_token,
            prior_generation=prior_generation,
        )


def handed_request(req: Any, anchor_token: int) -> HandedRequest:
    """Return SGLang's request as a HandedRequest."""
    return HandedRequest(bootstrap_room=req.bootstrap_room, prompt_ids=req.origin_input_ids, anchor_token=anchor_token)


class PdSession:
    """See the module. One thread (the scheduler's) owns a session.

    `controller_state` is asked on prefill for each record and given its arrays; `absorb` is told on decode of each
    accepted one. `counted` is called when a request has been counted.
    """

    def __init__(
        self, capability: Capability, *, role: Role, num_slots: int, options: PdOptions, counters: PdCounters
    ) -> None:
        self.capability, self.role, self.options, self.counters = capability, role, options, counters
        self.codec = RecordCodec(capability.schema())
        self.controller_state: Callable[[Arrays], ControllerState] = lambda _arrays: ControllerState()
        self.absorb: Callable[[DraftRecord], None] = lambda _record: None
        self.counted: Callable[[], None] = lambda: None
        self.stock_rows: StockRows | None = None
        self.publisher: SidecarPublisher | None = None
        self.subscriber: SidecarSubscriber | None = None
        self.rows: AuxRows | None = None
        self.peers: OrderedDict[str, dict[str, object]] = OrderedDict()
        self._scratch = np.zeros(self.codec.row_bytes, np.uint8)
        # random, so that a restarted server's rows differ from its predecessor's
        self._generation = secrets.randbelow(GENERATION_LIMIT - 1) + 1
        self._consumed: OrderedDict[int, int] = OrderedDict()
        self._said: set[str] = set()
        if options.transport == "aux":
            spare = SPARE_ROW_BYTES if role == "decode" else 0
            self.rows = AuxRows(num_slots, self.codec.row_bytes, spare_row_bytes=spare)
        elif role == "decode":
            self.subscriber = SidecarSubscriber(
                row_bytes=self.codec.row_bytes, counters=counters, key=options.key, capacity=num_slots
            )

    def open_publisher(self, host: str) -> None:
        """Start prefill's sidecar on `host` and name its endpoint in the capability."""
        self.publisher = SidecarPublisher(
            host, row_bytes=self.codec.row_bytes, counters=self.counters, key=self.options.key
        )
        self.capability = msgspec.structs.replace(self.capability, sidecar_endpoint=self.publisher.endpoint)

    def answer(self) -> bytes:
        """Return what this prefill rank publishes about itself; the stock rows must be known by now."""
        assert self.stock_rows is not None, "SGLang asked for its buffers before it registered them"
        return encode_answer(self.capability, self.stock_rows)

    def judge(self, answer: bytes | None, peer: str) -> PeerVerdict:
        """Return the verdict on a prefill server, count it and log what is not plain agreement."""
        assert self.stock_rows is not None, "SGLang asked for its buffers before it met a peer"
        verdict = judge(
            answer,
            decode=self.capability,
            stock_rows=self.stock_rows,
            policy=self.options.policy,
            peer=peer,
            spare_row_bytes=self.rows.spare_row_bytes if self.rows is not None else 0,
        )
        self.counters.peers[str(verdict.standing)] += 1
        if verdict.standing is not Standing.WARM:
            self.counters.peer_mismatches.update(verdict.reasons)
            logger.error(verdict.message)
        self.peers[peer] = verdict.as_info()
        self.peers.move_to_end(peer)
        while len(self.peers) > REMEMBERED_PEERS:
            self.peers.popitem(last=False)
        return verdict

    def pack(self, slot: int, request: HandedRequest, arrays: Arrays) -> bool:
        """Write the request's record to its slot, or offer it to the sidecar; False if it does not fit.

        `arrays` are the array fields of DraftRecord that the algorithm supplies, by name.
        """
        started = time.perf_counter()
        row = self.rows.row(slot) if self.rows is not None else self._scratch
        self._generation = self._generation % (GENERATION_LIMIT - 1) + 1
        state = self.controller_state(arrays)
        try:
            record = DraftRecord(
                bootstrap_room=request.bootstrap_room,
                generation=self._generation,
                seq_len=len(request.prompt_ids),
                prompt_crc=prompt_crc(request.prompt_ids),
                anchor_token=request.anchor_token,
                active_k=state.active_k,
                accept_prior=state.accept_prior,
                **arrays,
            )
            self.codec.encode_into(record, row)
        except RecordError as error:
            self.clear(slot)  # the last owner's row must not travel under this request
            self.counters.records_refused[error.field] += 1
            self._say_once(error.field, f"PD record not sent: {error}")
            return False
        if self.publisher is not None:
            self.publisher.publish(request.bootstrap_room, row, now=time.monotonic())
        self.counters.records_sent += 1
        self.counters.bytes_sent += self.codec.row_bytes
        self.counters.pack_seconds += time.perf_counter() - started
        self.counted()
        return True

    def clear(self, slot: int) -> None:
        """Blank the slot's row; its next owner must not find this one's."""
        if self.rows is not None:
            self.rows.clear(slot)

    def collect(self, slot: int, request: HandedRequest, verdict: PeerVerdict | None) -> DraftRecord | None:
        """Return the request's record, or None with the reason counted; never raises on what a peer sent."""
        row = self._row_of(slot, request.bootstrap_room, verdict)
        if row is None:
            return None
        started = time.perf_counter()
        room = request.bootstrap_room
        self.counters.records_received += 1
        self.counters.bytes_received += self.codec.row_bytes
        try:
            expected = request.expectation(prior_generation=self._consumed.get(room, 0))
            record = self.codec.decode(row, expected)
        except StaleRecordError as error:
            self.counters.records_stale += 1
            self._note_refusal(error)
            return None
        except RecordError as error:
            self._note_refusal(error)
            return None
        self._consumed[room] = record.generation
        self._consumed.move_to_end(room)
        if len(self._consumed) > REMEMBERED_ROOMS:
            self._consumed.popitem(last=False)
        self.counters.unpack_seconds += time.perf_counter() - started
        return record

    def refuse(self, error: RecordError) -> None:
        """Count a record that was intact but holds values that this server cannot use."""
        self._note_refusal(error)

    def close(self) -> None:
        """Release sockets; the rows go with the object."""
        for end in (self.publisher, self.subscriber):
            if end is not None:
                end.close()

    def _row_of(self, slot: int, room: int, verdict: PeerVerdict | None) -> NDArray[np.uint8] | None:
        if verdict is None or verdict.standing is not Standing.WARM:
            self.counters.records_missing["cold_peer"] += 1
            return None
        if self.subscriber is not None:
            row = self.subscriber.take(room)
            if row is None:
                self.counters.records_missing["lost"] += 1
            return row
        assert self.rows is not None
        row = self.rows.row(slot)
        if is_blank(row):
            self.counters.records_missing["absent"] += 1
            return None
        return row

    def _note_refusal(self, error: RecordError) -> None:
        self.counters.records_refused[error.field] += 1
        self._say_once(error.field, f"PD {error}; the request starts without it")

    def _say_once(self, key: str, message: str) -> None:
        if key not in self._said:
            self._said.add(key)
            logger.error("%s (further ones of this kind are only counted)", message)


_sessions: dict[str, PdSession] = {}


def install_session(session: PdSession | None) -> None:
    """Make `session` the one of this process (None: end it); a role switch replaces it."""
    previous = _sessions.pop("current", None)
    if previous is not None:
        previous.close()
    if session is not None:
        _sessions["current"] = session


def current_session() -> PdSession | None:
    """Return this process's session, or None where no record travels."""
    return _sessions.get("current")
