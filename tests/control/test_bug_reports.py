"""Public reports on adaptive speculation, one test each, named by project and number.

`sgl` is sgl-project/sglang, `vllm` vllm-project/vllm, `trt` NVIDIA/TensorRT-LLM. Where the fault lay in an
engine's buffers, the test holds the rule that this library owes the engine.
"""

import numpy as np
import pytest

from sglang_spec_ext.control.acceptance import Acceptance
from sglang_spec_ext.control.agreement import reduce_votes, require_full_group, resolve, signature_of, vote
from sglang_spec_ext.control.chapter import KnownAcceptance
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.cost_files import import_sps
from sglang_spec_ext.control.curve import CostTableError, Curve
from sglang_spec_ext.control.ladder import LadderError, from_sglang_adaptive, from_vllm_table
from sglang_spec_ext.control.settings import ControllerSettings, Verify
from sglang_spec_ext.control.tiers import score_tiers
from sglang_spec_ext.control.verify import allocate, early_stop_budget, plan_budget, survival_of
from sglang_spec_ext.records import BatchState, Decision, Reason


def table(points, seconds, *, captured=0, draft_s=1e-4, k0_s=0.0, gamma=5):
    draft = ((0, Curve((1, 999), (k0_s,) * 2)), (gamma, Curve((1, 999), (draft_s,) * 2)))
    return CostTable((ContextBucket(0, Curve(points, seconds, captured), None, draft),))


def test_sgl_30549_and_24055_sizes_follow_the_largest_tier():
    settings = ControllerSettings(tiers=(1, 3, 7), fixed_k=3)
    assert (settings.max_k, settings.full_k) == (7, 3)
    controller = Controller(settings, None)
    reserve = [controller.settings.max_k]
    for k in (7, 1, 3):
        controller.pin(k)
        reserve.append(controller.settings.max_k)
    assert set(reserve) == {7}


def test_sgl_35898_ranks_take_the_smallest_k_and_idle_ones_are_neutral():
    sign = signature_of("t")
    wishes = [Decision(k=k, reason=Reason.BEST) for k in (3, 1, 3)]
    idle = Decision(k=0, reason=Reason.EMPTY)
    votes = [vote(d, sign, cap=7) for d in (*wishes, idle)]
    assert resolve(reduce_votes(votes), full_k=7).k == 1
    all_idle = [vote(idle, sign, cap=7)] * 4
    assert resolve(reduce_votes(all_idle), full_k=7).reason is Reason.ALL_IDLE


def test_infera_34_a_vote_over_one_rank_is_refused():
    require_full_group(8, 8)
    with pytest.raises(ValueError, match="full TP group"):
        require_full_group(1, 8)


def test_xllm_2255_fewer_requests_than_ranks_do_not_veto_speculation():
    sign = signature_of("t")
    votes = [vote(Decision(k=7, reason=Reason.BEST), sign, cap=7)]
    votes += [vote(Decision(k=0, reason=Reason.EMPTY), sign, cap=7)] * 7
    assert resolve(reduce_votes(votes), full_k=7).k == 7


def test_sgl_23994_k0_pays_for_keeping_the_draft_usable():
    known = KnownAcceptance([0.05] * 5)
    batch = BatchState(step=0, num_reqs=4)
    for k0_s, wanted in ((0.0, 0), (0.002, 5)):
        cost = table((1, 64), (0.01, 0.0101), draft_s=0.002, k0_s=k0_s)
        scores = score_tiers([0, 5], [(0, 5, 4)], batch=batch, acceptance=known, cost=cost)
        assert scores[0].seconds == pytest.approx(0.01 + 0.0001 * 3 / 63 + k0_s)
        assert max(scores, key=lambda score: score.rate).k == wanted


def test_sgl_23456_results_of_finished_requests_change_nothing(observation):
    acceptance = Acceptance(3)
    acceptance.observe(observation(3, [0, 3, 3], valid=np.array([True, False, False])))
    assert acceptance.classes[0].trials[0] == 1
    assert acceptance.classes[0].hits[0] == 0
    assert acceptance.dropped == 2


@pytest.mark.parametrize(("accepted", "rate"), [(0, 0.0), (3, 1.0), (1, 1 / 3)])
def test_sgl_23530_accept_rate_does_not_count_the_bonus(observation, make_controller, accepted, rate):
    controller = make_controller()
    controller.observe(observation(3, [accepted], step_s=0.01))
    ledger = controller.snapshot()["ledger"]
    assert 1 - ledger["wasted_draft_share"] == pytest.approx(rate)
    assert ledger["measured_tok_s"] == pytest.approx((1 + accepted) / 0.01)


