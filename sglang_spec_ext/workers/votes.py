"""The one small collective of a step: the minimum of every rank's vote.

It runs over the full tensor-parallel group on the host, beside SGLang's device collectives: with attention
data parallelism the attention group may hold one rank, and a vote on it agrees with itself.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_spec_ext.control.agreement import VOTE_WIDTH, require_full_group


class Ranks(Protocol):
    """The ranks that must decide alike."""

    size: int
    is_first: bool
    independent: bool  # each has requests of its own, or none, and is told of a change of mode when it is told

    def minimum(self, vote: Sequence[int]) -> list[int]:
        """Return the minimum over all ranks of each of the VOTE_WIDTH numbers."""

    def first(self, value: Any) -> Any:
        """Return the value of the first rank."""


class OneRank:
    """Nothing to agree on."""

    size = 1
    is_first = True
    independent = False

    def minimum(self, vote: Sequence[int]) -> list[int]:
        """See Ranks."""
        return list(vote)

    def first(self, value: Any) -> Any:
        """See Ranks."""
        return value


class GroupRanks:
    """Ranks of SGLang's tensor-parallel group, over its host group (gloo)."""

    def __init__(self, group: Any, tp_size: int, *, independent: bool) -> None:
        import torch

        require_full_group(group.world_size, tp_size)
        self.size: int = group.world_size
        self.is_first: bool = group.rank_in_group == 0
        self.independent = independent
        self._group = group
        self._buffer = torch.zeros(VOTE_WIDTH, dtype=torch.int64)

    def minimum(self, vote: Sequence[int]) -> list[int]:
        """See Ranks."""
        import torch
        from torch.distributed import ReduceOp, all_reduce

        self._buffer.copy_(torch.tensor(vote, dtype=torch.int64))
        all_reduce(self._buffer, op=ReduceOp.MIN, group=self._group.cpu_group)
        return [int(number) for number in self._buffer.tolist()]

    def first(self, value: Any) -> Any:
        """See Ranks."""
        return self._group.broadcast_object(value, src=0)


def ranks_of(group: Any, tp_size: int, *, independent: bool = False) -> Ranks:
    """Return the ranks of a tensor-parallel group; `independent` with attention data parallelism."""
    return GroupRanks(group, tp_size, independent=independent) if tp_size > 1 else OneRank()
