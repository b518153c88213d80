"""Every Triton module has its twin, its public op and both test files; and a CPU never imports Triton."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
KERNELS = FOLDER.parent.parent / "kernels"

RUN_EVERY_OP = """
import sys
sys.modules["triton"] = None  # importing it raises
import torch
from sglang_spec_ext.kernels import cases
from sglang_spec_ext.kernels.chain_accept import chain_accept
from sglang_spec_ext.kernels.margin_features import margin_features
from sglang_spec_ext.kernels.markov_step import markov_step
from sglang_spec_ext.kernels.record_pack import record_pack, record_unpack
from sglang_spec_ext.kernels.renormalise import renormalise
from sglang_spec_ext.kernels.survival_plan import survival_plan

for mode in ("greedy", "target_only", "rejection"):
    chain_accept(**cases.chain_case(3, 2, 9, mode=mode, layout="ragged", seed=0))
margin_features(cases.logits_case(3, 9, dtype=torch.bfloat16, seed=0))
markov_step(**cases.markov_case(3, 9, 16, dtype=torch.float32, noise="philox", seed=0))
layout = cases.record_layout(hidden_width=4, hidden_dtype=torch.float32, topk=2, block=3)
case = cases.record_case(layout, 3, seed=0)
rows = torch.zeros(6, layout.row_bytes, dtype=torch.uint8)
record_pack(rows, layout, **case)
record_unpack(rows, layout, slots=case["slots"], names=["hidden"])
renormalise(torch.zeros(2, 9), temperatures=torch.ones(2), top_ks=torch.tensor([3, 4]))
survival_plan(torch.ones(3, 4), 5)
"""


def test_every_triton_module_has_its_counterparts():
    """`<op>_triton.py` stands beside `<op>.py` and `<op>_ref.py`, and both are tested."""
    ops = [path.name.removesuffix("_triton.py") for path in KERNELS.glob("*_triton.py")]
    assert len(ops) == 5
    for op in ops:
        for path in (KERNELS / f"{op}.py", KERNELS / f"{op}_ref.py"):
            assert path.is_file(), path
        for path in (FOLDER / f"test_{op}.py", FOLDER / f"test_{op}_triton.py"):
            assert path.is_file(), path


def test_cpu_tensors_never_import_triton():
    """All ops run in a process where importing triton raises."""
    command = [sys.executable, "-c", RUN_EVERY_OP]
    done = subprocess.run(
        command, cwd=FOLDER.parent.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
