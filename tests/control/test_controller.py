"""The controller under arbitrary loads: ladder, dwell, recovery; and what a person or an engine asks of it."""

import json
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_spec_ext.control.agreement import reduce_votes, resolve, vote
from sglang_spec_ext.control.calibration import MarginEstimator, TemperatureScaling
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve
from sglang_spec_ext.control.hysteresis import Hysteresis, HysteresisSettings
from sglang_spec_ext.control.ladder import from_vllm_table
from sglang_spec_ext.control.probe import Probe, ProbeSettings
from sglang_spec_ext.control.settings import ControllerSettings, Verify
from sglang_spec_ext.control.verify import allocate, survival_of
from sglang_spec_ext.records import BatchState, Mode, Reason, StepObservation

TIERS = (0, 1, 3, 5, 7)
DWELL = 8
TABLE = CostTable(
    (
        ContextBucket(
            0,
            Curve((1, 64, 256, 4096), (0.010, 0.010, 0.013, 0.19)),
            None,
            tuple((k, Curve((1, 1024), (k * 0.0005,) * 2)) for k in TIERS),
        ),
    )
)
LADDER = from_vllm_table([[1, 8, 7], [9, 32, 3], [33, 64, 1], [65, 999, 0]], max_k=7)


class Engine:
    """Feeds a controller with what a step of the given load would report."""

    def __init__(self, controller, seed=0):
        self.controller = controller
        self.rng = np.random.default_rng(seed)
        self.step = 0

    def run(self, reqs, alpha, steps=1, *, slow=1.0, **batch):
        for _ in range(steps):
            decision = self.controller.decide(BatchState(step=self.step, num_reqs=reqs, **batch))
            k = decision.k
            accepted = np.cumprod(self.rng.random((reqs, max(k, 1))) < alpha, axis=1).sum(1)
            seconds = TABLE.draft_s(k, reqs) + TABLE.verify_s(reqs * (k + 1), reqs)
            self.controller.observe(
                StepObservation(
                    step=self.step,
                    k=k,
                    accepted=np.minimum(accepted, k),
                    step_s=seconds * slow,
                    **batch_classes(batch),
                )
            )
            self.step += 1
        return decision


def batch_classes(batch):
    return {"classes": batch["classes"]} if "classes" in batch else {}


def best_k(reqs, alpha):
    def rate(k):
        tokens = sum(alpha**j for j in range(k + 1))
        return tokens / (TABLE.draft_s(k, reqs) + TABLE.verify_s(reqs * (k + 1), reqs))

    return max(TIERS, key=rate), rate


loads = st.tuples(
    st.integers(1, 120),
    st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]),
    st.integers(1, 30),
    st.sampled_from([0.5, 1, 2]),
)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.lists(loads, min_size=1, max_size=12), st.booleans())
def test_any_load_stays_on_the_ladder_and_in_the_dwell(sequence, with_ladder):
    hysteresis = HysteresisSettings(dwell_steps=DWELL)
    controller = Controller(
        ControllerSettings(tiers=TIERS, hysteresis=hysteresis, ladder=LADDER if with_ladder else None), TABLE
    )
    engine, last, moved = Engine(controller), None, []
    for reqs, alpha, steps, slow in sequence:
        for _ in range(steps):
            decision = engine.run(reqs, alpha, slow=slow)
            cap = LADDER.cap(reqs) if with_ladder else 7
            assert decision.k in TIERS
            assert decision.k <= cap
            if decision.probe or last is None or decision.k == last:
                last = last if decision.probe else decision.k
                continue
            moved.append((engine.step, decision.reason, last, decision.k))
            last = decision.k
    source_of = {step: source for step, _, source, _ in moved}
    for (before, *_), (step, reason, _, target) in pairwise(moved):
        if step - before < DWELL:  # only a cap may break the dwell, and never upwards
            assert reason is Reason.CAPPED
            assert target < source_of[step]


