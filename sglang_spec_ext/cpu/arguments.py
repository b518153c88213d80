"""Start-up checks of SGLang that ask for a device by name where the platform should answer.

Stands around `arg_groups/platform_hook.py: handle_cpu_backends`,
`arg_groups/speculative_hook.py: _handle_dspark` and
`speculative/draft_utils.py: DraftBackendFactory._create_backend`; registers the attention back end.
"""

from collections.abc import Callable
from typing import Any

from sglang_spec_ext.cpu.selection import ATTENTION_BACKEND


def register_attention_backend() -> None:
    """Make `torch_spec` a name that SGLang's flags and attention registry know."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend as register
    from sglang.srt.server_args import add_attention_backend_choices, add_draft_attention_backend_choices

    add_attention_backend_choices([ATTENTION_BACKEND])
    add_draft_attention_backend_choices([ATTENTION_BACKEND])

    @register(ATTENTION_BACKEND)
    def create(runner: Any) -> Any:
        from sglang_spec_ext.cpu.attention import TorchSpecAttention

        return TorchSpecAttention(runner)


def choose_backends(original: Callable[[Any], None], server_args: Any) -> None:
    """Default to what runs here before upstream's CPU defaults, of which attention needs a kernel library."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    view = resolving_view(server_args)
    if view.attention_backend is None:
        declare_resolution(server_args, "spec_ext_cpu", attention_backend=ATTENTION_BACKEND)
    if view.disaggregation_decode_retraction_backup is None:  # upstream's choice pins memory through CUDA
        declare_resolution(server_args, "spec_ext_cpu", disaggregation_decode_retraction_backup="cpu_tensor")
    original(server_args)


class _AcceptedDevice:
    """A view of the resolved arguments that names a device which an algorithm's check lets through."""

    def __init__(self, view: Any, device: str) -> None:
        self._view, self._device = view, device

    def __getattr__(self, name: str) -> Any:
        return self._device if name == "device" else getattr(self._view, name)


def allow_dspark(original: Callable[[Any], None], server_args: Any) -> None:
    """Run DSPARK's argument check on `xpu`, where it takes the torch branches."""
    _check_as("xpu", original, server_args)


def allow_dflash(original: Callable[[Any], None], server_args: Any) -> None:
    """Run DFLASH's argument check on `cuda`: it allows attention data parallelism there, and asks for nothing else."""
    _check_as("cuda", original, server_args)


def _check_as(device: str, original: Callable[[Any], None], server_args: Any) -> None:
    from sglang.srt.arg_groups import speculative_hook

    resolving_view = speculative_hook.resolving_view
    speculative_hook.resolving_view = lambda record: _AcceptedDevice(resolving_view(record), device)
    try:
        original(server_args)
    finally:
        speculative_hook.resolving_view = resolving_view


def add_draft_backend(
    original: Callable[..., Any],
    factory: Any,
    backend_name: str,
    backend_map: dict[str, Callable[[], tuple[str, Any]]],
    error_template: str,
    stamps_children: bool = False,
) -> Any:
    """Add `torch_spec` to the factory's map of draft back ends."""
    from sglang_spec_ext.cpu.attention import TorchSpecAttention, TorchSpecMultiStepDraft

    def create() -> tuple[str, Any]:
        runner = factory.draft_model_runner
        if stamps_children:
            return ATTENTION_BACKEND, TorchSpecMultiStepDraft(runner, factory.topk, factory.speculative_num_steps)
        return ATTENTION_BACKEND, TorchSpecAttention(runner)

    return original(factory, backend_name, {**backend_map, ATTENTION_BACKEND: create}, error_template, stamps_children)
