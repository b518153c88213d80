"""Two tensor-parallel ranks on this machine, over gloo: equal decisions, no hang, no other token."""

import json
import random
import sys
from pathlib import Path

import pytest

# one worker, before the single tests: two ranks fill the machine
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("ranks")]

RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}  # more than one rank needs it


def test_ranks_move_together(reference, adaptive_on) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(3, 63) for _ in range(4 + 9 * i)] for i in range(8)]
    expected = [reference.greedy(ids, 96) for ids in prompts]
    flags = ("--speculative-algorithm", "DSPARK", "--tp", "2", "--spec-ext-min-gain", "0.0")
    with adaptive_on("blend-dspark", flags, RANKS) as served:
        state = served.control.state()
        assert state["ranks"] == 2
        assert "failed" not in state["profile"]
        # an idle rank does not exist under tensor parallelism; uneven load is: one request, then eight
        assert served.generate(prompts[0], tokens=96)[0]["output_ids"] == expected[0]
        assert [answer["output_ids"] for answer in served.generate(prompts, tokens=96)] == expected
        with served.moving():
            assert [answer["output_ids"] for answer in served.generate(prompts, tokens=96)] == expected
        state = served.control.state()
        assert len(state["moves"]) > 2
        assert not {"rank_mismatch", "rank_absent"} & state["reasons"].keys()


def test_a_rank_with_other_confidences_runs_the_same_2000_steps(reference, adaptive_on, tmp_path) -> None:
    """Rank 1 would plan other budgets for other requests; both must run one plan, and no token may change."""
    rng = random.Random(4)
    prompts = [[rng.randrange(3, 63) for _ in range(3 + 5 * i)] for i in range(4)]
    expected = [reference.greedy(ids, 64) for ids in prompts]
    # no K = 0: the draft is poor, and plain decoding would win
    flags = ("--speculative-algorithm", "DSPARK", "--tp", "2", "--spec-ext-verify", "ragged", "--spec-ext-tiers", "7")
    environment = {**RANKS, "SPEC_EXT_TEST_STEPS": str(tmp_path / "steps")}
    launcher = [sys.executable, str(Path(__file__).with_name("perturbed_server.py"))]
    with adaptive_on("blend-dspark", flags, environment, launcher) as served:
        assert served.control.state()["ranks"] == 2
        number = 0
        while (state := served.control.state())["steps"] < 2020:
            count = (1, 4, 2)[number % 3]  # uneven load
            answers = served.generate(prompts[:count], tokens=64)
            assert [answer["output_ids"] for answer in answers] == expected[:count]
            number += 1
            assert number < 400
        assert not {"rank_mismatch", "rank_absent"} & state["reasons"].keys()
    texts = [(tmp_path / f"steps.{rank}").read_text(encoding="utf-8") for rank in (0, 1)]
    first, second = ([json.loads(line) for line in text.splitlines()] for text in texts)
    assert len(first) >= 2000
    assert abs(len(first) - len(second)) <= 1  # the server ended between them
    for number, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        assert (mine[:3], mine[4]) == (theirs[:3], theirs[4]), f"step {number}"
    assert sum(row[2] is not None for row in first) > 500  # budgets were really planned
    assert {row[3] for row in first} | {row[3] for row in second} >= {"rank_minimum"}  # and wishes differed


def test_replicas_of_data_parallelism_decide_for_themselves(reference, adaptive_on) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 63) for _ in range(4 + 3 * i)] for i in range(8)]
    flags = ("--speculative-algorithm", "DSPARK", "--dp", "2", "--load-balance-method", "round_robin")
    with adaptive_on("blend-dspark", flags, RANKS) as served:
        answers = served.generate(prompts, tokens=32)
        assert [answer["output_ids"] for answer in answers] == [reference.greedy(ids, 32) for ids in prompts]
        states = served.control.states()
        assert len(states) == 2
        assert all(state["steps"] > 0 and state["ranks"] == 1 for state in states)
        served.control.pin(0)
        assert [state["pinned"] for state in served.control.states()] == [0, 0]
