"""One decision for all ranks: a vote is six integers, one minimum over the group decides.

Every rank of the full tensor-parallel group votes every step, idle ranks neutrally, on signals of a fixed
age. The worker reduces the vote with MIN over its process group (`int64[VOTE_WIDTH]`); what follows is a
pure function of the reduced numbers, so it is the same on every rank. Equal signatures (cost table, ladder,
mode) are shown by the minimum of s and of -s. A rank that cannot vote, or a group that does not match, runs
the fixed full width: slower than wanted, never a hang.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sglang_spec_ext.records import Decision, Reason

VOTE_WIDTH = 6  # k, budget, cap, -probed k, signature, -signature
NEUTRAL = 1 << 40  # above every K and budget
_ABSENT = -1


@dataclass(frozen=True, slots=True)
class Agreed:
    """What the whole group runs."""

    k: int
    budget: int | None
    reason: Reason | None  # None: the vote of every rank that has requests


def signature_of(*parts: str) -> int:
    """Return a positive 62-bit number from texts that must be equal on all ranks."""
    import hashlib  # here: OpenSSL is a good part of importing this package

    return int.from_bytes(hashlib.sha256("\0".join(parts).encode()).digest()[:8]) >> 2


def vote(decision: Decision, signature: int, *, cap: int) -> list[int]:
    """Return the vote for a decision; `cap` is the largest K this rank may run in this step.

    A decision for an empty batch is neutral.
    """
    if decision.reason is Reason.EMPTY:
        return [NEUTRAL, NEUTRAL, NEUTRAL, 0, signature, -signature]
    budget = NEUTRAL if decision.budget is None else decision.budget
    if decision.probe:
        assert decision.wanted_k is not None  # the K in use, from which the probe steps up
        return [decision.wanted_k, budget, cap, -decision.k, signature, -signature]
    return [decision.k, budget, cap, 0, signature, -signature]


def absent_vote(signature: int) -> list[int]:
    """Return the vote of a rank whose signal of the fixed age is missing: everybody runs the full width."""
    return [_ABSENT, NEUTRAL, NEUTRAL, 0, signature, -signature]


def reduce_votes(votes: Sequence[Sequence[int]]) -> list[int]:
    """Return the minimum of each column: what an all-reduce with MIN gives every rank."""
    return [min(column) for column in zip(*votes, strict=True)]


def resolve(reduced: Sequence[int], *, full_k: int) -> Agreed:
    """Return the group's decision from reduced votes; `full_k` is the fixed width's K, part of the signature.

    One rank that wants to probe makes all probe, if every rank may run that K.
    """
    k, budget, cap, negative_probe, signature, negative_signature = reduced
    if signature != -negative_signature:
        return Agreed(full_k, None, Reason.RANK_MISMATCH)
    if k == _ABSENT:
        return Agreed(full_k, None, Reason.RANK_ABSENT)
    if k == NEUTRAL:
        return Agreed(0, None, Reason.ALL_IDLE)
    if k < -negative_probe <= cap:
        return Agreed(-negative_probe, None, Reason.PROBE)
    return Agreed(k, None if budget == NEUTRAL or k == 0 else budget, None)


def require_full_group(group_size: int, tp_size: int) -> None:
    """Raise unless votes run over the full tensor-parallel group.

    With attention data parallelism the attention group may hold one rank: a vote on it agrees with itself.
    """
    if group_size != tp_size:
        raise ValueError(
            f"voting group: has {group_size} ranks, tensor parallelism {tp_size}; vote over the full TP group"
        )
