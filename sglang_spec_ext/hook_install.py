"""Installs hooks where their targets run, and nowhere else.

SGLang's `HookRegistry` resolves a target by importing its module, in every process: with the targets of this
project that cost 5 s and 350 MB a process. Here a hook is registered at once when its module is already
imported, and otherwise in the moment the module has been imported. A hook that cannot be applied ends the
process: SGLang would log the failure and serve without it.
"""

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from sglang_spec_ext.errors import Fatal
from sglang_spec_ext.hook import Hook, split_target


def install(hooks: Iterable[Hook]) -> None:
    """Install each hook now or when its module is imported; a hook that is installed already is left alone."""
    waiting: dict[str, list[Hook]] = {}
    for hook in hooks:
        if hook in _installed:
            continue
        _installed.append(hook)
        if hook.kind == "module":
            _substitute(hook)
            continue
        waiting.setdefault(split_target(hook.target)[0], []).append(hook)
    for module in list(waiting):
        if module in sys.modules:
            _apply(waiting.pop(module))
    if waiting:
        sys.meta_path.insert(0, _AfterImport(waiting))


def installed() -> tuple[Hook, ...]:
    """Return every hook that this process installed or will install on import."""
    return tuple(_installed)


_installed: list[Hook] = []
_MISSING = "the installed SGLang has no {target}, which a hook needs. Run `spec-ext doctor`."


def _apply(hooks: Sequence[Hook]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    wrapped = []
    for hook in hooks:
        try:
            ours = hook.load()
        except Exception as error:
            raise Fatal(f"hook on {hook.target} failed to load: {error!r}") from error
        if hook.kind == "assign":
            module, (name,) = split_target(hook.target)
            if not hasattr(sys.modules[module], name):
                raise Fatal(_MISSING.format(target=hook.target))
            # not through the registry, which would rebind every other name that holds the same object (None)
            setattr(sys.modules[module], name, ours)
        else:
            HookRegistry.register(hook.target, ours, HookType(hook.kind))
            wrapped.append(hook.target)
    HookRegistry.apply_hooks()
    for target in wrapped:
        if target not in HookRegistry._patched:  # apply_hooks only logs a failure
            raise Fatal(_MISSING.format(target=target))


def _substitute(hook: Hook) -> None:
    """Put our module in the place of one that cannot be imported on this platform."""
    if hook.target in sys.modules:
        raise Fatal(f"module {hook.target} was imported before it could be substituted")
    sys.modules[hook.target] = hook.load()


class _AfterImport(MetaPathFinder):
    """Finds a waiting module with the ordinary finders and applies its hooks right after it ran."""

    def __init__(self, waiting: dict[str, list[Hook]]) -> None:
        self.waiting = waiting

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return None
        spec.loader = _HookedLoader(spec.loader, self.waiting.pop(fullname))
        return spec


class _HookedLoader(Loader):
    """Runs a module and then applies the hooks that waited for it."""

    def __init__(self, loader: Any, hooks: list[Hook]) -> None:
        self.loader = loader
        self.hooks = hooks

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)  # type: ignore[no-any-return]

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        _apply(self.hooks)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)


def import_target(dotted: str) -> Any:
    """Import the module of a target and return the object that the dotted path names."""
    module, attributes = split_target(dotted)
    found: Any = importlib.import_module(module)
    for attribute in attributes:
        found = found.__dict__[attribute] if isinstance(found, type) else getattr(found, attribute)
    return found
