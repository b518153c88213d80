"""The sidecar over real ZeroMQ: order, loss, repetition, forgery and bounds."""

import time

import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.disagg import sidecar as sc
from sglang_spec_ext.disagg.counters import PdCounters

ROW = 256
KEY = b"0123456789abcdef0123"


def row_of(room):
    return np.random.default_rng(room).integers(0, 256, ROW).astype(np.uint8)


class Pair:
    """Both ends, each with counters of its own, pumped by hand."""

    def __init__(self, *, key=None, decode_key=None, capacity=64, ttl_s=60.0):
        self.prefill_counts, self.decode_counts = PdCounters(), PdCounters()
        self.publisher = sc.SidecarPublisher(
            "127.0.0.1", row_bytes=ROW, counters=self.prefill_counts, key=key, capacity=capacity, ttl_s=ttl_s
        )
        self.subscriber = sc.SidecarSubscriber(
            row_bytes=ROW, counters=self.decode_counts, key=decode_key or key, capacity=capacity
        )

    @property
    def endpoint(self):
        return self.publisher.endpoint

    def want(self, room):
        return self.subscriber.want(self.endpoint, room)

    def publish(self, room, now=0.0):
        return self.publisher.publish(room, row_of(room), now=now)

    def pump_until(self, condition, now=0.0):
        """Pump both ends until the condition holds; the deadline only bounds a failing test."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, (self.prefill_counts, self.decode_counts)
            self.publisher.pump(now)
            self.subscriber.pump()

    def prefill_count(self, kind):
        return self.prefill_counts.sidecar_messages[kind]

    def decode_count(self, kind):
        return self.decode_counts.sidecar_messages[kind]


@pytest.fixture
def make_pair():
    pairs = []

    def make(**options):
        pairs.append(Pair(**options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.publisher.close()
        pair.subscriber.close()


@pytest.fixture
def raw_dealer():
    """A peer that speaks ZeroMQ but not our protocol."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    yield socket
    context.destroy(linger=0)


def assert_delivers(pair, room):
    assert pair.want(room)
    assert pair.publish(room)
    pair.pump_until(lambda: pair.subscriber.has(room))
    assert np.array_equal(pair.subscriber.take(room), row_of(room))


@pytest.mark.parametrize("key", [None, KEY], ids=["open", "keyed"])
@pytest.mark.parametrize("order", ["want-first", "publish-first"])
def test_a_record_reaches_who_asked_for_its_room_in_either_order(make_pair, key, order):
    pair = make_pair(key=key)
    rooms = [1, 2**63 + 1, 77]
    for room in rooms:
        if order == "want-first":
            assert pair.want(room)
            pair.pump_until(lambda: len(pair.publisher._wants) > 0)
            assert pair.publish(room)
        else:
            assert pair.publish(room)
            assert pair.want(room)
        pair.pump_until(lambda room=room: pair.subscriber.has(room))
    for room in reversed(rooms):
        assert np.array_equal(pair.subscriber.take(room), row_of(room))
        assert pair.subscriber.take(room) is None
    assert len(pair.subscriber) == 0
    assert not pair.prefill_counts.sidecar_messages
    assert not pair.decode_counts.sidecar_messages


def test_a_record_that_comes_after_its_request_gave_up_is_late_and_dropped(make_pair):
    pair = make_pair()
    assert pair.want(5)
    pair.pump_until(lambda: len(pair.publisher._wants) == 1)
    assert pair.subscriber.take(5) is None  # committed cold
    pair.publish(5)
    pair.pump_until(lambda: pair.decode_count("late") == 1)
    assert not pair.subscriber.has(5)
    assert_delivers(pair, 6)


def test_a_lost_question_is_asked_again_and_a_doubled_answer_is_dropped(make_pair):
    pair = make_pair()
    assert pair.want(5)
    pair.publish(5)
    assert pair.want(5)  # the caller lost patience: both questions arrive, both are answered
    pair.pump_until(lambda: pair.decode_count("duplicate") == 1)
    assert np.array_equal(pair.subscriber.take(5), row_of(5))


def test_a_second_record_of_a_room_is_refused_and_the_first_unaffected(make_pair):
    pair = make_pair()
    pair.publish(5)
    assert not pair.publisher.publish(5, row_of(6), now=0.0)
    assert pair.prefill_count("duplicate") == 1
    pair.want(5)
    pair.pump_until(lambda: pair.subscriber.has(5))
    assert np.array_equal(pair.subscriber.take(5), row_of(5))


@pytest.mark.parametrize("decode_key", [b"another key of 20 by", None], ids=["other-key", "no-key"])
def test_a_peer_without_the_key_is_counted_as_forged_and_gets_nothing(make_pair, decode_key, raw_dealer):
    pair = make_pair(key=KEY)
    stranger = sc.SidecarSubscriber(row_bytes=ROW, counters=PdCounters(), key=decode_key)
    pair.publish(5)
    stranger.want(pair.endpoint, 5)
    pair.pump_until(lambda: pair.prefill_count("forged") == 1)
    stranger.pump()
    assert not stranger.has(5)
    stranger.close()
    assert_delivers(pair, 6)


def test_a_forged_record_is_refused_by_its_tag_and_a_replayed_one_by_its_nonce(make_pair):
    pair = make_pair(key=KEY)
    pair.want(5)
    good = sc._Codec(ROW, KEY).seal(sc.RECORD_MAGIC, 5, pair.subscriber._wanted[5][1], row_of(5).tobytes())
    tampered = bytearray(good)
    tampered[-1] ^= 1
    replayed = sc._Codec(ROW, KEY).seal(sc.RECORD_MAGIC, 5, 1234, row_of(5).tobytes())
    for frame in (bytes(tampered), replayed):
        pair.subscriber._on_message(pair.endpoint, [frame])
    assert dict(pair.decode_counts.sidecar_messages) == {"forged": 1, "late": 1}
    assert not pair.subscriber.has(5)
    pair.subscriber._on_message("tcp://127.0.0.1:1", [good])  # right tag and nonce from a server not asked
    assert pair.decode_count("late") == 2
    pair.subscriber._on_message(pair.endpoint, [good])
    assert pair.subscriber.has(5)


