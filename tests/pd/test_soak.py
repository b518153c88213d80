"""What `make soak` runs: every algorithm over every back end at length, faults that restart servers, and 15 minutes.

    SOAK_SECONDS   length of the mixed load   [default: 900]
"""

import concurrent.futures
import contextlib
import os
import random
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_spec_ext.testing import HOST, free_port, running_server, start_server, wait_until_ready
from sglang_spec_ext.testing_pd import ROLES, Pair, RequestFailed, ask, running_pair

from .conftest import COMMON, CPU, STOCK, TOKENS, PdSetup, Served, arguments, first_steps, prompts, skip_without

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(3600)]
SCRIPTS = Path(__file__).parents[2] / "launch_scripts"
REQUESTS, CONCURRENCY = 200, 8
MATRIX = [PdSetup(name, backend) for name in ("EAGLE3", "DFLASH", "DSPARK") for backend in ("nixl", "mooncake_tcp")]


@pytest.fixture(scope="module")
def alone(checkpoint: Callable[[str], Path]) -> Callable[[str], list[int]]:
    """Return the accept lengths with bonus of the first decode steps of one server, by algorithm."""
    known: dict[str, list[int]] = {}

    def measure(algorithm: str) -> list[int]:
        if algorithm not in known:
            with running_server(arguments(algorithm, checkpoint), environment=CPU) as server:
                known[algorithm] = [_first_step(server.url, ids) for ids in prompts(REQUESTS, seed=11)]
        return known[algorithm]

    return measure


def _first_step(url: str, ids: list[int]) -> int:
    """Return the accept length of the one decode step that a second token takes."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}}
    info = ask(f"{url}/generate", body)["meta_info"]
    assert info["spec_verify_ct"] == 1
    return 1 + info["spec_num_correct_drafts"]


@pytest.fixture(scope="module")
def expected(reference) -> list[list[int]]:
    return [reference(ids, TOKENS) for ids in prompts(REQUESTS, seed=11)]


@pytest.mark.parametrize("setup", MATRIX, ids=lambda setup: setup.name)
def test_two_hundred_requests_equal_one_server_from_the_first_step_on(
    setup, checkpoint, reference, expected, alone
) -> None:
    skip_without(setup)
    single = statistics.mean(alone(setup.algorithm))
    serve = arguments(setup.algorithm, checkpoint)
    asked = prompts(REQUESTS, seed=11)
    roles = dict.fromkeys(ROLES, serve)
    with running_pair(roles, backend=setup.backend, environment=CPU) as pair:
        served = Served(setup, pair)
        before = served.counters("decode")
        answers = pair.generate(asked, concurrency=CONCURRENCY, max_new_tokens=TOKENS)
        wrong = sum(answer["output_ids"] != tokens for tokens, answer in zip(expected, answers, strict=True))
        received = served.gains("decode", before)
        served.assert_whole(reference)
    warm = first_steps(received, "warm")
    mean = sum(length * count for length, count in warm.items()) / REQUESTS
    figures = f"first step {mean:.3f}, one server {single:.3f}, wrong {wrong}, {received}"
    print(f"\n{setup.name}: {figures}")  # noqa: T201 - the figures are what a soak run is for
    assert wrong == 0
    assert received["records_received"] == sum(warm.values()) == REQUESTS
    assert not first_steps(received, "cold")
    assert mean == pytest.approx(single, rel=0.05)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "DSPARK"])
def test_the_first_step_of_stock_sglang(checkpoint, reference, algorithm) -> None:
    """What the figures above stand beside: the same requests on a pair without the extension."""
    serve = arguments(algorithm, checkpoint, common=STOCK)
    asked = prompts(REQUESTS, seed=11)
    with running_pair(dict.fromkeys(ROLES, serve), backend="nixl", environment=CPU) as pair:
        answers = pair.generate(asked, concurrency=CONCURRENCY, max_new_tokens=2)
    steps = [answer["meta_info"]["spec_verify_ct"] for answer in answers]
    lengths = [1 + answer["meta_info"]["spec_num_correct_drafts"] for answer in answers]
    print(f"\nstock {algorithm}: steps to the second token {set(steps)}, first step {statistics.mean(lengths):.3f}")  # noqa: T201 - see above
    assert [answer["output_ids"] for answer in answers] == [reference(ids, 2) for ids in asked]


# where servers die, what waits for them ends before the test loses patience
IMPATIENT = {
    **CPU,
    "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT": "60",
    "SGLANG_DISAGGREGATION_WAITING_TIMEOUT": "60",
}


@pytest.fixture(scope="module", params=["nixl", "mooncake_tcp"])
def fault_pair(request, checkpoint):
    """A pair whose servers the tests kill and restart."""
    setup = PdSetup("DSPARK", request.param)
    skip_without(setup)
    serve = arguments(setup.algorithm, checkpoint)
    roles = dict.fromkeys(ROLES, serve)
    with running_pair(roles, backend=setup.backend, environment=IMPATIENT) as pair:
        yield Served(setup, pair)


@pytest.mark.parametrize("role", ROLES)
def test_a_server_that_is_killed_in_the_middle_and_restarted(fault_pair, reference, role) -> None:
    """No hang, no wrong token before, during and after; the other server lives on."""
    pair, asked = fault_pair.pair, prompts(24, seed=21)
    other = pair.servers[ROLES[1 - ROLES.index(role)]]
    with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as clients:
        running = [clients.submit(_try, pair, ids) for ids in asked]
        while not any(answer.done() for answer in running):
            time.sleep(0.01)
        pair.servers[role].kill()
        ends = [answer.result(timeout=300) for answer in running]
    for ids, end in zip(asked, ends, strict=True):
        assert end is None or end == reference(ids, 64)
    assert None in ends, "the kill came too late to hit a request"
    assert other.process.poll() is None
    pair.stop(role)
    pair.start(role)
    _until_whole(fault_pair, reference)


def _try(pair: Pair, ids: list[int]) -> list[int] | None:
    """Return the tokens, None where the request failed."""
    with contextlib.suppress(RequestFailed):
        return pair.send(pair.body(ids, max_new_tokens=64), timeout_s=120)["output_ids"]
    return None


def _until_whole(served: Served, reference, within_s: float = 150.0) -> None:
    """Wait until slots of requests that died have come back; SGLang holds them for its time-outs."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            served.assert_whole(reference)
        except (AssertionError, RequestFailed):
            if time.monotonic() > deadline:
                raise
            time.sleep(2.0)
        else:
            return