@settings(max_examples=6, deadline=None, derandomize=True)
@given(st.lists(loads, max_size=6), st.sampled_from([(1, 0.9), (4, 0.2), (24, 0.7), (100, 0.6)]))
def test_it_recovers_from_any_history_in_bounded_steps(history, steady):
    controller = Controller(ControllerSettings(tiers=TIERS), TABLE)
    engine = Engine(controller)
    for reqs, alpha, steps, slow in history:
        engine.run(reqs, alpha, steps, slow=slow)
    reqs, alpha = steady
    engine.run(reqs, alpha, 1200)
    best, rate = best_k(reqs, alpha)
    assert rate(controller.hysteresis.arm) >= 0.94 * rate(best)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-0.2, 0.5), st.floats(0, 0.2)), max_size=200))
def test_hysteresis_never_returns_inside_a_dwell(offers):
    rule = Hysteresis(0, HysteresisSettings(dwell_steps=DWELL, patience_steps=16))
    arms = []
    for step, (arm, gain, noise) in enumerate(offers):
        chosen, reason = rule.propose(step, arm, gain=gain, noise=noise, step_s=0.01)
        assert (chosen != rule.arm) == (reason is Reason.SWITCH)
        if reason is Reason.SWITCH:
            assert gain > max(noise, 0.01)
        rule.commit(step, chosen)
        arms.append(chosen)
    changes = [i for i in range(1, len(arms)) if arms[i] != arms[i - 1]]
    assert all(b - a >= DWELL for a, b in pairwise(changes))


def test_margin_falls_while_a_better_arm_waits_and_switch_cost_is_paid_by_the_stay():
    rule = Hysteresis(0, HysteresisSettings(patience_steps=32))
    reasons = [rule.propose(step, 1, gain=0.015, noise=0.0, step_s=0.01)[1] for step in range(80)]
    assert reasons.index(Reason.SWITCH) == 64  # two patiences: 4 % -> 2 % -> 1 %
    dear = Hysteresis(0, HysteresisSettings(switch_cost_s=1.0))
    assert dear.propose(0, 1, gain=0.5, noise=0.0, step_s=0.01)[1] is Reason.SWITCH_COST
    assert dear.propose(0, 1, gain=0.5, noise=0.0, step_s=0.1)[1] is Reason.SWITCH


def test_hopeless_drafts_are_switched_off_and_probed_rarely():
    controller = Controller(ControllerSettings(tiers=TIERS), TABLE)
    engine = Engine(controller)
    engine.run(48, 0.02, 400)
    assert controller.hysteresis.arm == 0
    before = controller.probe_steps
    engine.run(48, 0.02, 3000)
    assert 0 < controller.probe_steps - before <= 30
    engine.run(48, 0.95, 500)
    assert controller.hysteresis.arm > 0


def test_a_batch_that_flips_across_a_power_of_two_is_one_size_to_the_probe():
    """Requests that end one by one flip it at every step; each flip would start a probe at once."""
    steady, flipping = (Controller(ControllerSettings(tiers=TIERS), TABLE) for _ in range(2))
    engines = Engine(steady), Engine(flipping)
    for engine in engines:
        engine.run(48, 0.02, 400)
    before = [controller.probe_steps for controller in (steady, flipping)]
    for _ in range(200):
        engines[0].run(64, 0.02, 2)
        engines[1].run(64, 0.02)
        engines[1].run(63, 0.02)
    spent = [controller.probe_steps - start for controller, start in zip((steady, flipping), before, strict=True)]
    assert 0 < spent[1] <= spent[0] + 1


def test_a_batch_that_halved_or_doubled_is_probed_at_once():
    probe = Probe(ProbeSettings())
    assert not any(probe.tick(16) for _ in range(20))
    for batch, ready in ((9, False), (8, True), (15, False), (16, True), (31, False), (32, True), (33, False)):
        assert probe.tick(batch) is ready
        if ready:
            probe.start()
            probe.report(False)


def test_no_probe_where_certain_drafts_would_not_pay():
    controller = Controller(ControllerSettings(tiers=TIERS), TABLE)
    Engine(controller).run(1000, 0.5, 1500)
    assert controller.hysteresis.arm == 0
    assert controller.probe_steps <= 2


