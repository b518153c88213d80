"""`spec-ext simulate` as a user runs it: without torch or SGLang, JSON alone on standard output, exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_spec_ext.cli import main

VECTORS = Path(__file__).parent / "vectors"
BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "sglang", "triton"):
            raise ImportError(f"{name} is blocked")
sys.meta_path.insert(0, Block())
from sglang_spec_ext.cli import main
sys.exit(main(sys.argv[1:]))
"""


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-c", BLOCKED, "simulate", *arguments], capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("name", ["best-k", "markov", "verify"])
def test_json_without_torch(name, vector):
    done = run(name, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    got = json.loads(done.stdout)
    table = vector("chapter_tables.json")
    if name == "markov":
        assert got == pytest.approx({key: table["markov"][key] for key in ("parallel", "markov")}, rel=5e-5)
        return
    wanted = table["best_k"] if name == "best-k" else table["adaptive_verification"]["rows"]
    for row, reference in zip(got["rows"], wanted, strict=True):
        assert row == pytest.approx({key: reference[key] for key in row}, rel=5e-5)


@pytest.fixture
def short_scenario(tmp_path):
    scenario = json.loads((VECTORS / "scenario_example.json").read_text())
    for segment in scenario["segments"]:
        segment["steps"] = 60
    path = tmp_path / "short.json"
    path.write_text(json.dumps(scenario))
    return path


def test_scenario_json_table_and_plot(short_scenario, tmp_path, capsys):
    plot = tmp_path / "plot.png"
    assert main(["simulate", "scenario", str(short_scenario), "--json", "--plot", str(plot)]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["fixed"]) == {"0", "1", "3", "5", "7"}
    assert result["oracle"]["tok_s"] > 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert main(["simulate", "scenario", str(short_scenario)]) == 0
    text = capsys.readouterr().out
    assert "adaptive" in text
    assert f"{result['oracle']['tok_s']:.1f}" in text
    again = tmp_path / "again.json"
    again.write_text(short_scenario.read_text())
    assert main(["simulate", "scenario", str(short_scenario), str(again), "--json"]) == 0
    many = json.loads(capsys.readouterr().out)["scenarios"]
    assert many["again"] == many["short"] == result


def test_lossless_and_readable_tables(capsys, vector):
    path = VECTORS / "appendix_a.json"
    assert main(["simulate", "lossless", str(path), "--json"]) == 0
    got = json.loads(capsys.readouterr().out)["first_token_distribution"]
    for planner, distribution in vector("appendix_a.json")["first_token_distribution"].items():
        assert got[planner] == pytest.approx(distribution, abs=1e-12)
    for command, figure in (("best-k", "3.2426"), ("markov", "0.8114"), ("verify", "29052.6")):
        assert main(["simulate", command]) == 0
        assert figure in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["scenario", "/nowhere.json"], "nowhere.json"),
        (["scenario", str(VECTORS / "appendix_a.json")], "scenario"),
        (["lossless", str(VECTORS / "scenario_example.json")], "scenario_example.json"),
        (["best-k", "--plot", "plot.pdf"], ".png"),
        (["scenario", "a.json", "b.json", "--plot", "plot.png"], "one scenario"),
        (["best-k", "--plot", "/nowhere/plot.png"], "cannot be written"),
    ],
)
def test_wrong_use_is_status_2_and_names_the_argument(arguments, named, capsys):
    assert main(["simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert named in captured.err
    assert captured.out == ""
