"""Calibration of heads and of margins, against streams whose probabilities are known."""

import json

import numpy as np
import pytest

from sglang_spec_ext.control.calibration import MarginEstimator, TemperatureScaling, calibration_error
from sglang_spec_ext.records import RequestClass

GAMMA = 4


def logistic(x):
    return 1.0 / (1.0 + np.exp(-x))


def blocks(rng, count, slope=0.6, bias=-1.0):
    margins = rng.exponential(3.0, (count, GAMMA))
    truth = logistic(slope * margins + bias)
    accepted = np.cumprod(rng.random(truth.shape) < truth, axis=1).sum(1)
    return margins, truth, accepted


def test_sts_repairs_an_overconfident_head():
    rng = np.random.default_rng(0)
    _, truth, accepted = blocks(rng, 20000)
    logits = np.log(truth / (1 - truth))
    head = logistic(logits * np.array([2.0, 3.0, 0.5, 1.5]))  # wrong by a temperature at each position
    half = len(head) // 2
    scaling = TemperatureScaling.fit(head[:half], accepted[:half])
    assert scaling.temperatures[:2] == pytest.approx((2.0, 3.0), rel=0.2)
    raw, repaired = (np.cumprod(c[half:], axis=1) for c in (head, scaling.apply(head)))
    for j in range(GAMMA):
        after = calibration_error(repaired[:, j], accepted[half:] > j)
        assert after <= 0.02
        assert after <= calibration_error(raw[:, j], accepted[half:] > j) + 0.005


def test_sts_keeps_the_order_within_a_position_and_bad_values():
    scaling = TemperatureScaling((0.5, 2.0))
    head = np.array([[0.2, 0.3], [0.6, 0.5], [np.nan, 1.5]])
    scaled = scaling.apply(head)
    assert (scaled[0] < scaled[1]).all()
    assert np.isnan(scaled[2, 0])
    assert scaled[2, 1] == 1.5


@pytest.mark.parametrize("values", [[1.0], [1.0, 0.0], [1.0, -2.0], "abc", [True, 1.0], None])
def test_sts_files_are_checked(values):
    with pytest.raises(ValueError, match="temperatures"):
        TemperatureScaling.from_json(json.dumps({"temperatures": values}), gamma=2)
    good = TemperatureScaling.from_json('{"temperatures": [1, 2.5], "dataset": "x"}', gamma=2)
    assert good.temperatures == (1.0, 2.5)


def run(estimator, rng, steps, *, ragged=False, classes=None, slope=0.6, bias=-1.0, k=GAMMA):
    for _ in range(steps):
        margins, _, accepted = blocks(rng, 16, slope, bias)
        accepted = np.minimum(accepted, k)
        estimator.observe(margins, np.minimum(accepted + 1, k), accepted, classes=classes, ragged=ragged)


def test_margins_become_probabilities():
    estimator, rng = MarginEstimator(GAMMA), np.random.default_rng(1)
    assert not estimator.warm
    run(estimator, rng, 1500)
    assert estimator.warm
    margins, truth, _ = blocks(rng, 4000)
    assert np.abs(estimator.probabilities(margins) - truth).mean() < 0.03


def test_a_step_that_drafts_fewer_tokens_teaches_their_positions_alone():
    """A chain of two drafts has two margins; to the estimator the others were not reached."""
    whole, short = MarginEstimator(GAMMA), MarginEstimator(GAMMA)
    margins = np.random.default_rng(3).uniform(0.0, 9.0, (16, GAMMA))
    accepted = np.arange(16) % 3
    for estimator, seen in ((whole, margins), (short, margins[:, :2])):
        for _ in range(400):
            estimator.observe(seen, np.minimum(accepted + 1, 2), accepted, classes=None, ragged=False)
    assert short.warm
    assert short.coefficients.tolist() == whole.coefficients.tolist()
    assert short.samples[2:].sum() == 0
    np.testing.assert_array_equal(short.probabilities(margins[:, :2]), whole.probabilities(margins)[:, :2])


def test_warm_up_takes_no_lengths_chosen_by_confidence():
    estimator, rng = MarginEstimator(GAMMA), np.random.default_rng(1)
    run(estimator, rng, 400, ragged=True)
    assert estimator.steps == 0
    run(estimator, rng, 400)
    assert estimator.warm


def test_only_plain_requests_train_it():
    estimator, rng = MarginEstimator(GAMMA), np.random.default_rng(1)
    run(estimator, rng, 300, classes=np.full(16, int(RequestClass.PENALISED)))
    assert estimator.samples.sum() == 0
    assert not estimator.warm


def test_positions_without_samples_keep_theirs_and_slopes_stay_positive():
    estimator, rng = MarginEstimator(GAMMA), np.random.default_rng(1)
    run(estimator, rng, 400, k=1)
    assert estimator.coefficients[1:].tolist() == [[0.0, 1.5]] * (GAMMA - 1)
    upside_down = MarginEstimator(GAMMA)
    run(upside_down, rng, 600, slope=-0.5, bias=2.0)
    assert (upside_down.coefficients[:, 0] >= 0).all()
    assert upside_down.refused_slopes > 0


def test_probability_does_not_depend_on_the_drawn_token():
    """The estimator sees margins alone: nothing of a token can enter."""
    estimator = MarginEstimator(GAMMA)
    spoiled = np.array([[np.nan, 1, 1, 1], [-1, 1, 1, 1], [2, 2, 2, 2]], float)
    estimator.observe(spoiled, np.full(3, 4), np.full(3, 4), classes=None, ragged=False)
    assert estimator.samples.tolist() == [1.0] * GAMMA
