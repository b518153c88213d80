"""bfloat16, the demo's dtype: every algorithm serves, and its drafts are accepted.

Rounding differs between a plain step and a verified one, so the tokens need not be those of plain decoding to the last;
float32 shows that (`test_lossless.py`).
"""

import pytest

pytest.importorskip("sglang")

import httpx

from sglang_spec_ext.testing import running_server

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(400)]

BASE = ("--device", "cpu", "--dtype", "bfloat16", "--max-total-tokens", "4096", "--max-running-requests", "8",
        "--skip-tokenizer-init", "--sleep-on-idle", "--log-level", "warning")  # fmt: skip
EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")


@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "DSPARK"])
def test_drafts_are_accepted_in_bfloat16(checkpoint, forked, algorithm: str) -> None:
    arguments = ["--model-path", str(checkpoint("blend-llama")), *BASE, "--speculative-algorithm", algorithm]
    arguments += ["--speculative-draft-model-path", str(checkpoint(f"blend-{algorithm.lower()}"))]
    if algorithm == "EAGLE3":
        arguments += EAGLE
    environment = {"SGLANG_PLATFORM": "spec_ext_cpu", "OMP_NUM_THREADS": "1"}
    prompts = [[5, 9, 11, 30], [7] * 20, [40, 41, 42, 43, 44, 45, 46]]
    accepted = 0
    with running_server(arguments, environment=environment, launcher=forked) as server:
        for temperature in (0, 1):
            params = {"temperature": temperature, "max_new_tokens": 48, "ignore_eos": True}
            body = {"input_ids": prompts, "sampling_params": params}
            answers = httpx.post(f"{server.url}/generate", json=body, timeout=180).json()
            assert [len(answer["output_ids"]) for answer in answers] == [48, 48, 48]
            accepted += sum(answer["meta_info"]["spec_num_correct_drafts"] for answer in answers)
    assert accepted > 0