def test_sgl_13212_width_is_not_k():
    assert Decision(k=3, reason=Reason.BEST).width == 4
    assert Decision(k=0, reason=Reason.BEST).width == 1


def test_llama_cpp_fork_6_k_changes_the_verified_prefix_and_not_the_block():
    cost = table((1, 512), (0.01, 0.08), draft_s=0.003, gamma=7)
    survival = np.tile(np.linspace(0.9, 0.1, 7), (8, 1))
    plans = [plan_budget(survival, cost, max_budget=m) for m in (0, 5, 56)]
    for plan in plans:  # the whole block is paid for whatever is verified of it
        assert plan.seconds == pytest.approx(0.003 + cost.verify_s(8 + plan.budget, 8))


def test_sgl_31195_perturbed_confidences_give_all_ranks_one_budget():
    cost = table((8, 16, 40), (0.010, 0.0119, 0.02), captured=40)
    live = survival_of(np.full((8, 4), 0.811))
    noisy = [survival_of(np.full((8, 4), 0.811 + noise)) for noise in (0.0, -0.001, 0.002)]
    budgets = [plan_budget(survival, cost).budget for survival in noisy]
    sign = signature_of("t")
    votes = [vote(Decision(k=4, reason=Reason.BEST, budget=b), sign, cap=4) for b in budgets]
    agreed = resolve(reduce_votes(votes), full_k=4)
    assert agreed.budget == min(budgets)
    lengths = [allocate(live + noise, agreed.budget).tolist() for noise in (0.0, 1e-9, -1e-9)]
    assert lengths[0] == lengths[1] == lengths[2]


def test_sgl_32930_a_forced_budget_is_what_gets_laid_out():
    survival = survival_of(np.full((32, 5), 0.9))
    for fraction in (0.25, 0.5, 1.0):
        budget = int(fraction * 32 * 5)
        assert allocate(survival, budget).sum() == budget


def test_sgl_34636_equal_token_totals_of_unlike_shapes_are_told_apart():
    even = allocate(survival_of(np.full((32, 5), 0.9)), 160)
    single = allocate(survival_of(np.full((192, 5), 0.9)), 0)
    assert (even + 1).sum() == (single + 1).sum() == 192
    assert (even.size, even.max()) != (single.size, single.max())


def test_vllm_47808_old_confidences_set_the_budget_and_live_ones_share_it():
    cost = table((2, 4, 12), (0.010, 0.0101, 0.03), captured=12)
    old = survival_of(np.array([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1]]))
    live = survival_of(np.array([[0.1, 0.1, 0.1], [0.9, 0.9, 0.9]]))
    budget = plan_budget(old, cost).budget
    assert budget == 2
    assert allocate(live, budget).tolist() == [0, 2]


def test_trt_17056_a_staircase_needs_the_global_optimum():
    cost = table((8, 16, 40), (0.010, 0.020, 0.0205), captured=40)
    survival = survival_of(np.full((8, 4), 0.95))
    assert early_stop_budget(survival, cost).budget == 0
    assert plan_budget(survival, cost).budget == 32


def test_sgl_30204_a_smaller_plan_verifies_fewer_tokens():
    cost = table((1, 64, 4096), (0.01, 0.01, 0.6), draft_s=0.0001)
    plan = plan_budget(survival_of(np.full((64, 5), 0.5)), cost)
    assert plan.budget < 64 * 5
    assert plan.seconds < 0.0001 + cost.verify_s(64 * 6, 64)


def test_miaai_6_an_engine_that_needs_equal_blocks_gets_one_k(observation):
    settings = ControllerSettings(tiers=(0, 5), verify=Verify.UNIFORM)
    controller = Controller(settings, table((1, 64, 4096), (0.01, 0.01, 0.6)))
    ids = np.arange(8)
    for step in range(10):
        decision = controller.decide(BatchState(step=step, num_reqs=8, request_ids=ids))
        controller.observe(
            observation(5, [1] * 8, step=step, request_ids=ids, confidences=np.full((8, 5), 0.5), step_s=0.01)
        )
        assert decision.budget is None


