"""Both published forms of a ladder by batch size, and every way to get them wrong."""

import json

import pytest

from sglang_spec_ext.control.ladder import LadderError, check_tiers, from_sglang_adaptive, from_vllm_table


def test_vllm_bands_and_gaps():
    ladder = from_vllm_table([[1, 4, 7], [9, 16, 3], [17, 64, 0]], max_k=7)
    caps = {1: 7, 4: 7, 8: 7, 9: 3, 16: 3, 17: 0, 64: 0, 1000: 0}
    assert {batch: ladder.cap(batch) for batch in caps} == caps


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "list of"),
        ("1-4:7", "list of"),
        ([[2, 4, 3]], "start at 1"),
        ([[1, 4, 3], [4, 8, 1]], r"\[1\]: starts at 4"),
        ([[1, 8, 3], [2, 4, 1]], r"\[1\]: starts at 2"),
        ([[1, 4, 9]], "0..7"),
        ([[1, 4, -1]], "0..7"),
        ([[4, 1, 3]], "first <= last"),
        ([[1, 4, True]], "three integers"),
        ([[1, 4]], "three integers"),
        ([[1, 4, 3.0]], "three integers"),
    ],
)
def test_vllm_errors_name_the_row(rows, reason):
    with pytest.raises(LadderError, match=reason):
        from_vllm_table(rows, max_k=7)


def test_sglang_default_config():
    slots = {
        "1": {
            "candidate_steps": [1, 3, 5, 7],
            "up_hysteresis": 0.0,
            "down_hysteresis": -0.25,
            "ceiling_coeff": 0,
        },
        "8": {"candidate_steps": [0, 1, 3], "up_hysteresis": 0.0, "down_hysteresis": 0.0},
        "64": {"candidate_steps": [0]},
    }
    ladder = from_sglang_adaptive(json.dumps(slots))
    assert [ladder.cap(batch) for batch in (1, 7, 8, 63, 64, 500)] == [7, 7, 3, 3, 0, 0]
    assert ladder.ignored == ("ceiling_coeff", "down_hysteresis", "up_hysteresis")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[]", "object"),
        ("{", "not JSON"),
        ("{}", "candidate_steps"),
        ('{"1": [1, 3]}', "'1'.*object"),
        ('{"1": {"candidate_steps": [true]}}', "candidate_steps"),
        ('{"1": {"candidate_steps": []}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [-1]}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [1, 1]}}', "repeats"),
        ('{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [3]}}', "given twice"),
        ('{"8": {"candidate_steps": [1]}, "08": {"candidate_steps": [3]}}', "same batch size as key '8'"),
        ('{"-8": {"candidate_steps": [1]}}', "'-8'"),
        ('{"0": {"candidate_steps": [1]}}', ">= 1"),
        ('{"²": {"candidate_steps": [1]}}', "neither"),
        ('{"1": {"candidate_step": [1]}}', "unknown key 'candidate_step'"),
        ('{"1": {"candidate_steps": [1], "ema_alpha": NaN}}', "NaN"),
        ('{"1": {"candidate_steps": [1], "ema_alpha": 1e999}}', "finite"),
        ('{"1": {"candidate_steps": [1], "ema_alpha": 2.0}}', "ema_alpha"),
        ('{"1": {"candidate_steps": [1], "ema_alpha": 0}}', "never learns"),
        ('{"1": {"candidate_steps": [1], "update_interval": 0}}', "update_interval"),
        ('{"1": {"candidate_steps": [1], "warmup_batches": -1}}', "warmup_batches"),
        ('{"1": {"candidate_steps": [1, 3], "up_hysteresis": -1, "down_hysteresis": 1.5}}', "flips"),
    ],
)
def test_sglang_errors_name_the_key(text, reason):
    with pytest.raises(LadderError, match=reason):
        from_sglang_adaptive(text)


@pytest.mark.parametrize("tiers", [[], [0], [3, 1], [1, 1], [True, 3], [1.0], [-1, 3], [0, 999]])
def test_tiers_are_checked(tiers):
    with pytest.raises(LadderError, match="tiers"):
        check_tiers(tiers)
