"""The checks of `spec-ext doctor`: each says what it found, and on failure what to do.

Also the one place that holds a hook row against the installed SGLang (`hook_problem`), which the tests share.
"""

import importlib.metadata
import importlib.util
import inspect
import os
import sys
from dataclasses import dataclass

from sglang_spec_ext.cpu import selection
from sglang_spec_ext.hook import Hook, split_target
from sglang_spec_ext.hooks import HOOKS
from sglang_spec_ext.plugin import SUPPORTED_SGLANG

ENTRY_POINTS = {"sglang.srt.plugins": "spec_ext", "sglang.srt.platforms": "spec_ext_cpu"}
DISTRIBUTION = "sglang-spec-ext"
MIN_FREE_MEMORY_GIB = 4.0


@dataclass(frozen=True)
class Check:
    """One finding; `detail` names the cure when `ok` is False."""

    name: str
    ok: bool
    detail: str


def run_checks() -> list[Check]:
    """Run every check; a later one that needs a failed one says so instead of raising."""
    checks = [_python(), _torch(), _sglang()]
    checks += _plugin()
    if checks[2].ok:
        checks += [_hook(hook) for hook in HOOKS]
    checks += [_platform(), _models(), _memory()]
    return checks


def hook_problem(hook: Hook) -> str | None:
    """Return why a hook does not fit the installed SGLang, or None.

    Importing a target imports SGLang's module; a `module` row is only located, since importing it needs CUDA.
    """
    from sglang_spec_ext.hook_install import import_target

    if hook.kind == "module":
        try:
            found = importlib.util.find_spec(hook.target) is not None
        except ImportError as error:
            return f"{hook.target} cannot be located: {error!r}"
        return None if found else f"SGLang has no module {hook.target}"
    module, attributes = split_target(hook.target)
    try:
        target = import_target(hook.target)
    except (ImportError, AttributeError, KeyError) as error:
        return f"{'.'.join(attributes)} not found in {module}: {error!r}"
    if hook.kind == "assign":
        return None
    if isinstance(target, classmethod | staticmethod):
        target = target.__func__
    known = inspect.signature(inspect.unwrap(target)).parameters
    missing = [name for name in hook.params if name not in known]
    return f"parameters {missing} are gone; it takes {list(known)}" if missing else None


def _python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    return Check("python", good, version if good else f"{version}; install Python 3.11 or newer")


def _torch() -> Check:
    try:
        import torch
    except ImportError as error:
        return Check("torch", False, f"cannot be imported ({error}); pip install 'sglang-spec-ext[engine]'")
    return Check("torch", True, f"{torch.__version__}, CUDA {'available' if torch.cuda.is_available() else 'absent'}")


def _sglang() -> Check:
    try:
        found = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return Check("sglang", False, f"not installed; pip install sglang=={SUPPORTED_SGLANG}")
    good = found == SUPPORTED_SGLANG
    return Check("sglang", good, found if good else f"{found}; pip install sglang=={SUPPORTED_SGLANG}")


def _plugin() -> list[Check]:
    checks = []
    for group, name in ENTRY_POINTS.items():
        found = [entry for entry in importlib.metadata.entry_points(group=group) if entry.name == name]
        detail = f"{group}: {found[0].value}" if found else f"{group}: {name} is missing; pip install {DISTRIBUTION}"
        checks.append(Check(f"entry point {name}", len(found) == 1, detail))
    checks.append(_not_excluded())
    return checks


def _not_excluded() -> Check:
    """SGLang leaves out the plugin of a package whose platform is not the selected one, and unlisted plugins."""
    name = "plugin active"
    listed = os.environ.get("SGLANG_PLUGINS", "")
    if listed and not set(ENTRY_POINTS.values()) <= {item.strip() for item in listed.split(",")}:
        wanted = ",".join(ENTRY_POINTS.values())
        return Check(name, False, f"SGLANG_PLUGINS={listed} leaves it out; add {wanted} or unset it")
    platform = os.environ.get("SGLANG_PLATFORM", "")
    if platform and not selection.selected():
        return Check(
            name,
            False,
            f"SGLANG_PLATFORM={platform}: SGLang then skips the plugins of every other package with a platform; "
            "unset it where SGLang detects the device by itself",
        )
    return Check(name, True, "SGLang will load it")


def _hook(hook: Hook) -> Check:
    problem = hook_problem(hook)
    detail = f"{hook.kind}, {hook.when}" if problem is None else f"{problem}; this needs sglang=={SUPPORTED_SGLANG}"
    return Check(f"hook {hook.target.removeprefix('sglang.')}", problem is None, detail)


def _platform() -> Check:
    if selection.selected():
        return Check("platform", True, f"CPU reference platform (SGLANG_PLATFORM={selection.PLATFORM_NAME})")
    try:
        import torch

        accelerator = torch.cuda.is_available()
    except ImportError:
        accelerator = False
    if accelerator:
        return Check("platform", True, "CUDA")
    cure = f"export SGLANG_PLATFORM={selection.PLATFORM_NAME} to serve on the CPU"
    return Check("platform", False, f"no CUDA device and no platform selected; {cure}")


def _models() -> Check:
    from sglang_spec_ext.models import cache, smollm2

    folder = cache.home() / "models" / smollm2.NAME
    problem = cache.problem(folder, smollm2.RECIPE)
    if problem is None:
        return Check("demo model", True, str(folder))
    return Check("demo model", False, f"{folder}: {problem}; run `spec-ext models prepare smollm2`")


def _memory() -> Check:
    gib = _free_memory_gib()
    good = gib >= MIN_FREE_MEMORY_GIB
    detail = f"{gib:.1f} GiB free"
    return Check("free memory", good, detail if good else f"{detail}; an engine needs {MIN_FREE_MEMORY_GIB:.0f} GiB")


def _free_memory_gib() -> float:
    with open("/proc/meminfo", encoding="ascii") as lines:
        available = next(line for line in lines if line.startswith("MemAvailable"))
    return int(available.split()[1]) / 2**20  # kB to GiB
