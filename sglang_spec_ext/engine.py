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
    with flags.exported(chosen):
        launch.activate(chosen, disaggregation_mode=_disaggregation_mode(kwargs))
        return sglang.Engine(**kwargs)


def _disaggregation_mode(kwargs: dict[str, Any]) -> str:
    """Return the mode that `sglang.Engine(**kwargs)` will run in."""
    given = kwargs.get("server_args")
    mode: str = given.disaggregation_mode if given is not None else kwargs.get("disaggregation_mode", "null")
    return mode
