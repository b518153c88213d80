"""Records over SGLang's real NIXL and Mooncake transfer managers: two processes, no model.

One pair of processes serves all scenarios; after each, the free slots are back to their start and
a plain handoff works.
"""

import itertools
import json
import os
import selectors
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_spec_ext.testing_pd import missing_part

SLOTS, TOPK = 6, 20
ANSWER_WITHIN_S, START_WITHIN_S = 120, 1200  # bounds of a failing run; a start takes 10 s on an idle machine
ENVIRONMENT = {
    "SGLANG_PLATFORM": "spec_ext_cpu",
    "SGLANG_HOST_IP": "127.0.0.1",
    "HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_NET_DEVICES": "lo",
    "MC_TCP_BIND_ADDRESS": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "15",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "15",
}
rooms = itertools.count(1001)


class Peer:
    """A transfer_peer.py process."""

    def __init__(self, role):
        script = Path(__file__).with_name("transfer_peer.py")
        paths = [str(script.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.process = subprocess.Popen(
            [sys.executable, str(script), role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.process.stdout, selectors.EVENT_READ)

    def read(self, within_s=ANSWER_WITHIN_S):
        assert self.selector.select(within_s), "the peer does not answer"
        line = self.process.stdout.readline()
        assert line, f"the peer ended with {self.process.wait(10)}"
        return json.loads(line)

    def begin(self, name, **arguments):
        self.process.stdin.write(json.dumps({"name": name, **arguments}) + "\n")
        self.process.stdin.flush()

    def finish(self):
        answer = self.read()
        assert "ok" in answer, answer["error"]
        return answer["ok"]

    def ask(self, name, **arguments):
        self.begin(name, **arguments)
        return self.finish()

    def counter(self, name):
        return self.ask("state")["counters"].get(name, 0)

    def close(self):
        self.process.kill()
        self.process.wait(10)


class Pair:
    """A prefill and a decode peer; `start` makes new servers in the processes, which are slow to come up."""

    def __init__(self):
        self.prefill, self.decode = Peer("prefill"), Peer("decode")
        self.backend, self.running = None, None

    def start(self, *, prefill=None, decode=None):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.running = (self.backend, prefill, decode)
        self.prefill.ask("start", backend=self.backend, port=port, options=prefill or {})
        self.decode.ask("start", backend=self.backend, port=port, options=decode or {})

    def handoff(self, *, damage=None, ids=None, room=None):
        """Move one request; return (prefill's outcome, how it starts on decode)."""
        room = next(rooms) if room is None else room
        ids = ids or [room, 2, 3]
        self.prefill.ask("open", room=room, ids=ids)
        self.decode.ask("open", room=room, ids=ids)
        accepted = self.decode.ask("accept", room=room)
        if accepted is not True:
            return self.prefill.ask("end_refused", room=room), {"failed": accepted}
        self.prefill.begin("send", room=room, damage=damage)
        self.decode.begin("receive", room=room)
        return self.prefill.finish(), self.decode.finish()

    def meet_again(self, **republish):
        self.prefill.ask("republish", **republish)
        self.decode.ask("meet_again")

    def assert_whole(self):
        """All slots are free on both sides, nothing is waited for, and a plain handoff starts warm."""
        outcome, start = self.handoff()
        assert outcome == "sent"
        assert start["warm"]
        assert start["draft_right"]
        self.assert_idle()

    def assert_idle(self):
        """Both sides are alive, hold no slot and wait for no record."""
        for peer in (self.prefill, self.decode):
            state = peer.ask("state")
            assert state["free"] == SLOTS
            assert not state["waiting"]

    def close(self):
        self.prefill.close()
        self.decode.close()


@pytest.fixture(scope="module")
def peers():
    pytest.importorskip("sglang")
    made = Pair()
    try:
        for peer in (made.prefill, made.decode):
            assert peer.read(START_WITHIN_S) == "up"
        yield made
    finally:
        made.close()


@pytest.fixture(scope="module", params=["nixl", "mooncake"])
def processes(peers, request):
    """Both processes, for a scenario that starts servers of its own."""
    reason = missing_part(request.param)
    if reason:
        pytest.skip(reason)
    peers.backend = request.param
    return peers


@pytest.fixture
def pair(processes):
    """Servers that agree; every scenario leaves them whole for the next."""
    if processes.running != (processes.backend, None, None):
        processes.start()
    return processes


def test_twenty_records_arrive_whole_in_every_slot(pair):
    before = pair.decode.counter("records_received")
    for _ in range(20):
        outcome, start = pair.handoff()
        assert outcome == "sent"
        assert start["draft_right"]
        assert start["warm"]
        assert start["num_topk"] == TOPK, "more than SGLang's 16 entries"
        assert start["tokens"] == [4]
    assert pair.decode.counter("records_received") == before + 20
    pair.assert_whole()


@pytest.mark.parametrize(
    ("damage", "counter"),
    [
        ("flip", "records_refused.crc32"),
        ("truncate", "records_refused.crc32"),
        ("stale", "records_stale"),
        ("blank", "records_missing.absent"),
        ("bad_token", "records_refused.topk_index"),
        ("bad_hidden", "records_refused.hidden"),
    ],
)
def test_a_damaged_row_costs_its_request_the_warm_start_and_nothing_else(pair, damage, counter):
    pair.handoff(damage="keep")
    before = pair.decode.counter(counter)
    outcome, start = pair.handoff(damage=damage)
    assert outcome == "sent"
    assert start["warm"] is False
    assert start["draft_zero"], "never another request's draft state"
    assert start["tokens"] == [4]
    assert pair.decode.counter(counter) == before + 1
    pair.assert_whole()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"algorithm": "DSPARK"}, "algorithm"),
        ({"num_draft_tokens": 8}, "num_draft_tokens"),
        ({"topk_entries": 4}, "topk_entries"),
        ({"hidden_width": 48}, "hidden_width"),
        ({"hidden_dtype": "float16"}, "hidden_dtype"),
        ({"draft_digest": "another"}, "draft_digest"),
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": 99}, "schema_version"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_peer_that_differs_is_served_cold_and_named_once(pair, changes, reason):
    before = pair.decode.counter(f"peer_mismatches.{reason}")
    pair.meet_again(**changes)
    for _ in range(2):
        outcome, start = pair.handoff()
        assert outcome == "sent"
        assert start["warm"] is False
        assert start["draft_zero"]
        assert start["tokens"] == [4]
    state = pair.decode.ask("state")
    assert state["counters"][f"peer_mismatches.{reason}"] == before + 1
    (shown,) = state["peers"].values()
    assert shown["standing"] == "cold"
    assert reason in shown["message"]
    pair.meet_again()
    pair.assert_whole()


def test_a_peer_that_drafts_differently_without_saying_so_is_caught_by_the_fingerprint(pair):
    """The handshake passes, then prefill is reconfigured: rows of the same length, of another draft."""
    pair.assert_whole()
    pair.prefill.ask("republish", draft_digest="another")
    before = pair.decode.counter("records_refused.fingerprint")
    _, start = pair.handoff()
    assert start["warm"] is False
    assert start["draft_zero"]
    assert pair.decode.counter("records_refused.fingerprint") == before + 1
    pair.meet_again()
    pair.assert_whole()


def test_more_rooms_than_slots_wait_and_all_arrive(pair):
    opened = [next(rooms) for _ in range(3 * SLOTS)]
    for room in opened:
        pair.prefill.ask("open", room=room, ids=[room, 2, 3])
        pair.decode.ask("open", room=room, ids=[room, 2, 3])
    waiting, refused = list(opened), 0
    while waiting:
        accepted = []
        for room in waiting:
            if pair.decode.ask("accept", room=room) is False:
                refused += 1
                break
            accepted.append(room)
        assert accepted
        for room in accepted:
            pair.prefill.begin("send", room=room)
            pair.decode.begin("receive", room=room)
            assert pair.prefill.finish() == "sent"
            assert pair.decode.finish()["draft_right"]
        waiting = waiting[len(accepted) :]
    assert refused == 2
    pair.assert_whole()


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_before_the_transfer_ends_the_request_on_both_sides(pair, side):
    room = next(rooms)
    for peer in (pair.prefill, pair.decode):
        peer.ask("open", room=room, ids=[room, 2, 3])
    getattr(pair, side).ask("abort", room=room)
    other = pair.decode if side == "prefill" else pair.prefill
    if side == "prefill":  # nothing was published to prefill yet, so decode ends by its own abort
        other.ask("abort", room=room)
    for peer in (other, getattr(pair, side)):  # Mooncake's prefill gives no reason, NIXL's does; neither waits
        assert peer.ask("end_refused", room=room).startswith("KVTransferError")
    pair.assert_whole()


def test_refuse_fails_the_requests_of_a_peer_that_differs_at_once_on_both_sides(processes):
    pair = processes
    pair.start(prefill={"capability": {"num_draft_tokens": 8}}, decode={"policy": "refuse"})
    for order in ("prefill-first", "decode-first"):
        room = next(rooms)
        first, second = (pair.prefill, pair.decode) if order == "prefill-first" else (pair.decode, pair.prefill)
        first.ask("open", room=room, ids=[room, 2, 3])
        second.ask("open", room=room, ids=[room, 2, 3])
        failure = pair.decode.ask("accept", room=room)
        assert "num_draft_tokens is 8 on prefill and 4 on decode" in failure
        assert "refusing its requests" in failure
        assert pair.prefill.ask("end_refused", room=room).startswith("KVTransferError"), "not a timeout"
    assert pair.decode.counter("requests_refused") == 2
    pair.assert_idle()


@pytest.mark.parametrize("stock_side", ["prefill", "decode"])
def test_a_stock_peer_on_either_side_is_served(processes, stock_side):
    stock = {"stock": True, "topk": 16}
    ours = {"capability": {"topk_entries": 16}, "topk": 16}
    pair = processes
    pair.start(**{"prefill": ours, "decode": ours, stock_side: stock})
    for _ in range(8):
        outcome, start = pair.handoff()
        assert outcome == "sent"
        assert start["tokens"] == [4]
        assert start["draft_right"], "SGLang's own EAGLE row is kept"
        assert start["warm"] is (None if stock_side == "decode" else False)
    if stock_side == "prefill":
        assert pair.decode.counter("peer_mismatches.no_extension") == 1


def test_a_hidden_row_of_another_length_lands_in_the_spare_region(processes):
    """Stock SGLang lets it run over the neighbouring rows, silently."""
    changed = {"stock_hidden": 48, "capability": {"hidden_width": 48}}
    pair = processes
    pair.start(prefill=changed)
    for _ in range(2 * SLOTS):
        outcome, start = pair.handoff()
        assert outcome == "sent"
        assert start["tokens"] == [4]
        assert start["draft_zero"]
    (shown,) = pair.decode.ask("state")["peers"].values()
    assert shown["reasons"] == ["hidden_width", "stock_rows[8]"]


def test_records_travel_over_the_sidecar_beside_the_kv(processes):
    # a machine that is busy with other tests takes longer than the 50 ms that a server waits for a record
    options = {"transport": "sidecar", "key": "0123456789abcdef", "late_grace_s": 20.0}
    pair = processes
    pair.start(prefill=options, decode=options)
    for _ in range(12):
        outcome, start = pair.handoff()
        assert outcome == "sent"
        assert start["warm"]
        assert start["draft_right"]
    pair.assert_whole()