def test_messages_of_wrong_size_shape_or_version_are_counted_and_leave_the_server_working(make_pair, raw_dealer):
    pair = make_pair()
    raw_dealer.connect(pair.endpoint)
    want = sc._Codec(ROW, None).seal(sc.WANT_MAGIC, 5, 1)
    raw_dealer.send(want + b"x")
    raw_dealer.send(want[:-1])
    raw_dealer.send(b"")
    raw_dealer.send(b"\x80\x04" + want[2:])
    raw_dealer.send(want[:4] + b"\x63\x00" + want[6:])
    raw_dealer.send_multipart([want, want])
    raw_dealer.send_multipart([b""] * 1000)
    pair.pump_until(lambda: sum(pair.prefill_counts.sidecar_messages.values()) == 7)
    assert dict(pair.prefill_counts.sidecar_messages) == {"oversized": 1, "malformed": 6}
    assert len(pair.publisher._wants) == 0
    raw_dealer.send(bytes(10_000_000))  # libzmq itself drops this connection
    assert_delivers(pair, 6)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.binary(max_size=2 * ROW), max_size=3), st.sampled_from([None, KEY]))
def test_no_bytes_make_an_end_raise_or_keep_anything(parts, key):
    pair = Pair(key=key)
    try:
        pair.want(5)
        pair.publisher._on_message([b"id", *parts], 0.0)
        if parts:
            pair.subscriber._on_message(pair.endpoint, parts)
        assert len(pair.publisher._wants) == 0
        assert not pair.subscriber.has(5)
    finally:
        pair.publisher.close()
        pair.subscriber.close()


def test_both_ends_are_bounded_and_the_oldest_gives_way(make_pair):
    pair = make_pair(capacity=8)
    for room in range(1, 21):
        pair.publish(room)
    assert len(pair.publisher) == 8
    assert pair.prefill_count("dropped") == 12
    assert [pair.want(room) for room in range(100, 109)] == [True] * 8 + [False]
    assert pair.decode_count("dropped") == 1
    pair.pump_until(lambda: len(pair.publisher._wants) == 8)
    pair.subscriber.forget(100)
    assert pair.want(20)
    pair.pump_until(lambda: pair.subscriber.has(20))
    other = sc.SidecarSubscriber(row_bytes=ROW, counters=PdCounters(), capacity=64)
    for room in range(200, 220):
        other.want(pair.endpoint, room)
    pair.pump_until(lambda: pair.prefill_count("dropped") == 12 + 20)
    assert len(pair.publisher._wants) == 8
    other.close()


def test_records_and_questions_expire(make_pair):
    pair = make_pair(ttl_s=30.0)
    pair.publish(1, now=100.0)
    pair.want(2)
    pair.pump_until(lambda: len(pair.publisher._wants) == 1, now=100.0)
    pair.publisher.pump(130.0)
    assert (len(pair.publisher), len(pair.publisher._wants)) == (1, 1)
    pair.publisher.pump(130.1)
    assert (len(pair.publisher), len(pair.publisher._wants)) == (0, 0)


def test_a_subscriber_that_went_away_costs_nothing(make_pair):
    pair = make_pair()
    gone = sc.SidecarSubscriber(row_bytes=ROW, counters=PdCounters())
    gone.want(pair.endpoint, 5)
    pair.pump_until(lambda: len(pair.publisher._wants) == 1)
    gone.close()
    assert_delivers(pair, 6)  # gives libzmq time to see the disconnect
    pair.publish(5)
    assert_delivers(pair, 7)


def test_a_prefill_server_that_restarts_on_its_port_is_asked_again(make_pair):
    pair = make_pair()
    port = int(pair.endpoint.rsplit(":", 1)[1])
    assert_delivers(pair, 1)
    pair.want(2)
    pair.pump_until(lambda: len(pair.publisher._wants) == 1)
    pair.publisher.close()
    pair.publisher = sc.SidecarPublisher(
        "127.0.0.1", row_bytes=ROW, counters=pair.prefill_counts, port=port, capacity=64
    )
    pair.publish(2)
    pair.subscriber.disconnect(pair.endpoint)
    pair.want(2)
    pair.pump_until(lambda: pair.subscriber.has(2))
    assert np.array_equal(pair.subscriber.take(2), row_of(2))


@pytest.mark.parametrize("host", ["", "*", "0.0.0.0", "::"])
def test_a_wildcard_host_needs_a_key(host):
    with pytest.raises(ValueError, match="pd-key-file"):
        sc.SidecarPublisher(host, row_bytes=ROW, counters=PdCounters())


def test_it_listens_on_the_given_host_only(make_pair):
    assert make_pair().endpoint.startswith("tcp://127.0.0.1:")


def test_key_files_that_others_can_read_or_that_are_short_are_refused(tmp_path):
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o640)
    with pytest.raises(ValueError, match="0600"):
        sc.read_key_file(path)
    path.chmod(0o600)
    assert sc.read_key_file(path) == KEY
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="at least 16 bytes, got 5"):
        sc.read_key_file(path)


def test_without_pyzmq_the_message_names_the_cure(monkeypatch):
    monkeypatch.setattr(sc.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(name)))
    with pytest.raises(RuntimeError, match="pip install pyzmq"):
        sc.SidecarSubscriber(row_bytes=ROW, counters=PdCounters())
