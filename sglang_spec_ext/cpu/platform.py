"""The platform class that SGLang uses for `SGLANG_PLATFORM=spec_ext_cpu`.

Interface: `sglang/srt/platforms/interface.py`. The rest of the platform is hooks (`sglang_spec_ext/hooks_cpu.py`).
"""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_spec_ext.cpu.cache_locs import extend_cache_locs
from sglang_spec_ext.cpu.refusals import ALGORITHMS, refuse_unserved
from sglang_spec_ext.cpu.selection import ATTENTION_BACKEND
from sglang_spec_ext.errors import Fatal
from sglang_spec_ext.hook_install import installed

DEFAULT_MAX_TOTAL_TOKENS = 32768
DEFAULT_MEM_FRACTION = 0.7


class CpuReferencePlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU without compiled kernels: every fused op takes its `native` forward and nothing is captured."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    capabilities = PlatformCapabilities()
    serves_margin_budgets = True  # the workers of DFLASH and EAGLE ask: their packed verify is tried here alone

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Refuse by name what this platform does not serve; bound the K/V pool unless the user did.

        SGLang sizes the pool from free memory, which on a laptop is everybody's.
        """
        refuse_unserved(server_args)
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = DEFAULT_MAX_TOTAL_TOKENS
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = DEFAULT_MEM_FRACTION

    def post_load_model(self, model: torch.nn.Module) -> None:
        """Stop a worker whose process did not load the plugin: nothing of what follows would be served right."""
        if not installed():
            raise Fatal(
                "the CPU reference platform runs without its plugin in this process: loading it failed (see the "
                "first error of this log), or SGLANG_PLUGINS leaves spec_ext out. Run `spec-ext doctor`."
            )

    def get_default_attention_backend(self) -> str:
        """Return the only attention back end of this platform."""
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        """Return the same back end for every draft."""
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        """Return whether the algorithm is served; the others are refused by SGLang, by name."""
        return algorithm in ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        """Return whether the draft may use `backend`."""
        return backend == ATTENTION_BACKEND

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        """Return the gather of verify slots."""
        return extend_cache_locs

    def get_dispatch_key_name(self) -> str:
        """Fused ops run `forward_native`."""
        return "native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        """There is no device to pin memory for."""
        return False

    def get_torch_profiler_activity_str(self) -> str:
        """Name of the profiler activity."""
        return "CPU"

    def get_torch_profiler_activity(self) -> Any:
        """Profiler activity."""
        return torch.profiler.ProfilerActivity.CPU
