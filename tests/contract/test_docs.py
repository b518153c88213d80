"""Commands in the documents are ones that exist, and the cheap ones run; the dashboard asks for metrics that exist.

Every line of a ```bash block must be known here: a program of ours is parsed by its own parser, a server's command
line by SGLang's with our flags, a make target by the Makefile, a script by bash. Those under RUN really run.
"""

import argparse
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from sglang_spec_ext.cli import build_parser, main

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "models/README.md", *(
    str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").glob("*.md"))
))  # fmt: skip
# quick, without an engine, and writing nothing outside what they are given
RUN = ("spec-ext simulate",)


def lines_of(page: str) -> list[str]:
    """Return the command lines of a page's bash blocks, continued lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line for line in (part.strip() for part in joined.splitlines()) if line and not line.startswith("#")]


COMMANDS = sorted({(page, line) for page in PAGES for line in lines_of(page)})


def words_of(line: str) -> list[str]:
    """Split a line into words, without comment and leading assignments."""
    words = shlex.split(line, comments=True)
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words.pop(0)
    return words


def test_pages_hold_commands():
    assert {"README.md", "docs/operating.md", "docs/cpu-platform.md"} <= {page for page, _ in COMMANDS}


@pytest.mark.parametrize(("page", "line"), COMMANDS, ids=[f"{page}: {line[:60]}" for page, line in COMMANDS])
def test_documented_command_is_one_that_exists(page, line):
    words = words_of(line)
    if not words or words[0] in {"export", "cd", "pip"}:
        return
    if words[0] == "spec-ext":
        parse_ours(words[1:])
    elif words[:3] == ["python", "-m", "sglang.launch_server"] or words[:2] == ["sglang", "serve"]:
        parse_server(words[3 if words[0] == "python" else 2 :])
    elif words[:3] == ["python", "-m", "pytest"]:
        paths = [word for word in words[3:] if word.startswith("tests/")]
        assert paths
        assert all((ROOT / path).exists() for path in paths)
    elif words[0] == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in words[1:] if not word.startswith("-") and "=" not in word} <= set(targets)
    elif words[0].startswith("launch_scripts/") or words[:2] == [".", "launch_scripts/env.sh"]:
        script = ROOT / words[-1 if words[0] == "." else 0]
        assert subprocess.run(["bash", "-n", script], check=False).returncode == 0
    else:
        pytest.fail(f"{page}: this test does not know what to do with {line!r}; teach it")


def parse_ours(words):
    try:
        build_parser(words[0]).parse_args(words)
    except SystemExit as error:
        pytest.fail(f"spec-ext {' '.join(words)}: not accepted (status {error.code})")


def parse_server(words):
    server_args = pytest.importorskip("sglang.srt.server_args")
    from sglang_spec_ext import flags

    parser = argparse.ArgumentParser(exit_on_error=False)
    server_args.ServerArgs.add_cli_args(parser)
    if "--spec-ext-mode" not in parser.format_help():
        flags.add_arguments(parser)
    _, unknown = parser.parse_known_args(words)
    assert unknown == []


@pytest.mark.parametrize("line", sorted({line for _, line in COMMANDS if line.startswith(RUN)}))
def test_documented_command_runs(line, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words_of(line)[1:]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES)
def test_links_between_pages_lead_somewhere(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    folder = (ROOT / page).parent
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (folder / target).exists(), f"{page} links to {target}"


def test_every_reason_code_is_explained():
    from sglang_spec_ext.records import Reason

    text = (ROOT / "docs" / "operating.md").read_text(encoding="utf-8")
    assert [str(reason) for reason in Reason if f"| `{reason}` |" not in text] == []


def test_dashboard_asks_for_metrics_and_labels_that_exist():
    prometheus = pytest.importorskip("prometheus_client")
    import numpy as np

    from sglang_spec_ext.metrics import PrometheusMetrics
    from sglang_spec_ext.records import Decision, Reason, StepObservation

    class Accounted:
        def snapshot(self):
            ledger = {"chosen_tok_s": 1.0, "measured_tok_s": 1.0, "regret_tok_s": 0.0}
            return {"ledger": ledger, "acceptance": {"dropped": 0}}

    before = set(prometheus.REGISTRY._collector_to_names)
    try:
        metrics = PrometheusMetrics({"model_name": "m"})
        for k in (1, 2):
            observation = StepObservation(step=k, k=k, accepted=np.array([1]), draft_s=0.1, verify_s=0.1, step_s=0.2)
            metrics.observe(observation, Decision(k=k, reason=Reason.PROBE, probe=True))
        metrics.account(Accounted())
        samples = [sample for family in prometheus.REGISTRY.collect() for sample in family.samples]
    finally:
        for collector in set(prometheus.REGISTRY._collector_to_names) - before:
            prometheus.REGISTRY.unregister(collector)
    known = {sample.name for sample in samples if sample.name.startswith("sglang:spec_ext_")}
    labels = {label for sample in samples if sample.name in known for label in sample.labels}

    dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text(encoding="utf-8"))
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) >= len(dashboard["panels"]) > 8
    asked = {name for query in queries for name in re.findall(r"sglang:\w+", query)}
    assert asked <= known, sorted(asked - known)
    families = {re.sub(r"_(total|created|bucket|sum|count)$", "", name) for name in known}
    shown = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in asked}
    assert families == shown, sorted(families - shown)  # nothing is exported that the dashboard leaves out
    grouped = {label for query in queries for label in re.findall(r"by \((\w+)\)", query)}
    assert grouped <= labels
