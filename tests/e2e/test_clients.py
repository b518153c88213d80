"""Clients that nobody here wrote drive the server: SGLang's own benchmark and the `openai` package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]


def test_bench_serving_finishes_without_a_failed_request(served, tmp_path: Path) -> None:
    out = tmp_path / "bench.jsonl"
    command = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang", "--base-url", served.server.url]
    command += ["--dataset-name", "random-ids", "--num-prompts", "16", "--random-input-len", "48"]
    command += ["--random-output-len", "24", "--random-range-ratio", "1.0", "--max-concurrency", "8"]
    command += ["--tokenizer", str(served.folder), "--model", str(served.folder), "--seed", "3"]
    command += ["--output-file", str(out)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "SGLANG_PLATFORM": "spec_ext_cpu"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(out.read_text().splitlines()[-1])
    assert result["completed"] == 16
    assert result["total_output_tokens"] == 16 * 24


def test_openai_client_streams(served) -> None:
    from openai import OpenAI

    client = OpenAI(base_url=f"{served.server.url}/v1", api_key="none", timeout=180)
    request = {
        "model": "default",
        "messages": [{"role": "user", "content": "what is new?"}],
        "temperature": 0,
        "max_tokens": 20,
    }
    whole = client.chat.completions.create(**request).choices[0].message.content
    stream = client.chat.completions.create(**request, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == whole