def test_a_router_that_is_killed_in_the_middle(fault_pair, reference) -> None:
    """Its clients lose their answers, and nothing else happens."""
    pair, port = fault_pair.pair, free_port()
    environment = {
        "SPEC_EXT_PD_PREFILL": pair.servers["prefill"].url.removeprefix("http://"),
        "SPEC_EXT_PD_DECODE": pair.servers["decode"].url.removeprefix("http://"),
        "SPEC_EXT_PD_ROUTER": f"{HOST}:{port}",
        "SPEC_EXT_PD_BOOTSTRAP": str(pair.bootstrap_port),
    }
    router = start_server([], environment=environment, launcher=[str(SCRIPTS / "pd_router.sh")], port=port)
    try:
        wait_until_ready(router, route="/readiness")
        asked = prompts(16, seed=41)
        with concurrent.futures.ThreadPoolExecutor(CONCURRENCY) as clients:
            running = [clients.submit(_through, router.url, ids) for ids in asked]
            while sum(answer.done() for answer in running) < 2:
                time.sleep(0.01)
            router.kill()
            ends = [answer.result(timeout=300) for answer in running]
    finally:
        router.kill()
        router.log.unlink(missing_ok=True)
    for ids, end in zip(asked, ends, strict=True):
        assert end is None or end == reference(ids, 64)
    assert ends.count(None) not in {0, len(ends)}
    assert all(server.process.poll() is None for server in pair.servers.values())
    _until_whole(fault_pair, reference)


def _through(url: str, ids: list[int]) -> list[int] | None:
    """Return the tokens that a router gives, None where the request failed."""
    body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
    with contextlib.suppress(RequestFailed):
        return ask(f"{url}/generate", body)["output_ids"]
    return None


def test_time_to_the_second_token_with_and_without_records(checkpoint) -> None:
    """One prefill server, two decode servers of which one takes no records; requests alternate between them."""
    model, draft = str(checkpoint("smollm2")), str(Path(__file__).parents[2] / "models" / "smollm2-135m-dspark")
    serve = ["--model-path", model, *COMMON, "--speculative-algorithm", "DSPARK"]
    serve += ["--speculative-draft-model-path", draft]
    with running_pair(dict.fromkeys(ROLES, serve), backend="nixl", environment=CPU) as pair:
        cold = Pair("nixl", {"decode": [*serve, "--spec-ext-pd-transport", "off"]}, CPU, pair.bootstrap_port)
        try:
            cold.start("decode")
            cold.servers["prefill"] = pair.servers["prefill"]
            seconds: dict[str, list[float]] = {"with": [], "without": []}
            sides = [("with", pair, 4), ("without", cold, 5)]
            for ids in prompts(60, seed=51):
                for name, servers, first in sides:  # another first token, so that neither finds a cached prefix
                    start = time.perf_counter()
                    servers.send(servers.body([first, *ids], max_new_tokens=2))
                    seconds[name].append(time.perf_counter() - start)
                sides.reverse()
            gains = [b - a for a, b in zip(seconds["with"][10:], seconds["without"][10:], strict=True)]
            medians = {name: statistics.median(values[10:]) for name, values in seconds.items()}
            print(f"\nseconds to the second token, median: {medians}; gained per request {statistics.median(gains)}")  # noqa: T201 - see above
            assert sum(first_steps(pair.handoff("decode")["counters"], "warm").values()) == 60
        finally:
            cold.stop("decode")


