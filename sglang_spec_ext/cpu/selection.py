"""Whether this process runs on the CPU reference platform; importable without SGLang."""

import os

PLATFORM_NAME = "spec_ext_cpu"
ATTENTION_BACKEND = "torch_spec"


def selected() -> bool:
    """Return whether the environment asks for this platform by name."""
    return os.environ.get("SGLANG_PLATFORM") == PLATFORM_NAME


def activate() -> str | None:
    """Entry point `sglang.srt.platforms: spec_ext_cpu`: the class to use, or None to stay out of the way.

    An installed package must never take a machine with a GPU onto the CPU, so only the variable counts.
    """
    return "sglang_spec_ext.cpu.platform.CpuReferencePlatform" if selected() else None
