"""The seam table itself; that each row fits SGLang is shown by test_transfer.py and by `doctor`."""

import inspect
import pkgutil
import subprocess
import sys

import pytest
from sglang_spec_ext.disagg.seams import CPU_SEAMS, SEAMS

ROWS = (*SEAMS, *CPU_SEAMS)
# parameters that SGLang's hook form puts before those of the target
LEADING = {"before": 0, "after": 1, "around": 1, "replace": 0}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.target.removeprefix("sglang.srt."))
def test_each_row_names_a_function_that_takes_the_parameters_it_lists(row):
    function = pkgutil.resolve_name(row.hook)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    takes_any = any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)
    given = LEADING[row.kind] + len(row.params)
    assert len(positional) == given or (takes_any and len(positional) <= given)
    assert row.why
    assert row.remove_when


def test_no_symbol_is_touched_twice():
    assert len({row.target for row in ROWS}) == len(ROWS)


def test_reading_the_table_imports_neither_torch_nor_sglang_nor_numpy():
    code = "import sys, sglang_spec_ext.disagg.seams; print({'torch', 'sglang', 'numpy'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "set()"
