"""`sglang_spec_ext.Engine`, as a program would use it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sglang")

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

PROGRAM = """
import json, os, sys
from sglang_spec_ext import Engine, SpecExtConfig

if __name__ == "__main__":
    target, draft = sys.argv[1:]
    engine = Engine(
        model_path=target, speculative_algorithm="DSPARK", speculative_draft_model_path=draft, device="cpu",
        dtype="float32", max_total_tokens=2048, max_running_requests=4, log_level="error",
        spec_ext=SpecExtConfig(mode="shadow"),
    )
    answer = engine.generate(input_ids=[5, 9, 11], sampling_params={"temperature": 0, "max_new_tokens": 8})
    info = engine.get_server_info()
    engine.shutdown()
    print("RESULT", json.dumps({"ids": answer["output_ids"], "spec_ext": info["spec_ext"],
                                "exported": "SGLANG_SPEC_EXT" in os.environ}))
"""


def test_engine_runs_the_extension_and_leaves_the_environment_alone(checkpoint, reference, tmp_path: Path) -> None:
    import json

    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "SGLANG_PLATFORM": "spec_ext_cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(program), str(checkpoint("blend-llama")), str(checkpoint("blend-dspark"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout[-2000:] + done.stderr[-2000:]
    result = json.loads(lines[0].removeprefix("RESULT "))
    assert result["ids"] == reference.greedy([5, 9, 11], 8)
    assert result["spec_ext"]["worker"].startswith("SpecExt")
    assert result["spec_ext"]["mode"] == "shadow"
    assert not result["exported"]
