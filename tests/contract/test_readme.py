"""What the README says of the flags comes from the code."""

from pathlib import Path

from sglang_spec_ext import flags

README = Path(__file__).resolve().parents[2] / "README.md"


def test_flags_table_is_the_generated_one() -> None:
    text = README.read_text(encoding="utf-8")
    start, end = "<!-- flags -->\n", "\n<!-- /flags -->"
    assert text[text.index(start) + len(start) : text.index(end)] == flags.markdown_table()
