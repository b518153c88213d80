"""The slot allocator against a model: no leak, no double free, no foreign free, generations never repeat."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from sglang_spec_ext.disagg.slots import GENERATION_LIMIT, SlotAllocator, SlotError, SlotLease

CAPACITY = 4


class SlotMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.slots = SlotAllocator(CAPACITY, first_generation=GENERATION_LIMIT - 6)  # wraps within a run
        self.held = {}
        self.past = []
        self.generations = []

    @rule(owner=st.integers(0, 3))
    def acquire(self, owner):
        lease = self.slots.acquire(owner)
        if len(self.held) == CAPACITY:
            assert lease is None
            return
        assert lease.slot not in self.held
        assert lease.owner == owner
        assert 1 <= lease.generation < GENERATION_LIMIT
        self.held[lease.slot] = lease
        self.generations.append(lease.generation)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        lease = self.held.pop(data.draw(st.sampled_from(sorted(self.held))))
        self.slots.release(lease)
        self.past.append(lease)

    @precondition(lambda self: self.past)
    @rule(data=st.data())
    def release_again(self, data):
        with pytest.raises(SlotError, match="to release: it is"):
            self.slots.release(data.draw(st.sampled_from(self.past)))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), other=st.integers(4, 9))
    def release_by_stranger(self, data, other):
        lease = self.held[data.draw(st.sampled_from(sorted(self.held)))]
        with pytest.raises(SlotError, match=f"held by owner {lease.owner}"):
            self.slots.release(SlotLease(lease.slot, other, lease.generation))

    @rule(slot=st.sampled_from([-1, CAPACITY, 10**9]))
    def release_out_of_range(self, slot):
        with pytest.raises(SlotError, match="slot must be from 0"):
            self.slots.release(SlotLease(slot, 0, 1))

    @invariant()
    def counts_and_holders_agree(self):
        assert self.slots.num_free == CAPACITY - len(self.held)
        for slot in range(CAPACITY):
            assert self.slots.holder(slot) == self.held.get(slot)
        for owner in range(4):
            assert set(self.slots.leases_of(owner)) == {x for x in self.held.values() if x.owner == owner}
        assert len(set(self.generations)) == len(self.generations)


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_freed_slot_is_the_last_to_be_handed_out_again():
    slots = SlotAllocator(3)
    first = slots.acquire(1)
    slots.release(first)
    assert [slots.acquire(owner).slot for owner in (2, 3, 4)] == [1, 2, 0]
    assert slots.acquire(5) is None


@pytest.mark.parametrize(("capacity", "generation"), [(0, 1), (4, 0), (4, GENERATION_LIMIT)])
def test_wrong_sizes_are_refused(capacity, generation):
    with pytest.raises(ValueError, match="must be"):
        SlotAllocator(capacity, first_generation=generation)
