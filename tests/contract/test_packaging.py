"""The packaging matrix: wheel and editable, started anywhere and in the repository root.

In every cell the sub-packages import as `sglang_spec_ext.kernels` and `sglang_spec_ext.disagg`, PyPI's own package
`kernels` (which SGLang imports) is not shadowed, and the entry points are found.
"""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("kernels", reason="PyPI's `kernels` comes with SGLang")

ROOT = Path(__file__).resolve().parents[2]
PROBE = """
import importlib.metadata as metadata, pathlib, sys
import sglang_spec_ext.kernels.dispatch, sglang_spec_ext.disagg.schema, sglang_spec_ext.hooks
import kernels
assert hasattr(kernels, "get_kernel"), kernels
groups = {"sglang.srt.plugins": "spec_ext", "sglang.srt.platforms": "spec_ext_cpu"}
for group, name in groups.items():
    assert name in metadata.entry_points(group=group).names, group
print(pathlib.Path(sglang_spec_ext.__file__).parent)
"""


def call(*argv: object, cwd: Path | str = "/") -> str:
    done = subprocess.run([*map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tracked files, so that a build leaves nothing behind in the repository."""
    folder = tmp_path_factory.mktemp("checkout")
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, files.split("\0")):
        source = ROOT / name
        if source.is_file() and not name.startswith(("models/", "tests/")):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    call(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", out, checkout)
    return next(out.glob("*.whl"))


@pytest.fixture(params=["wheel", "editable"])
def python(request: pytest.FixtureRequest, checkout: Path, wheel: Path, tmp_path: Path) -> Path:
    """An environment that sees the dependencies of this one, with the project installed one way."""
    call(sys.executable, "-m", "venv", "--without-pip", tmp_path / "env")
    python = tmp_path / "env/bin/python"
    site = Path(call(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"))
    dependencies = Path(__import__("numpy").__file__).parents[1]
    (site / "dependencies.pth").write_text(f"import site; site.addsitedir({str(dependencies)!r})\n")
    what = [wheel] if request.param == "wheel" else ["-e", checkout]
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-build-isolation")
    call(*pip, *what)
    return python


@pytest.mark.parametrize("where", ["anywhere", "repository root"])
def test_everything_imports(python: Path, checkout: Path, where: str) -> None:
    call(python, "-c", PROBE, cwd=checkout if where == "repository root" else "/")


def test_safe_path_runs_the_installed_copy(python: Path, checkout: Path) -> None:
    """From the root, `-P` takes the installed copy; for an editable install that is the checkout itself."""
    found = Path(call(python, "-P", "-c", PROBE, cwd=checkout))
    editable = bool(list(python.parents[1].rglob("__editable__*")))
    assert (found == checkout / "sglang_spec_ext") is editable


def test_console_script(python: Path) -> None:
    assert "simulate" in call(python.parent / "spec-ext", "--help")


def test_wheel_holds_every_package_folder(wheel: Path) -> None:
    names = {name.rpartition("/")[0] for name in zipfile.ZipFile(wheel).namelist() if name.endswith(".py")}
    assert {"sglang_spec_ext/kernels", "sglang_spec_ext/disagg", "sglang_spec_ext/control"} <= names
    assert not any(name.startswith(("kernels", "disagg", "tests")) for name in names)


def test_setup_lists_exactly_the_folders_on_disk() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    listed = next(
        ast.literal_eval(keyword.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        for keyword in node.keywords
        if keyword.arg == "packages"
    )
    inside = {
        "sglang_spec_ext." + ".".join(path.parent.relative_to(ROOT / "sglang_spec_ext").parts)
        for path in (ROOT / "sglang_spec_ext").rglob("__init__.py")
        if path.parent != ROOT / "sglang_spec_ext"
    }
    assert set(listed) == {"sglang_spec_ext", "sglang_spec_ext.kernels", "sglang_spec_ext.disagg"} | inside
    for bare in ("kernels", "disagg"):
        assert not (ROOT / bare / "__init__.py").exists()
        assert not [path for path in (ROOT / bare).iterdir() if path.is_dir() and path.name != "__pycache__"]

