"""The pure parts import with torch and sglang blocked, as on a machine without the engine."""

import subprocess
import sys

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'sglang', 'triton', 'transformers'):
            raise ImportError(name + ' is blocked')
sys.meta_path.insert(0, Block())
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BLOCK + code], capture_output=True, text=True, timeout=120)


def test_pure_parts_import_without_torch_and_sglang() -> None:
    code = (
        "import sglang_spec_ext, sglang_spec_ext.config, sglang_spec_ext.flags, sglang_spec_ext.hooks\n"
        "import importlib, pkgutil, sglang_spec_ext.control as control\n"
        "for item in pkgutil.iter_modules(control.__path__):\n"
        "    importlib.import_module('sglang_spec_ext.control.' + item.name)\n"
        "import sglang_spec_ext.disagg.schema, sglang_spec_ext.disagg.record, sglang_spec_ext.cpu.selection\n"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr


def test_doctor_fails_with_the_cure_where_the_engine_is_missing() -> None:
    done = run("from sglang_spec_ext.cli import main\nsys.exit(main(['doctor', '--json']))\n")
    assert done.returncode == 1, done.stderr
    assert "pip install" in done.stdout
