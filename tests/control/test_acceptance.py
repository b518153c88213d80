"""Acceptance estimates: what a sample says, what is dropped, how fast a change shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_spec_ext.control.acceptance import Acceptance
from sglang_spec_ext.control.tiers import gain_error, group_requests, score_tiers
from sglang_spec_ext.records import BatchState, RequestClass


def feed(acceptance, observation, alpha, *, k=7, rows=32, steps=100, seed=0, **fields):
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        accepted = (np.cumprod(rng.random((rows, k)) < alpha, axis=1)).sum(1)
        acceptance.observe(observation(k, accepted, **fields))


def test_rates_follow_positions(observation):
    acceptance = Acceptance(7)
    alpha = np.array([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3])
    feed(acceptance, observation, alpha, rows=256)
    state = acceptance.classes[RequestClass.PLAIN]
    assert state.rates()[:5] == pytest.approx(alpha[:5], abs=0.05)
    assert state.expected()[-1] == pytest.approx(1 + np.cumprod(alpha).sum(), rel=0.02)


def test_a_sample_speaks_of_the_k_it_was_drafted_at(observation):
    """Rows at K = 1 say nothing on position 2, however often position 1 is accepted."""
    acceptance = Acceptance(3)
    feed(acceptance, observation, 0.5, k=3)
    before = acceptance.classes[0].rates()[1]
    acceptance.observe(observation(1, np.ones(8)))
    state = acceptance.classes[0]
    assert state.rates()[1] == pytest.approx(before, abs=0.02)
    with pytest.raises(ValueError, match="largest tier 3"):
        acceptance.observe(observation(4, [1]))


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=20))
def test_ragged_rows_count_only_where_verified(rows):
    from sglang_spec_ext.records import StepObservation

    accepted, verified = (np.array(column) for column in zip(*rows, strict=True))
    acceptance = Acceptance(5)
    usable = accepted <= verified
    acceptance.observe(StepObservation(step=0, k=5, accepted=accepted, verified=verified))
    assert acceptance.dropped == np.count_nonzero(~usable)
    for j in range(5):
        reached = usable & (accepted >= j) & (verified > j)
        assert acceptance.classes[0].trials[j] == np.count_nonzero(reached)
        assert acceptance.classes[0].hits[j] == np.count_nonzero(usable & (accepted > j))


def test_unusable_rows_are_counted_and_change_nothing(observation):
    acceptance = Acceptance(3)
    feed(acceptance, observation, 0.6, k=3)
    before = acceptance.snapshot()
    acceptance.observe(observation(3, [np.nan, -1.0, 4.0, np.inf]))
    acceptance.observe(observation(3, [3, 3], valid=np.array([False, False])))
    after = acceptance.snapshot()
    assert after.pop("dropped") == before.pop("dropped") + 6
    assert after == before


def test_classes_do_not_touch_each_other(observation):
    acceptance = Acceptance(3)
    feed(acceptance, observation, 0.9, k=3, classes=np.zeros(32, np.int64))
    plain = acceptance.classes[RequestClass.PLAIN].rates()
    feed(acceptance, observation, 0.1, k=3, classes=np.full(32, int(RequestClass.GRAMMAR)))
    assert acceptance.classes[RequestClass.PLAIN].rates() == plain
    assert acceptance.classes[RequestClass.GRAMMAR].rates()[0] == pytest.approx(0.1, abs=0.05)


@pytest.mark.parametrize("rows", [1, 8, 256])
def test_a_collapse_shows_within_a_few_dozen_samples(observation, rows):
    acceptance = Acceptance(3)
    feed(acceptance, observation, 0.85, k=3, rows=rows, steps=2000 // rows)
    assert acceptance.classes[0].rates()[0] == pytest.approx(0.85, abs=0.06)
    feed(acceptance, observation, 0.05, k=3, rows=rows, steps=max(8, 96 // rows), seed=1)
    assert acceptance.classes[0].rates()[0] < 0.25


def test_a_steady_rate_is_no_change(observation):
    acceptance = Acceptance(3)
    feed(acceptance, observation, 0.7, k=3, rows=16, steps=3000)
    assert acceptance.classes[0].changes <= 2


def test_a_prior_from_elsewhere_is_a_start(observation):
    acceptance = Acceptance(3)
    acceptance.seed(RequestClass.PLAIN, [0.9, 0.5], 200.0)
    assert acceptance.classes[0].rates()[:2] == pytest.approx([0.9, 0.5], abs=0.02)
    with pytest.raises(ValueError, match="probabilities"):
        acceptance.seed(RequestClass.PLAIN, [1.5], 10.0)


def test_caps_bound_the_gain_and_not_the_cost(observation, make_table):
    acceptance = Acceptance(7)
    feed(acceptance, observation, 0.8)
    batch = BatchState(step=0, num_reqs=4, caps=np.array([0, 0, 7, 7]))
    free = BatchState(step=0, num_reqs=4)
    table = make_table()
    capped, full = (
        score_tiers([7], group_requests(b, 7), batch=b, acceptance=acceptance, cost=table)[0]
        for b in (batch, free)
    )
    assert capped.seconds == full.seconds
    assert capped.tokens == pytest.approx(2 + full.tokens / 2)


def test_prefill_tokens_stand_in_the_time_alone(observation, make_table):
    acceptance = Acceptance(7)
    table = make_table()
    alone, mixed = (
        score_tiers([3], [(0, 7, 4)], batch=b, acceptance=acceptance, cost=table)[0]
        for b in (
            BatchState(step=0, num_reqs=4),
            BatchState(step=0, num_reqs=4, prefill_tokens=2000),
        )
    )
    assert mixed.tokens == alone.tokens
    assert mixed.seconds == table.draft_s(3, 4) + table.verify_s(2016, 4)


def test_error_of_a_gain_is_that_of_repeated_estimates(observation, make_table):
    """The delta method against the spread over independent streams."""
    gains, errors = [], []
    for seed in range(60):
        acceptance = Acceptance(7)
        feed(acceptance, observation, 0.7, rows=8, steps=64, seed=seed)
        low, high = score_tiers(
            [3, 7],
            [(0, 7, 8)],
            batch=BatchState(step=0, num_reqs=8),
            acceptance=acceptance,
            cost=make_table(),
        )
        gains.append(np.log(high.tokens / low.tokens))
        errors.append(gain_error([(0, 7, 8)], acceptance, high, low))
    assert np.std(gains) == pytest.approx(np.mean(errors), rel=0.5)
