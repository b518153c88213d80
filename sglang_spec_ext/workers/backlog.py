"""What steps at K = 0 still owe the draft: rows that are written in one pass over several tokens.

A draft whose K/V miss a token drafts badly for the rest of a request, so even a step that drafts nothing has to
write that token's draft K/V: for EAGLE a pass of the draft model, for DFLASH and DSPARK a projection of the target's
hidden state. A pass over eight tokens costs little more than one over a single token, so the rows wait.

They are written before anything but a step at K = 0 of the same requests runs. So nothing reads draft K/V that is
not there, and a slot which was freed and given out again is written by its new owner after us, not before: between
two forwards nobody writes draft K/V. Where somebody does (`others_write`), each step pays at once. SGLang sets the
same bounds for its one-step form (speculative/dspark_components/dspark_deferred_commit.py).
"""

from collections.abc import Sequence
from typing import Any

import torch

STEPS = 8  # rows held: batch x steps x hidden width on the device, and the longest catching up

Row = tuple[torch.Tensor, ...]


class Backlog:
    """Rows of steps in a row at K = 0 of the same requests."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity  # steps
        self.reqs: Sequence[Any] = ()  # of the step about to run, and of the rows
        self.rows: list[Row] = []
        self.deferred = 0  # steps whose rows waited
        self.passes = 0  # times that rows were written

    def takes(self, reqs: Sequence[Any]) -> bool:
        """Return whether the rows of a step of these requests may join."""
        return not self.rows or (len(self.rows) < self.capacity and self.reqs == reqs)

    def expect(self, reqs: Sequence[Any]) -> None:
        """Say whose step runs next; rows of others must have been taken."""
        self.reqs = reqs

    def add(self, *row: torch.Tensor) -> None:
        """Keep copies of a step's tensors, one row a request: SGLang and its graphs reuse their buffers each step."""
        self.rows.append(tuple(part.clone() for part in row))
        self.deferred += 1

    def take(self) -> list[Row]:
        """Return the rows, oldest step first, and hold none."""
        rows, self.rows = self.rows, []
        self.passes += bool(rows)
        return rows

    def drop(self) -> None:
        """Forget the rows: their slots hold nothing any more, or the same step runs again."""
        self.rows = []

    def snapshot(self) -> dict[str, int]:
        """Plain facts for /server_info."""
        return {"capacity": self.capacity, "deferred_steps": self.deferred, "passes": self.passes}


def joined(rows: list[Row]) -> Row:
    """Return the tensors of all rows, each over all steps."""
    return tuple(torch.cat(parts) for parts in zip(*rows, strict=True))


def others_write() -> bool:
    """Return whether draft K/V is written or moved between two forwards of a worker, or written by ranks together."""
    from sglang.srt.runtime_context import get_disagg, get_memory, get_parallel

    memory = get_memory()
    return bool(
        get_disagg().disaggregation_mode != "null"  # transfers write into slots that were just freed
        or memory.enable_hierarchical_cache
        or memory.hicache_storage_backend is not None
        or memory.enable_unified_memory
        or get_parallel().attn_dp_enabled  # its ranks run each draft pass together
    )
