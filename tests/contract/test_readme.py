"""What the README says of the flags comes from the code, and its measured table from the committed report."""

import json
from pathlib import Path

from sglang_spec_ext import flags
from sglang_spec_ext.commands import bench_envelope_report as reporting
from sglang_spec_ext.commands.bench_envelope import MARKS

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MEASURED = ROOT / "docs" / "measured" / "envelope.json"


def test_flags_table_is_the_generated_one() -> None:
    text = README.read_text(encoding="utf-8")
    start, end = "<!-- flags -->\n", "\n<!-- /flags -->"
    assert text[text.index(start) + len(start) : text.index(end)] == flags.markdown_table()


def test_measured_table_is_the_one_of_the_committed_report() -> None:
    """`spec-ext bench envelope --render docs/measured/envelope.json --out docs/measured --into README.md` writes it."""
    shown = README.read_text(encoding="utf-8").split(MARKS[0])[1].split(MARKS[1])[0].strip()
    if not MEASURED.exists():
        assert shown == "Not measured yet."
        return
    report = json.loads(MEASURED.read_text(encoding="utf-8"))
    report |= reporting.aggregate(report["samples"], report["setups"])
    assert shown == reporting.markdown(report).strip()
