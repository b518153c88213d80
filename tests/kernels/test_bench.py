"""`spec-ext bench kernels`: a wrong kernel gets no number, and the dry run works without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sglang_spec_ext.commands import bench_kernels
from sglang_spec_ext.commands.bench_cases import Case

ROOT = Path(__file__).parent.parent.parent


def doubling_case(ours, **kwargs) -> Case:
    """An op whose twin doubles its input."""
    return Case(
        op="doubling",
        sizes={"N": 4},
        make=lambda seed: {"x": torch.arange(4) + seed},
        implementations={
            "ours": lambda inputs: lambda: {"y": ours(inputs["x"])},
            "twin": lambda inputs: lambda: {"y": inputs["x"] * 2},
            "sglang": lambda inputs: lambda: {"y": inputs["x"] + inputs["missing"]},
        },
        bytes_moved=64,
        **kwargs,
    )


@pytest.fixture
def timed(monkeypatch):
    """Make timing possible without a GPU: every call takes a second."""
    from sglang_spec_ext.commands import bench_timing

    monkeypatch.setattr(bench_timing, "median_seconds", lambda _: (1.0, "graph"))


@pytest.mark.usefixtures("timed")
def test_a_wrong_kernel_gets_no_number():
    """Neither time nor speed-up is taken; the row and the table say what differs."""
    row = bench_kernels.measure(doubling_case(lambda x: x * 2 + (x == 3)), copy_rate=1e12)
    assert row["correct"] is False
    assert row["checks"]["ours"] == "y: 25.00% of the entries differ"
    assert row["seconds"] == {}
    assert row["speedups"] is None
    environment = dict.fromkeys(("torch", "triton", "sglang", "python")) | {
        "device": "card",
        "copy_bytes_per_s": 1e12,
    }
    report = {"dry_run": False, "environment": environment, "rows": [row], "skipped": []}
    table = bench_kernels.markdown(report)
    assert "WRONG: y: 25.00% of the entries differ" in table
    assert "x |" not in table


@pytest.mark.usefixtures("timed")
def test_a_peer_that_fails_or_differs_is_named_and_not_compared():
    """Only implementations that agree with the twin get a speed-up."""
    row = bench_kernels.measure(doubling_case(lambda x: x * 2), copy_rate=1e12)
    assert row["correct"] is True
    assert row["speedups"] == {"twin": 1.0}
    assert row["checks"]["sglang"].startswith("KeyError")
    assert row["bandwidth_fraction"] == pytest.approx(64e-12)


def test_the_dry_run_checks_kernels_without_a_gpu(tmp_path):
    """One JSON object on standard output, exit status 0, both files written."""
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "sglang_spec_ext.cli", "bench", "kernels", "--dry-run", "--json"]
    ops = ["--op", "record_pack", "--op", "margin_features", "--out", str(tmp_path)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command + ops, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["ok"] is True
    assert {row["op"] for row in report["rows"]} == {"record_pack", "margin_features"}
    assert all(row["seconds"] == {} for row in report["rows"])
    assert json.loads((tmp_path / "kernels.json").read_text()) == report
    assert "not measured on a GPU" in (tmp_path / "kernels.md").read_text()
