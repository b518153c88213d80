"""Load-aware speculative decoding for a stock SGLang.

Importing this package imports neither torch nor sglang. `Engine` and `SpecExt` are resolved on first use.
"""

from pathlib import Path
from typing import Any

__version__ = "0.1.0"

__all__ = ["Engine", "SpecExt", "SpecExtConfig", "__version__"]

# In a checkout, `kernels/` and `disagg/` stand beside this package, not inside it: setuptools' editable
# finder cannot serve a package_dir entry without __init__.py, and a process started in the repository root
# imports this copy. In site-packages the guard is false.
_root = Path(__file__).resolve().parent.parent
if (_root / "setup.py").is_file() and (_root / "kernels").is_dir() and (_root / "disagg").is_dir():
    __path__.append(str(_root))

_LAZY = {
    "Engine": "sglang_spec_ext.engine",
    "SpecExt": "sglang_spec_ext.runtime",
    "SpecExtConfig": "sglang_spec_ext.config",
}


def __getattr__(name: str) -> Any:
    """Resolve the public classes on first use, so that `import sglang_spec_ext` stays light."""
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'sglang_spec_ext' has no attribute {name!r}")