def test_modes(observation):
    off = Controller(ControllerSettings(tiers=TIERS, mode=Mode.OFF, fixed_k=5), TABLE)
    assert (
        off.decide(BatchState(step=0, num_reqs=4)).k,
        off.decide(BatchState(step=0, num_reqs=4)).reason,
    ) == (
        5,
        Reason.MODE_OFF,
    )
    shadow = Controller(ControllerSettings(tiers=TIERS, mode=Mode.SHADOW, fixed_k=7), TABLE)
    engine = Engine(shadow)
    decision = engine.run(200, 0.3, 300)
    assert (decision.k, decision.reason, decision.bypass) == (7, Reason.SHADOW, True)
    assert decision.wanted_k == 0
    accounts = shadow.snapshot()["ledger"]
    assert accounts["best_fixed_k"] == 0
    assert shadow.probe_steps == 0
    shadow.set_mode(Mode.ADAPTIVE)
    assert engine.run(200, 0.3).k == 0
    with pytest.raises(ValueError, match="nonsense"):
        shadow.set_mode("nonsense")
    bare = Controller(ControllerSettings(tiers=TIERS), None)
    assert bare.decide(BatchState(step=0, num_reqs=4)).reason is Reason.NO_COST_TABLE
    bare.observe(observation(3, [1, 2]))
    assert "no cost table" in bare.snapshot()["inactive"][0]


def test_pin_unpin_reset(make_controller):
    controller = make_controller()
    engine = Engine(controller)
    controller.pin(1)
    assert engine.run(1, 0.9, 50).k == 1
    assert engine.run(1, 0.9).reason is Reason.PINNED
    for wrong in (2, -1, True, "3"):
        with pytest.raises(ValueError, match="tiers"):
            controller.pin(wrong)
    controller.unpin()
    assert engine.run(1, 0.9, 200).k == 7
    controller.pin(7)
    assert controller.decide(BatchState(step=0, num_reqs=1, max_k=3)).k == 3
    controller.reset()
    assert controller.pinned is None
    assert controller.snapshot()["acceptance"]["samples"] == 0


def test_opt_out_caps_and_bypass(make_controller):
    controller = make_controller()
    out = controller.decide(BatchState(step=0, num_reqs=2, caps=np.array([0, 0])))
    assert (out.k, out.reason) == (0, Reason.OPTED_OUT)
    full = make_controller().decide(BatchState(step=0, num_reqs=2))
    assert (full.k, full.bypass, full.width) == (7, True, 8)
    floor = make_controller(tiers=(3, 7)).decide(BatchState(step=0, num_reqs=2, max_k=1))
    assert (floor.k, floor.reason) == (3, Reason.LADDER_FLOOR)


def test_classes_are_weighed_by_their_share(make_controller):
    controller = make_controller()
    engine = Engine(controller)
    grammar = np.ones(60, np.int64)
    engine.run(60, 0.02, 300, classes=grammar)
    assert controller.hysteresis.arm == 0
    # a batch of plain requests is not judged by what grammar requests did
    assert engine.run(60, 0.95, 40, classes=np.zeros(60, np.int64)).k > 0


