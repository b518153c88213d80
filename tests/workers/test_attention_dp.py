"""Attention data parallelism over gloo: each rank has requests of its own, or none, and all run one K."""

import json
import os
import random
import sys
import threading
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.xdist_group("ranks")]

STEPS = int(os.environ.get("SOAK_STEPS", "250"))
RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
FLAGS = (
    "--tp", "2", "--dp", "2", "--enable-dp-attention", "--enable-dp-lm-head", "--load-balance-method", "round_robin",
)  # fmt: skip
EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
TARGET = "blend-qwen3"  # whose embedding stays within an attention group
TOKENS = 40
UNIFORM = "--spec-ext-verify ragged runs as uniform: ranks with attention data parallelism"
LAUNCHER = (sys.executable, str(Path(__file__).with_name("perturbed_server.py")))


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(9)
    return [[rng.randrange(3, 63) for _ in range(3 + 9 * i)] for i in range(7)]


@pytest.fixture(scope="module")
def expected(reference_of, prompts) -> list[list[int]]:
    reference = reference_of(TARGET)
    return [reference.greedy(ids, TOKENS) for ids in prompts]


def flags_of(algorithm: str) -> tuple[str, ...]:
    return (*FLAGS, "--speculative-algorithm", algorithm, *(EAGLE if algorithm == "EAGLE3" else ()))


def ids_of(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize("algorithm", ["DSPARK", "DFLASH", "EAGLE3"])
def test_no_token_changes_while_k_and_the_mode_move(algorithm, prompts, expected, adaptive_on) -> None:
    flags, draft = (*flags_of(algorithm), "--spec-ext-verify", "ragged"), f"blend-{algorithm.lower()}"
    with adaptive_on(draft, flags, RANKS, target=TARGET) as served:
        for state in served.control.states():
            assert (state["ranks"], state["inactive"]) == (2, [UNIFORM])
            assert "failed" not in state["profile"]
        assert ids_of(served.generate(prompts[0], tokens=TOKENS)) == expected[:1], "the other rank is idle"
        assert ids_of(served.generate(prompts, tokens=TOKENS)) == expected, "four requests and three"
        with served.moving():
            assert ids_of(served.generate(prompts, tokens=TOKENS)) == expected
        stop = threading.Event()
        mover = threading.Thread(target=change_modes, args=(served.control, stop))
        mover.start()
        try:
            assert ids_of(served.generate(prompts, tokens=TOKENS)) == expected
        finally:
            stop.set()
            mover.join()
        for state in served.control.states():
            assert len(state["moves"]) > 2
            assert "rank_minimum" in state["reasons"]


def change_modes(control, stop: threading.Event) -> None:
    """Change the mode again and again; the ranks are told one after another, in the middle of what they do."""
    number = 0
    while not stop.wait(0.02):
        control.set_mode(("shadow", "adaptive", "off", "adaptive")[number % 4])
        number += 1
    control.set_mode("adaptive")


def test_ranks_take_the_same_decisions(prompts, expected, adaptive_on, tmp_path) -> None:
    """One rank is often idle, and K is pinned anew every few steps, of which the ranks hear one after another."""
    environment = {**RANKS, "SPEC_EXT_TEST_STEPS": str(tmp_path / "steps")}
    flags = (*flags_of("DSPARK"), "--spec-ext-tiers", "0,7")
    with adaptive_on("blend-dspark", flags, environment, LAUNCHER, TARGET) as served, served.moving():
        number = 0
        while decisions(tmp_path, 0) is None or len(decisions(tmp_path, 0)) < STEPS:
            count = (1, 7, 2)[number % 3]
            assert ids_of(served.generate(prompts[:count], tokens=TOKENS)) == expected[:count]
            number += 1
            assert number < 400
    first, second = decisions(tmp_path, 0), decisions(tmp_path, 1)
    assert min(len(first), len(second)) >= STEPS
    assert abs(len(first) - len(second)) <= 1  # the server ended between them
    for number, (mine, theirs) in enumerate(zip(first, second, strict=False)):
        assert mine == theirs, f"decision {number}"
    assert {k for k, _ in first} == {0, 7}


def decisions(folder: Path, rank: int) -> list[list] | None:
    path = folder / f"steps.decided.{rank}"
    if not path.exists():
        return None
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("]")]
