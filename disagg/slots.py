"""Slots of a fixed pool, each with an owner and a generation.

A slot is handed out once at a time; each hand-out has a generation of its own, so that a row left by an
earlier owner is told from the current one's. Exhaustion is back-pressure: `acquire` returns None. Giving back
a slot twice, or somebody else's, raises and changes nothing. Pure; one thread owns an allocator.
"""

import logging
from collections import deque
from dataclasses import dataclass

logger = logging.getLogger("sglang.spec_ext.disagg")

GENERATION_LIMIT = 2**32  # the header field is 32 bits wide; 0 means "none"


class SlotError(ValueError):
    """A slot was given back, or used, by somebody who does not hold it."""


@dataclass(frozen=True)
class SlotLease:
    """The right to use `slot` until it is released: `owner` holds generation `generation` of it."""

    slot: int
    owner: int
    generation: int


class SlotAllocator:
    """Hands out the slots 0 .. `capacity` - 1, the longest-free first (late writes hit an idle slot).

    `first_generation` (1 .. 2^32 - 1) should be drawn at random by a process that may be restarted, so that
    its rows differ from those of its predecessor.
    """

    def __init__(self, capacity: int, *, first_generation: int = 1) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        if not 1 <= first_generation < GENERATION_LIMIT:
            limit = GENERATION_LIMIT - 1
            raise ValueError(f"first_generation must be from 1 to {limit}, got {first_generation}")
        self.capacity = capacity
        self._free = deque(range(capacity))
        self._held: dict[int, SlotLease] = {}
        self._next_generation = first_generation

    @property
    def num_free(self) -> int:
        """Slots that `acquire` could hand out now."""
        return len(self._free)

    def acquire(self, owner: int) -> SlotLease | None:
        """Lease the longest-free slot to `owner` (a bootstrap room), or return None when all are taken."""
        if not self._free:
            return None
        lease = SlotLease(self._free.popleft(), owner, self._next_generation)
        self._next_generation = self._next_generation % (GENERATION_LIMIT - 1) + 1
        self._held[lease.slot] = lease
        return lease

    def release(self, lease: SlotLease) -> None:
        """Give the slot back; raises SlotError if `lease` is not the current one of its slot."""
        held = self.holder(lease.slot)
        if held != lease:
            now = "free" if held is None else f"held by owner {held.owner}, generation {held.generation}"
            raise SlotError(
                f"slot {lease.slot} is not for owner {lease.owner}, generation {lease.generation} to "
                f"release: it is {now}; release each lease exactly once"
            )
        del self._held[lease.slot]
        self._free.append(lease.slot)

    def holder(self, slot: int) -> SlotLease | None:
        """Return the current lease of `slot`, or None when it is free; raises SlotError out of range."""
        if not 0 <= slot < self.capacity:
            raise SlotError(f"slot must be from 0 to {self.capacity - 1}, got {slot}")
        return self._held.get(slot)

    def leases_of(self, owner: int) -> tuple[SlotLease, ...]:
        """Return every lease that `owner` holds, to release them when a request ends for any reason."""
        return tuple(lease for lease in self._held.values() if lease.owner == owner)


class CheckedIndexAllocator:
    """Stands for SGLang's ReqToMetadataIdxAllocator: the same interface, with each slot's holder checked.

    SGLang's appends whatever index it is given: a slot freed twice then has two owners, and each reads the
    other's draft state. Here such a call is counted, logged and changes nothing.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.errors = 0
        self._slots = SlotAllocator(size)
        self._leases: dict[int, SlotLease] = {}

    def available_size(self) -> int:
        """Return how many slots `alloc` could hand out now."""
        return self._slots.num_free

    def alloc(self) -> int | None:
        """Return a free slot, None when all are taken."""
        lease = self._slots.acquire(owner=0)
        if lease is None:
            return None
        self._leases[lease.slot] = lease
        return lease.slot

    def free(self, free_index: int) -> None:
        """Give a slot back."""
        lease = self._leases.pop(free_index, None)
        if lease is None:
            self.errors += 1
            logger.error("metadata slot %r was freed but is not held; ignored (%d so far)", free_index, self.errors)
            return
        self._slots.release(lease)
