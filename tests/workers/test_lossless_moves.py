"""K moves every few steps and never changes a token, nor the distribution of sampled ones.

A bystander pins one K after another through the server's own control route while requests run, so what moves here
is what a user can move, in the real engine.
"""

import concurrent.futures
import itertools
import random
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

LENGTHS = (1, 2, 5, 13, 40, 65, 130, 200)  # the last three take more than one chunk of 64
TOKENS = 48
ROUNDS = 40  # bound of the search for a round in which the last pair of tiers is seen


def prompts(seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 63) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(reference) -> dict[int, list[list[int]]]:
    return {seed: [reference.greedy(ids, TOKENS) for ids in prompts(seed)] for seed in (1, 2)}


def pairs_seen(adaptive) -> set[tuple[int, int]]:
    return {tuple(map(int, move.split("->"))) for move in adaptive.control.state()["moves"]}


def test_every_pair_of_tiers_with_aborts_and_prefix_hits(adaptive, expected) -> None:
    state = adaptive.control.state()
    wanted = set(itertools.permutations(state["tiers"], 2))
    assert (0, max(state["tiers"])) in wanted
    cached = 0
    with adaptive.moving(), concurrent.futures.ThreadPoolExecutor(1) as pool:
        for round_number in range(ROUNDS):
            seed = 1 + round_number % 2
            # a request that never ends by itself, aborted while the others run
            victim = pool.submit(adaptive.ask, {"input_ids": [7, 8, 9], "rid": f"victim-{round_number}"}, 4000)
            together = adaptive.generate(prompts(seed))
            aborted = adaptive.client.post("/abort_request", json={"rid": f"victim-{round_number}"})
            assert aborted.status_code == 200
            victim.result()
            assert [answer["output_ids"] for answer in together] == expected[seed]
            for ids, tokens in zip(prompts(seed), expected[seed], strict=True):
                alone = adaptive.generate(ids)[0]
                assert alone["output_ids"] == tokens
                cached += alone["meta_info"]["cached_tokens"]
            if wanted <= pairs_seen(adaptive):
                break
    assert wanted <= pairs_seen(adaptive), f"never moved {sorted(wanted - pairs_seen(adaptive))}"
    assert cached > 100
    assert adaptive.control.state()["unmatched_steps"] == 0


def test_sampled_tokens_follow_the_target_while_k_moves(adaptive, reference, sampling) -> None:
    with adaptive.moving():
        assert_sampled_as_the_target(adaptive, reference, sampling)
    assert len(pairs_seen(adaptive)) > 4


def assert_sampled_as_the_target(served, reference, sampling) -> None:
    """Draw 20,000 tokens and test them against the target's own filtered distribution at each place."""
    import torch

    params = {"temperature": 1.0, "top_p": 0.9}
    rng = random.Random(5)
    asked = [[rng.randrange(3, 63) for _ in range(6)] for _ in range(200)]
    answers = served.generate(asked, tokens=100, **params)
    draws = []
    for ids, answer in zip(asked, answers, strict=True):
        tokens = answer["output_ids"]
        logits = reference.logits([*ids, *tokens])[len(ids) - 1 : -1]
        for place, token in enumerate(tokens):
            p = sampling.filtered(logits[place], **params)
            assert p[token] > 0, f"token {token} lies outside the filtered support"
            draws.append(sampling.uniform_of(p, token, rng.random()))
    assert len(draws) >= 20000
    counts = torch.histc(torch.tensor(draws), sampling.BINS, 0.0, 1.0)
    expected_count = len(draws) / sampling.BINS
    statistic = float(((counts - expected_count) ** 2 / expected_count).sum())
    assert statistic < sampling.LIMIT, f"chi-square {statistic:.1f}, counts {counts.int().tolist()}"


CHAINS = ("--speculative-num-steps", "7", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "8")


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH", "EAGLE3"])
def test_ragged_steps_change_no_token_and_no_distribution(
    algorithm, adaptive_on, expected, reference, sampling
) -> None:
    """Budgets alone, for no K but the whole block is allowed, and each token costs what it costs here."""
    flags = ("--speculative-algorithm", algorithm, "--spec-ext-verify", "ragged", "--spec-ext-tiers", "7")
    flags += CHAINS if algorithm == "EAGLE3" else ()
    launcher = (sys.executable, str(Path(__file__).with_name("priced_server.py")))
    with adaptive_on(f"blend-{algorithm.lower()}", flags, {}, launcher) as served:
        for _ in range(ROUNDS):
            estimator = served.control.state()["estimator"]
            if estimator is None or estimator["warm"]:  # a confidence head needs no warm-up
                break
            served.generate(prompts(3), tokens=TOKENS)
        assert [reason.partition(":")[0] for reason in served.control.state()["inactive"]] == ["tiers lack 0"]
        for seed, answers in expected.items():
            assert [answer["output_ids"] for answer in served.generate(prompts(seed), tokens=TOKENS)] == answers
            for ids, tokens in zip(prompts(seed), answers, strict=True):
                assert served.generate(ids)[0]["output_ids"] == tokens
        greedy = served.control.state()["ragged"]
        assert_sampled_as_the_target(served, reference, sampling)
        sampled = served.control.state()["ragged"]
    assert greedy["steps"] > 40
    assert sampled["steps"] - greedy["steps"] > 400
    for steps in (greedy, sampled):
        assert 0 < steps["verified"] < steps["drafted"]
