"""Imports point one way: the table of what each part may import, held against the syntax trees."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# part -> parts of this project that it may import (itself always)
ALLOWED = {
    "__init__": {"config", "engine", "runtime"},
    "errors": set(),
    "records": set(),
    "hook": set(),
    "hooks": {"hook", "hooks_cpu", "disagg"},
    "hooks_cpu": {"hook"},
    "config": {"errors"},
    "flags": {"config", "errors"},
    "hook_install": {"hook", "errors"},
    "draft_check": {"errors", "models"},
    "testing": set(),
    "testing_pd": {"testing"},
    "launch": {"control", "cpu", "flags", "config", "errors", "hook_install", "hooks", "__init__"},
    "scratch": set(),
    "plugin": {"scratch", "errors", "flags", "cpu", "hook_install", "hooks"},
    "engine": {"flags", "launch", "config"},
    "doctor": {"hook", "hooks", "hook_install", "cpu", "plugin", "models"},
    "cli": {"commands"},
    "control": {"records", "errors"},
    "kernels": set(),
    "disagg": {"kernels", "errors", "hook"},
    "cpu": {"errors", "kernels", "hook_install"},
    "models": {"errors"},
    "workers": {
        "flags", "config", "errors", "launch", "control", "kernels", "records", "metrics", "models", "disagg",
        "__init__",
    },
    "metrics": {"records"},
    "runtime": {"errors", "config"},
    "commands": {"cli", "doctor", "models", "control", "records", "errors", "kernels", "runtime", "config", "flags",
                 "testing", "testing_pd", "cpu", "engine", "__init__"},
}
# parts that must import without torch and without SGLang, even lazily
PURE = ("control", "records", "errors", "hook", "hooks", "hooks_cpu", "config", "flags")


def modules() -> dict[Path, str]:
    """Return every source file with its part."""
    found = {path: path.stem for path in (ROOT / "sglang_spec_ext").glob("*.py")}
    for folder in ("control", "workers", "cpu", "models", "commands"):
        found |= dict.fromkeys((ROOT / "sglang_spec_ext" / folder).glob("*.py"), folder)
    for folder in ("kernels", "disagg"):
        found |= dict.fromkeys((ROOT / folder).glob("*.py"), folder)
    return found


def imported(path: Path) -> set[str]:
    """Return the dotted names that a file imports anywhere, function bodies included."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def parts_imported(path: Path) -> set[str]:
    known = set(ALLOWED)
    parts = set()
    for name in imported(path):
        if name == "sglang_spec_ext":
            continue
        if name.startswith("sglang_spec_ext."):
            part = name.split(".")[1]
            parts.add(part if part in known else "__init__")
    return parts


@pytest.mark.parametrize(("path", "part"), modules().items(), ids=lambda value: getattr(value, "name", value))
def test_imports_point_one_way(path: Path, part: str) -> None:
    assert part in ALLOWED, f"{path.name}: add its part to the table"
    assert parts_imported(path) - ALLOWED[part] - {part} == set()


@pytest.mark.parametrize("path", [p for p, part in modules().items() if part in PURE], ids=lambda path: path.name)
def test_pure_parts_never_import_torch_or_sglang(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(path)}
    assert not roots & {"torch", "sglang", "triton", "transformers"}
