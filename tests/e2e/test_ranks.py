"""Two tensor-parallel ranks on one machine return the tokens of one."""

import pytest

pytest.importorskip("sglang")

import httpx

from sglang_spec_ext.testing import running_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400), pytest.mark.xdist_group("ranks")]

BASE = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "4096", "--max-running-requests", "8",
        "--tp", "2", "--skip-tokenizer-init", "--sleep-on-idle", "--log-level", "warning")  # fmt: skip
ENVIRONMENT = {
    "SGLANG_PLATFORM": "spec_ext_cpu",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|1",  # SGLang demands one entry a rank
}
EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
PROMPTS = [[5, 9, 11, 30], [7] * 20, [40, 41, 42, 43, 44, 45, 46]]


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "DFLASH", "DSPARK"])
def test_two_ranks_return_the_tokens_of_one(checkpoint, reference, forked, algorithm: str) -> None:
    arguments = ["--model-path", str(checkpoint("blend-llama")), *BASE]
    if algorithm != "NONE":
        arguments += ["--speculative-algorithm", algorithm]
        arguments += ["--speculative-draft-model-path", str(checkpoint(f"blend-{algorithm.lower()}"))]
        arguments += ["--spec-ext-mode", "shadow"]
    if algorithm == "EAGLE3":
        arguments += EAGLE
    body = {"input_ids": PROMPTS, "sampling_params": {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}}
    with running_server(arguments, environment=ENVIRONMENT, launcher=forked) as server:
        answers = httpx.post(f"{server.url}/generate", json=body, timeout=180).json()
    assert [answer["output_ids"] for answer in answers] == [reference.greedy(ids, 24) for ids in PROMPTS]
