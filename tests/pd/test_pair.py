"""Prefill and decode on two real servers: the right tokens, records for every request, nothing left behind."""

import concurrent.futures
import json
import urllib.request

import pytest

from sglang_spec_ext.testing_pd import RequestFailed

from .conftest import ROW_BYTES, TOKENS, first_steps, prompts

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
REQUESTS = 24
PATIENCE_S = 20.0  # a server that knows nothing of the abort on the other waits for it; its client does not


def test_tokens_are_those_of_the_target_and_every_first_step_verifies_shipped_drafts(pd_pair, reference) -> None:
    asked = prompts(REQUESTS, seed=11)
    before = {role: pd_pair.counters(role) for role in ("prefill", "decode")}
    answers = pd_pair.pair.generate(asked, max_new_tokens=TOKENS)
    for ids, answer in zip(asked, answers, strict=True):
        assert answer["output_ids"] == reference(ids, TOKENS)
    sent, received = (pd_pair.gains(role, before[role]) for role in ("prefill", "decode"))
    # a sidecar's record may be late on a busy machine: its request then starts cold, and is counted as such
    late = received.get("records_missing{lost}", 0) if pd_pair.setup.transport == "sidecar" else 0
    assert late < REQUESTS
    assert sent["records_sent"] == REQUESTS
    assert sent["bytes_sent"] == REQUESTS * ROW_BYTES[pd_pair.setup.algorithm]
    if not late:
        assert received["records_received"] == REQUESTS
        assert received["bytes_received"] == sent["bytes_sent"]
    warm, cold = first_steps(received, "warm"), first_steps(received, "cold")
    assert sum(warm.values()) == REQUESTS - late
    assert sum(cold.values()) == late
    assert max(warm) > 1, "shipped drafts are accepted"
    refused = [name for name in received if name.startswith(("records_refused", "records_missing", "records_stale"))]
    assert [name for name in refused if not (late and name == "records_missing{lost}")] == []
    pd_pair.assert_whole(reference)


def test_the_servers_agree_and_say_so(pd_pair) -> None:
    pd_pair.pair.generate(prompts(1, seed=1))
    (peer,) = pd_pair.pair.handoff("decode")["peers"].values()
    assert peer["standing"] == "warm"
    assert pd_pair.pair.handoff("prefill")["transport"] == pd_pair.setup.transport


def test_requests_that_are_given_up_at_any_stage_leave_nothing_behind(pd_pair, reference) -> None:
    """Each request is aborted on one of the servers, some before it has arrived and some in the middle of decode."""
    pair = pd_pair.pair
    asked = prompts(12, seed=7)

    def give_up(place: int) -> str | None:
        body = {**pair.body(asked[place], max_new_tokens=400), "rid": f"given-up-{place}"}
        with concurrent.futures.ThreadPoolExecutor(1) as beside:
            answer = beside.submit(pair.send, body, timeout_s=PATIENCE_S)
            concurrent.futures.wait([answer], timeout=0.05 * place)
            role = ("prefill", "decode")[place % 2]
            for _ in range(100):  # again while it has not arrived or has not stopped
                _post(pair.servers[role].url, {"rid": body["rid"]})
                if concurrent.futures.wait([answer], timeout=0.2).done:
                    break
            try:
                return answer.result()["meta_info"]["finish_reason"]["type"]
            except RequestFailed as failure:
                return str(failure)

    with concurrent.futures.ThreadPoolExecutor(4) as clients:
        ends = list(clients.map(give_up, range(len(asked))))
    assert any("abort" in end.lower() or "500" in end for end in ends)
    pd_pair.assert_whole(reference)


def _post(url: str, body: dict) -> None:
    request = urllib.request.Request(
        f"{url}/abort_request", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=30):
        pass


def test_more_requests_than_slots_wait_and_are_all_answered(pd_pair, reference) -> None:
    size = pd_pair.pair.handoff("decode")["slots"]["size"]
    asked = prompts(3 * size, seed=13)
    answers = pd_pair.pair.generate(asked, concurrency=3 * size, max_new_tokens=2)
    assert [len(answer["output_ids"]) for answer in answers] == [2] * len(asked)
    assert answers[0]["output_ids"] == reference(asked[0], 2)
    pd_pair.assert_whole(reference)


def test_metrics_count_what_the_servers_say(pd_pair) -> None:
    pd_pair.pair.generate(prompts(2, seed=2))
    for role, name in (("prefill", "records_sent"), ("decode", "records_received")):
        with urllib.request.urlopen(f"{pd_pair.pair.servers[role].url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        (value,) = [float(line.split()[-1]) for line in lines if line.startswith(f"sglang:spec_ext_pd_{name}_total")]
        assert value == pd_pair.counters(role)[name] > 0
