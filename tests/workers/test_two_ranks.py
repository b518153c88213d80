"""Two tensor-parallel ranks on this machine, over gloo: equal decisions, no hang, no other token."""

import random

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900)]

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
