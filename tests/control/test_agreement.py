"""Ranks: equal decisions for any mix of idle, late, differing and perturbed ranks, step after step."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_spec_ext.control.agreement import (
    VOTE_WIDTH,
    absent_vote,
    reduce_votes,
    resolve,
    signature_of,
    vote,
)
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve
from sglang_spec_ext.control.settings import ControllerSettings
from sglang_spec_ext.records import BatchState, Decision, Mode, Reason, StepObservation

SIGNATURE = signature_of("table", "ladder")
FULL_K = 7
EMPTY = Decision(k=0, reason=Reason.EMPTY)


def decide(*decisions, cap=7):
    votes = [absent_vote(SIGNATURE) if d is None else vote(d, SIGNATURE, cap=cap) for d in decisions]
    return resolve(reduce_votes(votes), full_k=FULL_K)


def wish(k, **fields):
    return Decision(k=k, reason=Reason.BEST, **fields)


wishes = st.one_of(
    st.none(),
    st.just(EMPTY),
    st.builds(wish, st.sampled_from([0, 1, 3, 7])),
    st.builds(lambda b: wish(7, budget=b), st.integers(0, 100)),
    st.builds(lambda k: Decision(k=k, reason=Reason.PROBE, probe=True, wanted_k=0), st.sampled_from([1, 3])),
)


@given(st.lists(wishes, min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_the_result_does_not_depend_on_who_asks(ranks, random):
    agreed = decide(*ranks)
    shuffled = random.sample(ranks, len(ranks))
    assert decide(*shuffled) == agreed
    assert decide(*ranks, EMPTY) == agreed  # an idle rank is neutral
    if None in ranks:
        assert (agreed.k, agreed.budget, agreed.reason) == (FULL_K, None, Reason.RANK_ABSENT)
    elif all(d is EMPTY for d in ranks):
        assert agreed.reason is Reason.ALL_IDLE
    elif not any(d.probe for d in ranks):
        assert agreed.k == min(d.k for d in ranks if d is not EMPTY)
    assert all(isinstance(number, int) for number in vote(wish(3), SIGNATURE, cap=7))
    assert len(absent_vote(SIGNATURE)) == len(vote(EMPTY, SIGNATURE, cap=7)) == VOTE_WIDTH


def test_a_probe_needs_room_on_every_rank():
    probe = Decision(k=3, reason=Reason.PROBE, probe=True, wanted_k=0)
    assert decide(probe, wish(0), EMPTY).reason is Reason.PROBE
    votes = [vote(probe, SIGNATURE, cap=7), vote(wish(0), SIGNATURE, cap=1)]
    assert resolve(reduce_votes(votes), full_k=FULL_K).k == 0


def test_budgets_agree_on_the_smallest_and_uniform_is_neutral():
    assert decide(wish(7, budget=31), wish(7, budget=29), wish(7)).budget == 29
    assert decide(wish(7), wish(7)).budget is None
    assert decide(wish(7, budget=31), wish(0)).budget is None


def table(bias=1.0):
    tokens = Curve((1, 64, 256, 4096), tuple(s * bias for s in (0.010, 0.010, 0.013, 0.19)))
    draft = tuple((k, Curve((1, 999), (k * 0.0005,) * 2)) for k in (0, 1, 3, 7))
    return CostTable((ContextBucket(0, tokens, None, draft),))


def test_signatures_tell_tables_ladders_modes_and_pins_apart():
    settings_ = ControllerSettings(tiers=(0, 1, 3, 7), ranks=2)
    base = Controller(settings_, table())
    assert base.signature == Controller(settings_, table()).signature
    other_table = Controller(settings_, table(1.01))
    no_table = Controller(settings_, None)
    other_tiers = Controller(ControllerSettings(tiers=(0, 1, 7), ranks=2), table())
    pinned, shadow = Controller(settings_, table()), Controller(settings_, table())
    pinned.pin(3)
    shadow.set_mode(Mode.SHADOW)
    signatures = [c.signature for c in (base, other_table, no_table, other_tiers, pinned, shadow)]
    assert len(set(signatures)) == len(signatures)
    votes = [vote(wish(3), signature, cap=7) for signature in signatures[:2]]
    agreed = resolve(reduce_votes(votes), full_k=FULL_K)
    assert (agreed.k, agreed.reason) == (FULL_K, Reason.RANK_MISMATCH)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.integers(0, 1000), st.sampled_from([0.0, 0.02, 0.2]))
def test_ranks_with_uneven_loads_stay_together(seed, lateness):
    """Four controllers, each with its own load and luck: what runs is equal in every step."""
    rng = np.random.default_rng(seed)
    settings_ = ControllerSettings(tiers=(0, 1, 3, 7), ranks=4)
    ranks = [Controller(settings_, table()) for _ in range(4)]
    probes, moved = 0, []
    for step in range(400):
        loads = [int(rng.choice([0, 2, 40, 200])) if step % 50 == 0 or step == 0 else None for _ in ranks]
        if loads[0] is not None:
            current = loads
        states = [BatchState(step=step, num_reqs=load) for load in current]
        wishes_ = [rank.decide(state) for rank, state in zip(ranks, states, strict=True)]
        votes = [
            absent_vote(rank.signature)
            if rng.random() < lateness
            else vote(decision, rank.signature, cap=rank.cap(state))
            for rank, decision, state in zip(ranks, wishes_, states, strict=True)
        ]
        agreed = resolve(reduce_votes(votes), full_k=settings_.full_k)
        run = [rank.adopt(decision, agreed) for rank, decision in zip(ranks, wishes_, strict=True)]
        busy = [d for d, load in zip(run, current, strict=True) if load]
        assert len({(d.k, d.budget) for d in run if d.reason is not Reason.EMPTY}) <= 1
        probes += agreed.reason is Reason.PROBE
        if agreed.reason is None and busy:
            moved.append(agreed.k)
        for rank, load in zip(ranks, current, strict=True):
            if load:
                k = agreed.k
                accepted = np.minimum(rng.geometric(0.4, load) - 1, k)
                seconds = table().draft_s(k, load) + table().verify_s(load * (k + 1), load)
                rank.observe(StepObservation(step=step, k=k, accepted=accepted, step_s=seconds))
    assert probes <= 10
    assert len(set(moved)) >= 1
