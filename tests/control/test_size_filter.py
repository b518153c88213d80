"""The filter behind corrected times, against exact inference, and what follows from it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_spec_ext.control.size_filter import COMMON_SD, FADE_STEPS, SIZE_SD, WINDOW_STEPS, Size, SizeFilter

A, B, C = (Size.of(0, tokens) for tokens in (16, 32, 64))
NOISE = 0.02**2


def teach(filter_: SizeFilter, size: Size, truth: float, steps: int, start: int, sd: float = 0.0) -> int:
    """Let `steps` steps of a size take exp(`truth`) times what the table says; return the last step."""
    rng = np.random.default_rng(start)
    for step in range(start + 1, start + steps + 1):
        seen = truth + sd * float(rng.standard_normal())
        filter_.learn(size, seen - filter_.ratio(size, step), noise=NOISE, step=step)
    return start + steps


def test_means_and_spreads_are_those_of_the_joint_gaussian():
    """Every quantity of a short history, written as one Gaussian and conditioned on the observations at once."""
    sizes, seen = [A, A, B, A, C, B], [0.1, 0.12, -0.05, 0.09, 0.3, -0.02]
    order = {size: place for place, size in enumerate((A, B, C))}
    filter_ = SizeFilter()
    for step, (size, value) in enumerate(zip(sizes, seen, strict=True), 1):
        filter_.learn(size, value - filter_.ratio(size, step), noise=NOISE, step=step)
    # unknowns: c before the first step, its change in each step, and d of three sizes; fading is nil over six steps
    walk = NOISE / WINDOW_STEPS**2
    prior = np.diag([COMMON_SD**2, *[walk] * len(sizes), *[SIZE_SD**2] * 3])
    rows = np.zeros((len(sizes), len(prior)))
    for number, size in enumerate(sizes):
        rows[number, : number + 2] = 1.0
        rows[number, 1 + len(sizes) + order[size]] = 1.0
    gain = prior @ rows.T @ np.linalg.inv(rows @ prior @ rows.T + NOISE * np.eye(len(sizes)))
    mean, cov = gain @ np.array(seen), prior - gain @ rows @ prior
    common = np.array([*[1.0] * (1 + len(sizes)), 0.0, 0.0, 0.0])
    assert filter_.common == pytest.approx(common @ mean, rel=0.01)
    for size in (A, B, C):
        own = common + np.eye(len(prior))[1 + len(sizes) + order[size]]
        assert filter_.ratio(size, len(sizes)) == pytest.approx(own @ mean, abs=2e-3)
    for one, other in ((A, B), (A, C), (B, C)):
        apart = np.zeros(len(prior))
        apart[1 + len(sizes) + order[one]], apart[1 + len(sizes) + order[other]] = 1.0, -1.0
        assert filter_.spread(one, other, len(sizes)) == pytest.approx(float(apart @ cov @ apart) ** 0.5, rel=0.01)


def test_an_error_at_a_new_size_is_its_own():
    filter_ = SizeFilter()
    step = teach(filter_, A, 0.0, 100, 0)
    step = teach(filter_, B, -0.2, 16, step)
    assert filter_.ratio(B, step) == pytest.approx(-0.2, abs=0.01)
    assert filter_.ratio(A, step) == pytest.approx(0.0, abs=0.01)


def test_an_error_at_a_known_size_is_everybody_s():
    filter_ = SizeFilter()
    step = teach(filter_, A, 0.0, 200, 0)
    step = teach(filter_, B, 0.1, 2000, step)
    step = teach(filter_, B, 0.4, 2000, step)  # the machine became slower by 0.3
    assert filter_.ratio(B, step) == pytest.approx(0.4, abs=0.01)
    assert filter_.ratio(A, step) == pytest.approx(0.3, abs=0.05)


def test_what_is_not_known_is_said():
    filter_ = SizeFilter()
    assert filter_.spread(A, B, 0) == pytest.approx(2**0.5 * SIZE_SD)
    step = teach(filter_, A, 0.0, 100, 0, sd=0.02)
    assert filter_.spread(A, B, step) > SIZE_SD
    step = teach(filter_, B, 0.0, 100, step, sd=0.02)
    known = filter_.spread(A, B, step)
    assert known < 0.01
    assert known < filter_.spread(A, B, step + FADE_STEPS) < filter_.spread(A, C, step + FADE_STEPS)
    assert filter_.spread(A, B, step) == filter_.spread(B, A, step)
    assert filter_.spread(A, A, step + FADE_STEPS) == 0.0


def test_a_size_that_was_away_is_learnt_anew():
    filter_ = SizeFilter()
    step = teach(filter_, B, 0.2, 100, teach(filter_, A, 0.0, 100, 0))
    away = step + 10 * FADE_STEPS
    assert filter_.ratio(B, away) == pytest.approx(filter_.common, abs=1e-3)
    assert filter_.ratio(B, teach(filter_, B, -0.1, 50, away)) == pytest.approx(-0.1, abs=0.01)


@given(
    st.lists(
        st.tuples(st.integers(1, 70), st.floats(-1.0, 1.0), st.floats(0.0, 0.5), st.integers(1, 3000)),
        min_size=1,
        max_size=60,
    )
)
@settings(max_examples=100, deadline=None)
def test_any_history_leaves_a_covariance(history):
    filter_, step = SizeFilter(), 0
    for size, error, noise, gap in history:
        step += gap
        filter_.learn(Size.of(0, size), error, noise=noise, step=step)
        values = np.linalg.eigvalsh(filter_._cov)
        assert np.isfinite(filter_._mean).all()
        assert values.min() >= -1e-9 * values.max()


def test_many_sizes_at_once_are_each_of_them():
    filter_ = SizeFilter()
    step = teach(filter_, Size.of(0, 48), 0.2, 30, teach(filter_, A, -0.1, 30, 0))
    tokens = np.array([1, 15, 16, 17, 31, 33, 48, 63, 64, 65, 200])
    one_by_one = [filter_.ratio(Size.of(0, int(count)), step) for count in tokens]
    assert filter_.ratio_many(0, tokens, step) == pytest.approx(one_by_one)
