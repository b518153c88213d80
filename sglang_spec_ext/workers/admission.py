"""When a waiting request gets a free slot: at once, as without speculation.

For the DFLASH family SGLang holds prefills back until a sixth of the slots is free (two to four of them), to admit
several at a time. A controller that chooses K = 0 would then still lose to no speculation by the slots that stay empty:
with sixteen, and sixteen requests in flight, a twentieth of the batch on the CPU platform, where a prefill of three
prompts costs three times one.
"""

from collections.abc import Callable

from sglang_spec_ext import flags


def admit_at_once(
    original: Callable[..., int | None],
    user_value: int | None,
    max_running_requests: int,
    is_dflash_family: bool = False,
) -> int | None:
    """Around `resolve_min_free_slots`: free slots that prefills wait for, or None; `--min-free-slots-delay` wins."""
    chosen = flags.active_config()
    acts = chosen is not None and chosen.mode == "adaptive"
    return original(user_value, max_running_requests, is_dflash_family=is_dflash_family and not acts)