@pytest.mark.parametrize("policy", ["degrade", "refuse"])
def test_servers_that_differ(checkpoint, reference, policy) -> None:
    """Another number of draft tokens on decode: cold under degrade, refused at once under refuse."""
    serve = {
        "prefill": arguments("EAGLE3", checkpoint),
        "decode": arguments("EAGLE3", checkpoint, "--spec-ext-pd-mismatch", policy),
    }
    serve["decode"][serve["decode"].index("--speculative-num-steps") + 1] = "2"
    serve["decode"][serve["decode"].index("--speculative-num-draft-tokens") + 1] = "3"
    with running_pair(serve, backend="nixl", environment=CPU) as pair:
        served = Served(PdSetup("EAGLE3", "nixl"), pair)
        asked = prompts(8, seed=31)
        start = time.monotonic()
        ends = [_try(pair, ids) for ids in asked]
        seconds = time.monotonic() - start
        counters = served.counters("decode")
        (peer,) = pair.handoff("decode")["peers"].values()
        print(f"\n{policy}: {seconds:.1f} s, {peer}")  # noqa: T201 - the figures are what a soak run is for
        assert "num_draft_tokens is 3 on prefill and 2 on decode" in peer["message"]
        if policy == "degrade":
            assert ends == [reference(ids, 64) for ids in asked]
            assert sum(first_steps(counters, "cold").values()) == len(asked)
        else:
            assert ends == [None] * len(asked)
            assert counters["requests_refused"] == len(asked)
        for role in ROLES:
            slots = pair.handoff(role)["slots"]
            assert slots["free"] == slots["size"]


def test_mixed_load_for_a_quarter_of_an_hour(checkpoint, reference) -> None:
    """Long and short prompts and answers, greedy and sampled, some given up: memory flat, slots whole at the end."""
    setup, seconds = PdSetup("DSPARK", "nixl"), float(os.environ.get("SOAK_SECONDS", "900"))
    serve = arguments(setup.algorithm, checkpoint)
    roles = dict.fromkeys(ROLES, serve)
    with running_pair(roles, backend=setup.backend, environment=CPU) as pair:
        served, done, wrong = Served(setup, pair), threading.Event(), []
        answered: list[int] = []

        def client(seed: int) -> None:
            rng = random.Random(seed)
            while not done.is_set():
                (ids,) = prompts(1, seed=rng.randrange(1 << 30))
                tokens = rng.choice((1, 2, 8, 64))
                sampled = rng.random() < 0.3
                with contextlib.suppress(RequestFailed):
                    body = pair.body(ids, max_new_tokens=tokens, temperature=0.8 if sampled else 0)
                    answer = pair.send(body, timeout_s=0.3 if rng.random() < 0.05 else 120)
                    answered.append(tokens)
                    if not sampled and rng.random() < 0.2 and answer["output_ids"] != reference(ids, tokens):
                        wrong.append(ids)

        clients = [threading.Thread(target=client, args=(seed,)) for seed in range(CONCURRENCY)]
        for thread in clients:
            thread.start()
        time.sleep(seconds / 3)
        early = {role: _memory(pair.servers[role]) for role in ROLES}
        time.sleep(2 * seconds / 3)
        late = {role: _memory(pair.servers[role]) for role in ROLES}
        done.set()
        for thread in clients:
            thread.join(180)
        counters = served.counters("decode")
        memory = f"memory after a third {early}, at the end {late}"
        print(f"\n{len(answered)} answers in {seconds:.0f} s; {memory}; {counters}")  # noqa: T201 - the figures are what a soak run is for
        assert not wrong
        _until_whole(served, reference)
        assert all(server.process.poll() is None for server in pair.servers.values())
        for role in ROLES:
            assert late[role] < early[role] + 200, f"MiB of {role}"


def _memory(server) -> int:
    """Return the resident MiB of all processes of a server."""
    total = 0
    for pid in server.session_members():
        with contextlib.suppress(OSError):
            total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return total >> 20
