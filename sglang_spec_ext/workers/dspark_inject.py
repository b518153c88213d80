"""DSPARK's projection of the target's hidden states into the draft's K/V, left to the backlog."""

from typing import Any

import torch

from sglang_spec_ext.workers.backlog import Backlog


class DeferringInjector:
    """Takes the place of SGLang's TargetHiddenKvInjector in steps at K = 0, which commit every token they verify."""

    def __init__(self, injector: Any, backlog: Backlog) -> None:
        self._injector = injector
        self._backlog = backlog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._injector, name)

    def inject_target_hidden(
        self, *, target_hidden: torch.Tensor, cache_loc: torch.Tensor, positions: torch.Tensor, **_: Any
    ) -> None:
        """Keep the hidden states [R, H] of a step for a later pass."""
        self._backlog.add(target_hidden[: len(positions)], cache_loc, positions)