def test_sps_tables_do_not_make_tokens_beyond_the_last_probe_free():
    """A table that ends at 64 tokens made 32 requests of 5 drafts verify everything (160 of 160)."""
    short = (
        '{"sample_batch_tokens": [1, 32, 64], "sample_steps_per_sec": [100, 100, 99], "max_batch_tokens": 64}'
    )
    cost = import_sps(short, gamma=5, draft_s=0.001)
    survival = survival_of(np.full((32, 5), 0.6))
    assert plan_budget(survival, cost).budget <= 64 - 32
    zero = '{"sample_batch_tokens": [1, 64], "sample_steps_per_sec": [0, 0], "max_batch_tokens": 64}'
    with pytest.raises(CostTableError, match="speed must be > 0"):
        import_sps(zero, gamma=5, draft_s=0.001)


def test_miaai_12_a_table_on_one_rank_only_is_noticed():
    settings = ControllerSettings(tiers=(0, 5), ranks=2)
    ranks = [Controller(settings, table((1, 64), (0.01, 0.02))), Controller(settings, None)]
    votes = [vote(Decision(k=5, reason=Reason.BEST), rank.signature, cap=5) for rank in ranks]
    assert resolve(reduce_votes(votes), full_k=5).reason is Reason.RANK_MISMATCH


def test_sgl_33892_an_empty_batch_passes_every_entry(make_controller, observation):
    controller = make_controller()
    assert controller.decide(BatchState(step=0, num_reqs=0)).reason is Reason.EMPTY
    controller.observe(observation(3, np.zeros(0)))
    assert allocate(np.zeros((0, 5)), 3).size == 0


def test_sglang_flat_adaptive_config_of_the_older_page_is_read():
    assert from_sglang_adaptive('{"candidate_steps": [1, 3, 7], "ema_alpha": 0.2}').cap(100) == 7


@pytest.mark.parametrize(
    "text",
    [
        '{"1": {"candidate_steps": [true, 3]}}',
        '{"8": {"candidate_steps": [1]}, "08": {"candidate_steps": [3]}}',
        '{"1": {"candidate_steps": [1]}, "emma_alpha": 0.2}',
        '{"1": {"candidate_steps": [1]}, "-8": {"candidate_steps": [3]}}',
        '{"1": {"candidate_steps": [1], "ema_alpha": NaN}}',
        '{"1": {"candidate_steps": [1], "ema_alpha": 2.0}}',
        '{"1": {"candidate_steps": [1], "update_interval": 0}}',
        '[{"candidate_steps": [1]}]',
        '{"\\u00b2": {"candidate_steps": [1]}}',
        '{"1": {"candidate_steps": [1, 3], "up_hysteresis": -1, "down_hysteresis": 1.5}}',
    ],
)
def test_adaptive_configs_that_0_5_23_takes_silently_are_refused(text):
    with pytest.raises(LadderError, match="adaptive config"):
        from_sglang_adaptive(text)


def test_nan_or_negative_accept_counts_do_not_poison_the_estimate(observation, make_controller):
    controller = make_controller()
    controller.observe(observation(3, [np.nan, -2.0, 2.0], step_s=0.01))
    state = controller.acceptance.classes[0]
    assert all(np.isfinite(rate) for rate in state.rates())
    assert controller.acceptance.dropped == 2
    assert controller.decide(BatchState(step=0, num_reqs=4)).k in controller.settings.tiers


def test_vllm_49548_a_batch_at_the_threshold_does_not_flip_k(observation, make_controller):
    """K = 2 up to 4 requests, 0 from 5 on; the batch flips between 4 and 5, and prefills do not count."""
    ladder = from_vllm_table([[1, 4, 1], [5, 999, 0]], max_k=7)
    controller = make_controller(ladder=ladder)
    ks = []
    for step in range(400):
        reqs = 4 + step % 2
        decision = controller.decide(BatchState(step=step, num_reqs=reqs, prefill_tokens=512 * (step % 3)))
        controller.observe(observation(decision.k, [decision.k] * reqs, step=step, step_s=0.01))
        ks.append(decision.k)
    assert np.count_nonzero(np.diff(ks)) <= 1
    assert ks[-1] == 0


def test_vllm_57533_penalised_requests_do_not_skew_the_others(observation, make_controller):
    controller = make_controller()
    for step in range(50):
        classes = np.array([0, 2])
        controller.observe(observation(3, [3, 0], step=step, classes=classes, step_s=0.01))
    plain, _, penalised, _ = (state.rates()[0] for state in controller.acceptance.classes)
    assert plain > 0.9
    assert penalised < 0.2
