"""Run every Triton test of this folder in Triton's interpreter, in a process that imports triton under it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="this is the interpreter process")
def test_triton_equals_the_twins_in_the_interpreter():
    """Every `test_*_triton.py` passes, none is skipped."""
    pytest.importorskip("triton")
    files = sorted(str(path) for path in FOLDER.glob("test_*_triton.py"))
    assert files
    outer = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}  # is not for this run
    env = outer | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    done = subprocess.run(
        command, env=env, cwd=FOLDER.parent.parent, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    summary = done.stdout.strip().splitlines()[-1]
    assert re.fullmatch(r"\d+ passed.* in .*", summary), summary
    assert "skipped" not in summary, summary
