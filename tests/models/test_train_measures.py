"""Acceptance from the engine's histograms, and calibration of confidences."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_spec_ext.models.calibrate import (
    area_under_curve,
    expected_calibration_error,
    fit_temperatures,
    judge,
    plot_reliability,
    sigmoid,
    write_sts,
)
from sglang_spec_ext.models.evaluate import Acceptance, held_out_prompts, markdown_table, pool_answers


@given(st.lists(st.integers(0, 50), min_size=2, max_size=9).filter(any))
def test_accept_length_is_one_plus_the_sum_of_survivals(counts):
    found = Acceptance(tuple(counts))
    survival = np.cumprod(found.accept_rates)
    assert found.accept_len_with_bonus == pytest.approx(1 + survival.sum())


def test_answers_that_repeat_are_left_out_and_counted():
    def answer(ids, histogram):
        return {"output_ids": ids, "meta_info": {"spec_correct_drafts_histogram": histogram}}

    answers = [
        ("chat", answer([1, 2], [1, 1])),
        ("chat", answer([1, 2], [0, 9])),
        ("code", answer([3], [])),
        ("code", answer([4, 5], [0, 0, 2])),
    ]
    pooled = pool_answers(answers, num_drafts=3)
    assert pooled["chat"] == Acceptance((1, 1, 0, 0), num_requests=1, num_duplicates=1)
    assert pooled["code"].accept_len_with_bonus == 3.0
    assert pooled["maths"].num_steps == 0
    table = markdown_table({"greedy": pooled})
    assert "| greedy | all | 3 | 2.25 | 0.75 0.67 0.00 |" in table


def test_held_out_prompts_are_distinct_and_balanced():
    prompts = held_out_prompts(5)
    assert len({prompt.text for prompt in prompts}) == 20
    assert {prompt.split for prompt in prompts} == {"test"}


def make_case(*, distortion, seed, size=6000, positions=4):
    rng = np.random.default_rng(seed)
    true = rng.normal(0.7, 1.2, (size, positions))
    accepted = rng.random(true.shape) < sigmoid(true)
    return true * np.asarray(distortion), np.cumprod(accepted, 1).astype(float)


def test_temperatures_undo_a_known_distortion():
    logits, survived = make_case(distortion=[2.0, 0.5, 3.0, 1.0], seed=1)
    fitted = fit_temperatures(logits, survived)
    assert fitted.temperatures == pytest.approx([2.0, 0.5, 3.0, 1.0], rel=0.4)
    unseen = judge(fitted, *make_case(distortion=[2.0, 0.5, 3.0, 1.0], seed=2))
    assert max(unseen.ece_after) < 0.03
    assert unseen.ece_before[0] > 2 * unseen.ece_after[0]


def test_scaling_leaves_good_confidences_nearly_as_they_are():
    fitted = fit_temperatures(*make_case(distortion=[1.0] * 4, seed=3))
    assert fitted.temperatures == pytest.approx([1.0] * 4, rel=0.4)
    assert max(fitted.ece_before) < 0.03


@given(
    st.lists(st.tuples(st.integers(-4, 4), st.booleans()), min_size=2, max_size=30).filter(
        lambda cases: 0 < sum(yes for _, yes in cases) < len(cases)
    )
)
def test_area_under_curve_equals_its_definition(cases):
    score, happened = (np.array(part, float) for part in zip(*cases, strict=True))
    pairs = [
        1.0 if a > b else 0.5 if a == b else 0.0
        for a, yes in zip(score, happened, strict=True)
        for b, other in zip(score, happened, strict=True)
        if yes and not other
    ]
    assert area_under_curve(score, happened) == pytest.approx(np.mean(pairs))


def test_calibration_error_of_a_constant_bias_is_the_bias():
    predicted = np.linspace(0.2, 0.8, 500)
    assert expected_calibration_error(predicted, predicted + 0.1) == pytest.approx(0.1)
    assert expected_calibration_error(predicted, predicted) == 0.0


def test_the_temperature_file_is_what_sglang_reads(tmp_path):
    logits, survived = make_case(distortion=[2.0] * 4, seed=4, size=500)
    fitted = fit_temperatures(logits, survived)
    path = tmp_path / "sts.json"
    write_sts(fitted, path, dataset="made up")
    sts = pytest.importorskip("sglang.srt.speculative.dspark_components.dspark_sts")
    read = sts.load_sts_calibration_from_path(str(path))
    assert read.temperatures == pytest.approx(list(fitted.temperatures), abs=1e-4)
    assert set(json.loads(path.read_text())) == {
        "temperatures",
        "dataset",
        "num_samples",
        "ece_before",
        "ece_after",
    }


def test_the_reliability_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    logits, survived = make_case(distortion=[2.0] * 4, seed=5, size=400)
    path = tmp_path / "reliability.png"
    plot_reliability(fit_temperatures(logits, survived), logits, survived, path=path)
    assert path.read_bytes().startswith(b"\x89PNG")
