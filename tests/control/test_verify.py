"""Survival planning: prefixes, budgets, caps, ties, NaN, and the global optimum against brute force."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from sglang_spec_ext.control.chapter import RooflineCost
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve
from sglang_spec_ext.control.lagged import LaggedSurvivals
from sglang_spec_ext.control.verify import allocate, capped, early_stop_budget, plan_budget, survival_of

shapes = st.tuples(st.integers(1, 9), st.integers(1, 6))
# few levels, so that ties are common
levels = st.sampled_from([0.0, 0.2, 0.5, 0.5, 0.8, 1.0])
confidences = shapes.flatmap(lambda shape: hnp.arrays(np.float64, shape, elements=levels))
budgets = st.integers(-1, 60)


def stairs(*steps):
    """A table whose target pass costs seconds up to each captured size."""
    points, seconds = zip(*steps, strict=True)
    curve = Curve(points, seconds, points[-1])
    return CostTable((ContextBucket(0, curve, None, ((4, Curve((1, 999), (1e-4, 1e-4))),)),))


@given(confidences, budgets)
def test_allocation_is_the_best_prefixes_within_the_budget(conf, budget):
    survival = survival_of(conf)
    lengths = allocate(survival, budget)
    assert lengths.sum() == min(max(budget, 0), np.count_nonzero(survival))
    taken = np.arange(conf.shape[1]) < lengths[:, None]
    left = survival[~taken]
    assert not left.size or not taken.any() or survival[taken].min() >= left.max()


@given(confidences, budgets)
def test_ties_go_by_position_then_request(conf, budget):
    survival = survival_of(conf)
    reqs, gamma = survival.shape
    order = sorted(
        ((r, j) for r in range(reqs) for j in range(gamma) if survival[r, j] > 0),
        key=lambda cell: (-survival[cell], cell[1], cell[0]),
    )
    wanted = np.zeros(reqs, int)
    for r, _ in order[: max(budget, 0)]:
        wanted[r] += 1
    assert allocate(survival, budget).tolist() == wanted.tolist()


@given(confidences, budgets, st.data())
def test_allocation_is_monotone_in_confidence(conf, budget, data):
    r = data.draw(st.integers(0, conf.shape[0] - 1))
    j = data.draw(st.integers(0, conf.shape[1] - 1))
    raised = conf.copy()
    raised[r, j] = min(1.0, raised[r, j] + data.draw(st.floats(0, 1)))
    before, after = (allocate(survival_of(c), budget)[r] for c in (conf, raised))
    assert after >= before


@given(shapes, st.randoms(use_true_random=False), budgets)
def test_plans_do_not_depend_on_request_order(shape, random, budget):
    values = random.sample(range(1, 1000), shape[0] * shape[1])
    survival = survival_of(np.sort(np.array(values, float).reshape(shape) / 1000, axis=1)[:, ::-1])
    assume(np.unique(survival).size == survival.size)  # products of distinct confidences may be equal
    order = random.sample(range(shape[0]), shape[0])
    assert allocate(survival[order], budget).tolist() == allocate(survival, budget)[order].tolist()
    cost = RooflineCost(0.001, parallel=True)
    assert plan_budget(survival[order], cost).budget == plan_budget(survival, cost).budget


@given(confidences, budgets, st.sampled_from([np.nan, np.inf, -0.1, 1.5]), st.data())
def test_a_bad_row_verifies_its_anchor_and_moves_nobody(conf, budget, bad, data):
    row = data.draw(st.integers(0, conf.shape[0] - 1))
    spoiled, without = conf.copy(), conf.copy()
    spoiled[row, data.draw(st.integers(0, conf.shape[1] - 1))] = bad
    without[row] = 0.0
    lengths = allocate(survival_of(spoiled), budget)
    assert lengths[row] == 0
    assert lengths.tolist() == allocate(survival_of(without), budget).tolist()
    cost = RooflineCost(0.001, parallel=True)
    assert plan_budget(survival_of(spoiled), cost) == plan_budget(survival_of(without), cost)


@given(confidences, st.lists(st.integers(0, 6), min_size=9, max_size=9), st.integers(0, 20))
def test_caps_hold(conf, caps, max_budget):
    caps = np.array(caps[: conf.shape[0]])
    survival = capped(survival_of(conf), caps)
    plan = plan_budget(survival, RooflineCost(1e-9, parallel=True), max_budget=max_budget)
    assert plan.budget <= max_budget
    assert (allocate(survival, plan.budget) <= caps).all()


@settings(max_examples=60)
@given(confidences, st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4))
def test_budget_is_the_global_optimum(conf, rises):
    seconds = np.cumsum(rises)
    cost = stairs(*zip((4, 12, 25, 63), seconds.tolist(), strict=True))
    survival = survival_of(conf)
    plan = plan_budget(survival, cost)
    reqs, gamma = survival.shape
    best = np.sort(survival.ravel())[::-1]
    rates = [
        (reqs + best[:b].sum()) / (cost.draft_s(gamma, reqs) + cost.verify_s(reqs + b, reqs))
        for b in range(np.count_nonzero(survival) + 1)
    ]
    assert plan.rate == pytest.approx(max(rates))
    assert plan.rate == pytest.approx(rates[plan.budget])


def test_early_stop_gives_up_at_the_first_stair_and_the_planner_does_not():
    survival = np.full((4, 4), 0.9)
    cost = stairs((4, 0.010), (12, 0.022), (20, 0.023))
    assert early_stop_budget(survival, cost).budget == 0
    assert plan_budget(survival, cost).budget == 16


def test_empty_batch():
    empty = np.zeros((0, 5))
    assert plan_budget(empty, RooflineCost(0.001, parallel=True)).budget == 0
    assert allocate(empty, 7).tolist() == []


def test_survival_of_a_shorter_draft_goes_on_as_the_prior_falls():
    lagged = LaggedSurvivals()
    prior = np.array([[0.8, 0.4, 0.2, 0.0], [0.5, 0.5, 0.25, 0.25], [0.9, 0.8, 0.7, 0.6]])
    lagged.push(10, np.array([1, 2]), np.array([[0.6, 0.2], [0.9, 0.0]]))
    for order in ([1, 2], [2, 1]):
        got = lagged.at(12, np.array([*order, 9]), prior)
        by_id = dict(zip([*order, 9], got.tolist(), strict=True))
        assert by_id[9] == prior[2].tolist()  # was not in that step
        assert by_id[2] == [0.9, 0.0, 0.0, 0.0]
    np.testing.assert_allclose(lagged.at(12, np.array([1, 2]), prior[:2])[0], [0.6, 0.2, 0.1, 0.0])
    np.testing.assert_allclose(lagged.at(12, np.array([2, 1]), prior[:2])[1], [0.6, 0.2, 0.1, 0.1])


def test_lagged_survivals_are_of_one_age_and_unknown_requests_get_the_prior():
    lagged = LaggedSurvivals()
    old, new = np.full((2, 3), 0.25), np.full((2, 3), 0.75)
    lagged.push(10, np.array([7, 8]), old)
    lagged.push(11, np.array([7, 8]), new)
    prior = np.full((3, 3), 0.5)
    got = lagged.at(12, np.array([8, 9, 7]), prior)
    assert got[:, 0].tolist() == [0.25, 0.5, 0.25]  # step 10, not the newer one
    assert lagged.at(14, np.array([7, 8]), prior[:2]) is None  # step 12 never came: no budget, not a guess
