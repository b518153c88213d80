"""`Engine`: SGLang's in-process engine with the extension switched on."""

from typing import Any

from sglang_spec_ext import flags, launch
from sglang_spec_ext.config import SpecExtConfig


def Engine(*, spec_ext: SpecExtConfig | None = None, **kwargs: Any) -> Any:  # noqa: N802 - a drop-in for sgl.Engine
    """Start `sglang.Engine(**kwargs)` with `spec_ext`; without it this is SGLang's engine untouched.

    The configuration reaches the processes that the engine starts and no others.
    """
    import sglang

    chosen = spec_ext or SpecExtConfig()
    if chosen.mode == "off":
        with flags.exported(None):
            return sglang.Engine(**kwargs)
    with flags.exported(chosen), launch.ragged_mode_restored():
        launch.activate(
            chosen,
            algorithm=_argument(kwargs, "speculative_algorithm", None),
            disaggregation_mode=_argument(kwargs, "disaggregation_mode", "null"),
            attention_dp=_argument(kwargs, "enable_dp_attention", False),
        )
        return sglang.Engine(**kwargs)


def _argument(kwargs: dict[str, Any], name: str, default: Any) -> Any:
    """Return a server argument that `sglang.Engine(**kwargs)` will run with."""
    given = kwargs.get("server_args")
    return getattr(given, name) if given is not None else kwargs.get(name, default)
