"""10,000 handoffs between two processes: rows through shared memory, the same rows through the sidecar.

The shared memory stands where RDMA would: prefill writes a row of the decode server's buffer. Every 101st row
is damaged on the way and every 103rd is an old row written again; those, and only those, must be refused.
"""

import multiprocessing
import os
import struct
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
import zmq
from sglang_spec_ext.disagg import record as rec
from sglang_spec_ext.disagg.counters import PdCounters
from sglang_spec_ext.disagg.schema import RecordShape, Schema
from sglang_spec_ext.disagg.sidecar import SidecarPublisher, SidecarSubscriber
from sglang_spec_ext.disagg.slots import SlotAllocator

HANDOFFS, SLOTS, IN_FLIGHT = 10_000, 16, 64
SCHEMA = Schema(
    RecordShape(hidden_width=256, hidden_dtype="bfloat16", max_hidden_rows=1, max_topk=8, max_block=7, max_prior=7)
)
ORDER = struct.Struct("<QI")  # room, decode slot; room 0 ends the run
DONE = struct.Struct("<QII")  # room, decode slot, generation that prefill wrote


def record_of(room, generation):
    """The record that both processes derive from the room alone."""
    rng = np.random.default_rng(room)
    return rec.DraftRecord(
        bootstrap_room=room,
        generation=generation,
        seq_len=room % 5000,
        prompt_crc=room % 97,
        anchor_token=room % 32000,
        active_k=room % 8,
        hidden=rng.integers(0, 1 << 16, (1, 256)).astype(np.uint16),
        topk_p=rng.random(8, np.float32),
        topk_index=rng.integers(0, 32000, 8),
        block_ids=rng.integers(0, 32000, 7).astype(np.int32),
        block_confidence=rng.random(7, np.float32),
        accept_prior=rng.random(7, np.float32),
    )


def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def is_damaged(room):
    return room % 101 == 0


def is_old(room):
    return room % 103 == 0 and not is_damaged(room)


def prefill_main(memory_name, orders_endpoint, done_endpoint, report):
    """The prefill server: take an order, write our own row, move it, offer it, give the slot back."""
    memory = shared_memory.SharedMemory(memory_name)
    decode_rows = np.frombuffer(memory.buf, np.uint8).reshape(SLOTS, SCHEMA.row_bytes)
    context = zmq.Context()
    orders, done = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    orders.connect(orders_endpoint)
    done.connect(done_endpoint)
    codec, slots = (
        rec.RecordCodec(SCHEMA),
        SlotAllocator(2, first_generation=2**32 - 5000),
    )  # wraps in the run
    own_rows = np.zeros((slots.capacity, SCHEMA.row_bytes), np.uint8)
    counters = PdCounters()
    publisher = SidecarPublisher("127.0.0.1", row_bytes=SCHEMA.row_bytes, counters=counters, capacity=256)
    report.put(publisher.endpoint)
    old_row, early_bytes, sent = np.zeros(SCHEMA.row_bytes, np.uint8), 0, 0
    while True:
        publisher.pump(0.0)
        if not orders.poll(1 if sent < HANDOFFS else 1000):
            continue
        room, decode_slot = ORDER.unpack(orders.recv())
        if room == 0:
            break
        lease = slots.acquire(room)
        row = own_rows[lease.slot]
        codec.encode_into(record_of(room, lease.generation), row)
        publisher.publish(room, row, now=0.0)
        decode_rows[decode_slot] = old_row if is_old(room) else row
        if is_damaged(room):
            decode_rows[decode_slot, room % SCHEMA.row_bytes] ^= 1 << room % 8
        old_row[:] = row
        done.send(DONE.pack(room, decode_slot, lease.generation))
        slots.release(lease)
        sent += 1
        if sent == HANDOFFS // 5:
            early_bytes = resident_bytes()
    report.put((sent, slots.num_free, resident_bytes() - early_bytes, dict(counters.sidecar_messages)))
    del decode_rows
    memory.close()
    publisher.close()
    context.destroy(linger=0)


