"""The entry point `sglang.srt.plugins: spec_ext`.

SGLang calls `register` in every process and only logs what it raises. What must not be survived therefore ends
the process: a `SystemExit` passes through, and `launch.require_proof` checks from outside that each scheduler
runs the extension.
"""

import sys

from sglang_spec_ext import errors, scratch

SUPPORTED_SGLANG = "0.5.23"


def register() -> None:
    """Install the hooks that this process needs: none without a flag of ours or the CPU platform."""
    from sglang_spec_ext import flags
    from sglang_spec_ext.cpu import selection

    chosen = flags.active_config()
    wanted = _wanted(
        on_cpu=selection.selected(),
        active=chosen is not None,
        records=chosen is not None and chosen.pd_transport != "off",
    )
    if not wanted:
        return
    errors.show_plainly()
    _require_version()
    scratch.avoid_named_semaphores()
    if "launcher" in wanted:
        scratch.use()
    from sglang_spec_ext.hook_install import install
    from sglang_spec_ext.hooks import HOOKS

    if "cpu" in wanted:
        from sglang_spec_ext.cpu.arguments import register_attention_backend
        from sglang_spec_ext.cpu.layers import register_forwards
        from sglang_spec_ext.cpu.process import prepare_process

        prepare_process()
        register_attention_backend()
        register_forwards()
    install(hook for hook in HOOKS if hook.when in wanted)


def _wanted(*, on_cpu: bool, active: bool, records: bool) -> set[str]:
    wanted = set()
    if on_cpu:
        wanted |= {"cpu", "draft"}
    if active:
        wanted |= {"active", "draft"}
    if records:
        wanted.add("pd")
    if _may_hold_flags(sys.argv[1:]):
        wanted.add("flags")
    if wanted and scratch.is_launcher():
        wanted.add("launcher")
    return wanted


def _may_hold_flags(argv: list[str]) -> bool:
    """Return whether a command line may hold our flags: in itself, in a --config file, or to print its help."""
    return any(arg.startswith(("--spec-ext-", "--config")) or arg in ("-h", "--help") for arg in argv)


def _require_version() -> None:
    from importlib.metadata import version

    found = version("sglang")
    if found != SUPPORTED_SGLANG:
        raise errors.Fatal(
            f"sglang {found} is installed, but this version supports exactly "
            f"{SUPPORTED_SGLANG}; install sglang=={SUPPORTED_SGLANG}, or start without --spec-ext-* flags"
        )
