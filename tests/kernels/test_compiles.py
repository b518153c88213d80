"""Every kernel compiles to machine code for a GPU; no GPU is needed for that.

The interpreter accepts things that the compiler refuses (and ignores layouts and types that it insists on),
so passing there is not enough. The wrappers are called on CPU tensors with launching replaced by compiling.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    """All kernels of the folder, each in the variants that the wrappers launch."""
    pytest.importorskip("triton")
    command = [sys.executable, str(FOLDER / "compile_kernels.py"), "90"]
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    compiled = {line.split()[0] for line in done.stdout.splitlines()}
    written = {
        line.removeprefix("def ").split("(")[0]
        for path in (ROOT / "kernels").glob("*_triton.py")
        for line in path.read_text().splitlines()
        if line.startswith("def _") and line.split("(")[0].endswith("_kernel")
    }
    assert written
    assert compiled == written