class DecodeEnd:
    """The decode server: orders rooms while slots last, checks both copies of each record, frees the slot."""

    def __init__(self, rows, orders, done, sidecar_endpoint):
        self.rows, self.orders, self.done, self.sidecar_endpoint = rows, orders, done, sidecar_endpoint
        self.codec, self.slots, self.counters = rec.RecordCodec(SCHEMA), SlotAllocator(SLOTS), PdCounters()
        self.subscriber = SidecarSubscriber(row_bytes=SCHEMA.row_bytes, counters=self.counters, capacity=IN_FLIGHT)
        self.leases, self.waiting = {}, {}
        self.exhausted = 0

    def order(self, room):
        lease = self.slots.acquire(room)
        if lease is None:
            self.exhausted += 1
            return False
        self.leases[room] = lease
        assert self.subscriber.want(self.sidecar_endpoint, room)
        self.orders.send(ORDER.pack(room, lease.slot))
        return True

    def step(self):
        """Take what finished; returns the number of requests that are over."""
        self.subscriber.pump()
        while self.done.poll(0 if self.waiting else 1):
            room, slot, generation = DONE.unpack(self.done.recv())
            assert self.slots.holder(slot) == self.leases[room]
            self.waiting[room] = (slot, generation)
        ready = [room for room in self.waiting if self.subscriber.has(room)]
        for room in ready:
            self.finish(room, *self.waiting.pop(room))
        return len(ready)

    def finish(self, room, slot, generation):
        expected_record = record_of(room, generation)
        expected = rec.Expectation(
            bootstrap_room=room,
            seq_len=room % 5000,
            prompt_crc=room % 97,
            anchor_token=room % 32000,
            generation=generation,
        )
        assert self.codec.decode(self.subscriber.take(room), expected) == expected_record
        try:
            assert self.codec.decode(self.rows[slot], expected) == expected_record
            self.counters.records_received += 1
        except rec.StaleRecordError:
            assert is_old(room)
            self.counters.records_stale += 1
        except rec.RecordError as error:
            assert is_damaged(room)
            self.counters.records_refused[error.field] += 1
        self.rows[slot] = 0
        self.slots.release(self.leases.pop(room))


@pytest.fixture
def shared_rows():
    memory = shared_memory.SharedMemory(create=True, size=SLOTS * SCHEMA.row_bytes)
    yield memory
    memory.close()
    memory.unlink()


def test_ten_thousand_handoffs_leak_nothing_and_refuse_exactly_the_bad_rows(shared_rows, monkeypatch):
    # the spawned process imports this module by its name from the repository's root
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2])
    context = zmq.Context()
    orders, done = context.socket(zmq.PUSH), context.socket(zmq.PULL)
    endpoints = []
    for socket in (orders, done):
        socket.bind("tcp://127.0.0.1:*")
        endpoints.append(socket.getsockopt_string(zmq.LAST_ENDPOINT))
    spawn = multiprocessing.get_context("spawn")
    report = spawn.Queue()
    prefill = spawn.Process(target=prefill_main, args=(shared_rows.name, *endpoints, report), daemon=True)
    prefill.start()
    first = report.get(timeout=60)
    rows = np.frombuffer(shared_rows.buf, np.uint8).reshape(SLOTS, SCHEMA.row_bytes)
    end = DecodeEnd(rows, orders, done, first)
    try:
        room, finished, early_bytes = 1, 0, 0
        while finished < HANDOFFS:
            while room <= HANDOFFS and end.order(room):
                room += 1
            finished += end.step()
            if not early_bytes and finished >= HANDOFFS // 5:
                early_bytes = resident_bytes()
        growth = resident_bytes() - early_bytes
        orders.send(ORDER.pack(0, 0))
        sent, prefill_free, prefill_growth, prefill_messages = report.get(timeout=60)
        prefill.join(60)
    finally:
        prefill.kill()
        end.subscriber.close()
        context.destroy(linger=0)
        end.rows = rows = None
    damaged = sum(map(is_damaged, range(1, HANDOFFS + 1)))
    old = sum(map(is_old, range(1, HANDOFFS + 1)))
    assert sent == HANDOFFS
    assert end.counters.records_received == HANDOFFS - damaged - old
    assert (sum(end.counters.records_refused.values()), end.counters.records_stale) == (damaged, old)
    assert end.exhausted > 0, "the run never met back-pressure"
    assert (end.slots.num_free, prefill_free) == (SLOTS, 2)
    assert not end.leases
    assert len(end.subscriber) == 0
    assert not end.counters.sidecar_messages
    assert set(prefill_messages) <= {"dropped"}, "old records give way to new ones and nothing else is lost"
    assert max(growth, prefill_growth) < 4 << 20
