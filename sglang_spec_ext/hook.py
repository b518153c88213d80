"""One touched symbol of SGLang: where, how, with what, and until when."""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

Kind = Literal["before", "after", "around", "replace", "assign", "module"]
When = Literal["flags", "active", "pd", "cpu", "draft", "launcher"]


@dataclass(frozen=True)
class Hook:
    """One row of the tables in `hooks.py`, `hooks_cpu.py` and `disagg/seams.py`."""

    target: str  # dotted path of the symbol in SGLang
    kind: Kind
    hook: str  # "module:attribute" of ours (a module for kind `module`), imported only where it is installed
    when: When
    why: str
    remove_when: str
    params: tuple[str, ...] = ()
    upstream: str = ""  # link to the upstream discussion, where there is one

    def load(self) -> Any:
        """Import and return our side of the hook."""
        module, _, attribute = self.hook.partition(":")
        found = importlib.import_module(module)
        return getattr(found, attribute) if attribute else found


@cache
def split_target(target: str) -> tuple[str, tuple[str, ...]]:
    """Split a dotted path into the module and the attributes within it.

    Modules of SGLang are lower case and its classes are not, so no import is needed to tell them apart.
    """
    parts = target.split(".")
    for i, part in enumerate(parts):
        if part[0].isupper():  # a class; module-level names are the last part
            return ".".join(parts[:i]), tuple(parts[i:])
    return ".".join(parts[:-1]), (parts[-1],)
