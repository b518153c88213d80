"""Trials: a K whose size was never measured is run for a dwell where that could pay, and only there."""

import numpy as np
import pytest

from sglang_spec_ext.control.agreement import reduce_votes, resolve, vote
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve
from sglang_spec_ext.control.live_cost import SURPRISE_STEPS, LiveCost
from sglang_spec_ext.control.settings import ControllerSettings
from sglang_spec_ext.control.tiers import Score
from sglang_spec_ext.control.trial import PAUSE_STEPS, Trials
from sglang_spec_ext.records import BatchState, Mode, Reason, StepObservation

REQS = 16
TIERS = (0, 1, 3)
TRUTH = {0: 0.20, 1: 0.32, 3: 0.50}  # seconds of a step; at acceptance 0.4 no drafts are best, by an eighth


def table(**wrong: float) -> CostTable:
    """The truth as a profile of three sizes gives it, but for a factor on some: table(k0=1.2)."""
    seconds = [TRUTH[k] * wrong.get(f"k{k}", 1.0) for k in TIERS]
    drafting = Curve((1, 999), (1e-6, 1e-6))
    sizes = tuple(REQS * (k + 1) for k in TIERS)
    return CostTable((ContextBucket(0, Curve(sizes, tuple(seconds)), None, tuple((k, drafting) for k in TIERS)),))


def drive(controller, steps, *, start=0, alpha=0.4, noise=0.01, **batch):
    """Run steps; return the K of each and the reasons."""
    rng = np.random.default_rng(start)
    ks, reasons = [], []
    for step in range(start, start + steps):
        decision = controller.decide(BatchState(step=step, num_reqs=REQS, **batch))
        accepted = np.minimum(np.cumprod(rng.random((REQS, TIERS[-1])) < alpha, axis=1).sum(1), decision.k)
        step_s = TRUTH[decision.k] * float(np.exp(noise * rng.standard_normal()))
        controller.observe(StepObservation(step=step, k=decision.k, accepted=accepted, step_s=step_s))
        ks.append(decision.k)
        reasons.append(decision.reason)
    return ks, reasons


def test_a_k_that_the_profile_calls_too_dear_is_found():
    controller = Controller(ControllerSettings(tiers=TIERS), table(k0=1.2))
    ks, reasons = drive(controller, 200)
    assert Reason.TRIAL in reasons
    began = reasons.index(Reason.TRIAL)
    assert set(ks[16:began]) == {1}  # by the profile it is the best
    assert set(ks[-50:]) == {0}


def test_a_trial_that_finds_nothing_ends_with_its_dwell_and_is_not_soon_repeated():
    controller = Controller(ControllerSettings(tiers=TIERS), table(k1=0.92))
    ks, reasons = drive(controller, 100, alpha=0.45)
    tried = [step for step, reason in enumerate(reasons) if reason is Reason.TRIAL]
    for begun in tried:
        dwell = ks[begun : begun + 17]
        assert len(set(dwell[:16])) == 1
    assert controller.trials.begun == len(tried) <= 2
    _, later = drive(controller, PAUSE_STEPS - 100, start=100, alpha=0.45)
    assert Reason.TRIAL not in later


def test_pauses_between_trials_of_one_size_double():
    cost, trials = LiveCost(table()), Trials()
    batch, current, other = BatchState(step=0, num_reqs=REQS), Score(1, 20.0, 0.3), Score(0, 16.0, 0.25)
    for _ in range(SURPRISE_STEPS):
        assert trials.pick(0, batch, current, [other], cost) is None  # what is in use is not known itself
        cost.observe(k=1, tokens=2 * REQS, batch=REQS, step_s=TRUTH[1])
    picked = [step for step in range(2000) if trials.pick(step, batch, current, [other], cost) == 0]
    assert np.diff(picked).tolist() == [PAUSE_STEPS, 2 * PAUSE_STEPS, 4 * PAUSE_STEPS, 8 * PAUSE_STEPS]


def test_out_of_reach_is_not_tried():
    controller = Controller(ControllerSettings(tiers=TIERS), table())
    ks, reasons = drive(controller, 300, alpha=0.05)
    assert Reason.TRIAL not in reasons
    assert set(ks[32:]) - {0} == set() or reasons.count(Reason.PROBE) == sum(k > 0 for k in ks[32:])


@pytest.mark.parametrize("why", ["shadow", "pinned", "prompts share the step"])
def test_nothing_is_tried_where_it_would_not_run_or_not_be_seen(why):
    shadow = why == "shadow"
    mode = Mode.SHADOW if shadow else Mode.ADAPTIVE
    controller = Controller(ControllerSettings(tiers=TIERS, mode=mode), table(k0=1.2))
    if why == "pinned":
        controller.pin(1)
    # in shadow mode only the full width is measured: where it is best, with another K close behind
    alpha, prompts = 0.78 if shadow else 0.4, 1 if why.startswith("prompts") else 0
    _, reasons = drive(controller, 200, alpha=alpha, prefill_tokens=prompts)
    assert Reason.TRIAL not in reasons
    assert controller.trials.begun == 0


def test_ranks_try_together():
    settings = ControllerSettings(tiers=TIERS, ranks=2)
    ranks = [Controller(settings, table(k0=1.2)) for _ in range(2)]
    rng = np.random.default_rng(0)
    ks = []
    for step in range(200):
        batch = BatchState(step=step, num_reqs=REQS)
        wishes = [rank.decide(batch) for rank in ranks]
        votes = [vote(w, rank.signature, cap=rank.cap(batch)) for w, rank in zip(wishes, ranks, strict=True)]
        agreed = resolve(reduce_votes(votes), full_k=TIERS[-1])
        runs = [rank.adopt(wish, agreed) for rank, wish in zip(ranks, wishes, strict=True)]
        assert runs[0].k == runs[1].k
        accepted = np.minimum(np.cumprod(rng.random((REQS, TIERS[-1])) < 0.4, axis=1).sum(1), runs[0].k)
        for rank in ranks:  # each has its own clock
            step_s = TRUTH[runs[0].k] * float(np.exp(0.01 * rng.standard_normal()))
            rank.observe(StepObservation(step=step, k=runs[0].k, accepted=accepted, step_s=step_s))
        ks.append(runs[0].k)
    assert set(ks[-50:]) == {0}