def test_unsynced_drafts_are_not_judged_while_they_warm_up():
    """vllm#53426: acceptance right after K = 0 is low because the draft's KV is stale."""
    settings_ = ControllerSettings(tiers=TIERS, probe=ProbeSettings(steps=5), resume_warmup_steps=4)
    controller = Controller(settings_, TABLE)
    engine = Engine(controller)
    engine.run(48, 0.02, 300)
    assert controller.hysteresis.arm == 0
    probes = [engine.run(48, 0.0).probe for _ in range(640)]
    assert sum(probes) % 5 == 0
    assert sum(probes) <= 14
    runs = np.diff(np.flatnonzero(np.diff([0, *probes, 0])))[::2]
    assert set(runs.tolist()) == {5}
    assert controller.warming_steps == 4 * (sum(probes) // 5 + controller.trials.begun)


def ragged_controller(**parts):
    settings_ = ControllerSettings(tiers=(0, 7), verify=Verify.RAGGED)
    block = CostTable(
        (
            ContextBucket(
                0,
                Curve((1, 64, 128, 4096), (0.010, 0.010, 0.016, 0.512)),
                None,
                ((0, Curve((1, 999), (0.0, 0.0))), (7, Curve((1, 999), (0.0005, 0.0005)))),
            ),
        )
    )
    return Controller(settings_, block, **parts)


def run_ragged(controller, chances, steps=60, *, said=None, **fields):
    """Requests whose drafts are accepted with `chances` [R, 7]; the head says `said`, the truth unless given."""
    rng, ids = np.random.default_rng(0), np.arange(len(chances))
    if "margins" not in fields:
        fields["confidences"] = chances if said is None else said
    for step in range(steps):
        decision = controller.decide(BatchState(step=step, num_reqs=len(ids), request_ids=ids))
        verified = np.full(len(ids), decision.k)
        if decision.budget is not None:
            verified = allocate(survival_of(chances), decision.budget)
        accepted = np.cumprod(rng.random(chances.shape) < chances, axis=1).sum(1)
        controller.observe(
            StepObservation(
                step=step,
                k=decision.k,
                accepted=np.minimum(accepted, verified),
                verified=verified,
                request_ids=ids,
                ragged=decision.budget is not None,
                **fields,
            )
        )
    return decision


def test_ragged_budget_is_planned_from_survivals_two_steps_old():
    good, bad = np.full((32, 7), 0.95), np.full((32, 7), 0.2)
    controller = ragged_controller()
    decision = run_ragged(controller, np.concatenate([good, bad]))
    assert decision.k == 7
    assert 32 <= decision.budget <= 300  # mostly the good half
    ids = np.arange(64)
    controller.survivals.lagged.push(60, ids, np.zeros((64, 7)))
    before, same, later = (
        controller.decide(BatchState(step=step, num_reqs=64, request_ids=ids)).budget for step in (60, 61, 62)
    )
    # step 60 drafted nothing worth verifying: step 61 must not know yet, step 62 must
    assert before == same
    assert later != same


def test_a_head_that_promises_too_much_is_held_against_what_happened():
    """Half the acceptance that the head claims: the budget follows the truth, not the claim."""
    chances, said = np.full((64, 7), 0.45), np.full((64, 7), 0.95)
    honest, boasting = ragged_controller(), ragged_controller()
    truth = run_ragged(honest, chances)
    claim = run_ragged(boasting, chances, said=said)
    rates = [d.predicted_tok_s for d in (truth, claim)]
    assert rates[1] == pytest.approx(rates[0], rel=0.25)


def test_a_head_that_is_certain_and_always_wrong_is_not_believed():
    """Nothing is accepted, so that a drafting step gives its bonus tokens alone: 8 in 10.5 milliseconds."""
    chances, said = np.full((8, 7), 0.0), np.full((8, 7), 0.99)
    decision = run_ragged(ragged_controller(), chances, said=said)
    assert decision.predicted_tok_s == pytest.approx(8 / 0.0105, rel=0.1)


def test_ragged_takes_the_fixed_width_when_everything_is_worth_it():
    decision = run_ragged(ragged_controller(), np.full((2, 7), 0.97))
    assert decision.bypass
    assert decision.budget is None


def test_ragged_heads_are_scaled_and_margins_need_a_warm_estimator():
    scaled = ragged_controller(scaling=TemperatureScaling((1000.0,) * 7))
    run_ragged(scaled, np.full((64, 7), 0.999), steps=5)
    survival = scaled.survivals.lagged.at(6, np.arange(64), np.zeros((64, 7)))
    assert survival[0, 0] == pytest.approx(0.5, abs=0.01)
    cold = ragged_controller(estimator=MarginEstimator(7, refit_steps=10))
    chances, margins = np.full((8, 7), 0.8), np.full((8, 7), 2.0)
    assert run_ragged(cold, chances, steps=8, margins=margins).budget is None
    assert "warming up" in cold.snapshot()["inactive"][0]
    run_ragged(cold, chances, steps=60, margins=margins)
    assert cold.estimator.warm
    assert cold.survivals.lagged.at(61, np.arange(8), np.zeros((8, 7))) is not None


def test_snapshot_is_plain_data(make_controller):
    controller = make_controller()
    Engine(controller).run(8, 0.6, 50)
    text = json.dumps(controller.snapshot(), allow_nan=False)
    assert json.loads(text)["decisions"] == 50
    assert json.loads(text)["ledger"]["measured_tok_s"] > 0


def test_regret_is_what_the_best_fixed_k_would_have_given_more():
    controller = Controller(ControllerSettings(tiers=TIERS, mode=Mode.SHADOW), TABLE)
    engine = Engine(controller)
    engine.run(200, 0.6, 500)
    ledger = controller.snapshot()["ledger"]
    assert ledger["best_fixed_tok_s"] == max(v for v in ledger["fixed_tok_s"].values())
    assert ledger["best_each_step_tok_s"] >= ledger["chosen_tok_s"] - 1e-9
    # the tokens measured at the fixed width agree with what was predicted for it
    assert ledger["measured_tok_s"] == pytest.approx(ledger["fixed_tok_s"]["7"], rel=0.1)
    assert 0.5 < ledger["wasted_draft_share"] < 0.9


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.floats(0.05, 0.95), st.integers(1, 40), st.integers(1, 6)),
        min_size=1,
        max_size=6,
    )
)
def test_a_choice_that_stands_until_there_is_news_is_the_choice_made_anew(phases) -> None:
    """Observations come in groups; a twin that weighs all arms in every step decides the same."""
    one, twin = (Controller(ControllerSettings(tiers=TIERS, ladder=LADDER), TABLE) for _ in range(2))
    rng = np.random.default_rng(0)
    step = 0
    for reqs, alpha, rounds, group in phases:
        for _ in range(rounds):
            seen = []
            for _ in range(group):
                twin._stands = None
                batch = BatchState(step=step, num_reqs=reqs)
                decision = one.decide(batch)
                assert decision == twin.decide(batch)
                draws = np.cumprod(rng.random((reqs, 7)) < alpha, axis=1).sum(1)
                seconds = TABLE.draft_s(decision.k, reqs) + TABLE.verify_s(reqs * (decision.k + 1), reqs)
                accepted = np.minimum(draws, decision.k)
                seen.append(StepObservation(step=step, k=decision.k, accepted=accepted, step_s=seconds))
                step += 1
            for observation in seen:
                one.observe(observation)
                twin.observe(observation)
    ours, theirs = one.snapshot(), twin.snapshot()
    for name, value in ours.pop("ledger").items():
        if isinstance(value, float):
            assert value == pytest.approx(theirs["ledger"][name], rel=0.01, abs=0.5), name
    assert ours == {key: value for key, value in theirs.items() if key != "ledger"}


def test_ranks_that_verify_everything_do_not_switch_in_every_step() -> None:
    """A budget of all positions runs as the full width; the arm it came from is committed, so one switch does."""
    settings = ControllerSettings(tiers=TIERS, verify=Verify.RAGGED, ranks=2)
    controller = Controller(settings, TABLE)
    ids = np.arange(4)
    for step in range(60):
        batch = BatchState(step=step, num_reqs=4, request_ids=ids)
        wish = controller.decide(batch)
        mine = vote(wish, controller.signature, cap=controller.cap(batch))
        run = controller.adopt(wish, resolve(reduce_votes([mine, mine]), full_k=7))
        controller.observe(
            StepObservation(
                step=step, k=run.k, accepted=np.full(4, run.k), request_ids=ids, confidences=np.full((4, 7), 0.99)
            )
        )
    assert run.k == 7
    assert run.bypass
    assert controller.reasons[Reason.SWITCH] <= 1
