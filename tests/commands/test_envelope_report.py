"""From samples to the report: medians, paired ratios, groups, what is missing, and the files."""

import json

import pytest

from sglang_spec_ext.cli import main
from sglang_spec_ext.commands import bench_envelope_report as reporting
from sglang_spec_ext.commands.bench_envelope_load import Answer
from sglang_spec_ext.commands.bench_envelope_trace import predicted_tok_s, series

SETUPS = {
    "no speculation": {"family": "", "role": "none"},
    "DSPARK K=0": {"family": "DSPARK", "role": "fixed"},
    "DSPARK K=7": {"family": "DSPARK", "role": "fixed"},
    "DSPARK stock compact": {"family": "DSPARK", "role": "stock"},
    "DSPARK adaptive": {"family": "DSPARK", "role": "adaptive"},
    "EAGLE3 K=3": {"family": "EAGLE3", "role": "fixed"},
}


def samples(load, **rates):
    """`rates`: setup -> tokens per second, round by round."""
    return [
        {"setup": name, "load": load, "round": number, "tok_s": tok_s, "accept_length": None if "no" in name else 2.0}
        for name, found in rates.items()
        for number, tok_s in enumerate(found)
    ]


LEVEL = samples(
    1,
    **{
        "no speculation": [10, 20, 12],
        "DSPARK K=0": [9, 18, 11],
        "DSPARK K=7": [20, 30, 22],
        "DSPARK stock compact": [24, 25, 26],
        "DSPARK adaptive": [21, 33, 22],
        "EAGLE3 K=3": [90, 90, 90],
    },
)
MOVING = samples("shifting", **{"no speculation": [10], "DSPARK K=7": [10], "DSPARK adaptive": [11]})


def test_medians_spread_and_paired_ratios():
    (level,) = reporting.aggregate(LEVEL, SETUPS)["levels"]
    assert level["concurrency"] == 1
    assert level["tok_s"]["no speculation"] == {"median": 12, "min": 10, "max": 20, "runs": 3}
    assert level["accept_length"] == dict.fromkeys(set(SETUPS) - {"no speculation"}, 2.0)
    # each round against the same round: 21/20, 33/30, 22/22
    fixed = level["ratio_to_best_fixed"]["DSPARK adaptive"]
    assert (fixed["of"], fixed["median"], fixed["min"], fixed["max"]) == ("DSPARK K=7", 1.05, 1.0, 1.1)
    assert level["ratio_to_no_spec"]["DSPARK adaptive"]["median"] == pytest.approx(22 / 12)


def test_the_best_other_is_of_the_same_draft():
    """Another draft accepts differently, so that its K says nothing about this controller."""
    (level,) = reporting.aggregate(LEVEL, SETUPS)["levels"]
    assert level["ratio_to_best"]["DSPARK adaptive"]["of"] == "DSPARK stock compact"


def test_the_best_may_be_chosen_by_the_other_rounds():
    """K=7 is best in rounds two and three, compact in one and three, K=7 in one and two."""
    (level,) = reporting.aggregate(LEVEL, SETUPS)["levels"]
    found = level["ratio_to_best_of_other_rounds"]["DSPARK adaptive"]
    assert found == {"median": 21 / 20, "min": 1.0, "max": 33 / 25, "runs": 3}
    two_rounds = [sample for sample in LEVEL if sample["round"] < 2]
    (level,) = reporting.aggregate(two_rounds, SETUPS)["levels"]
    assert level["ratio_to_best_of_other_rounds"] == {"DSPARK adaptive": None}


def test_no_speculation_counts_in_the_rounds_of_the_draft_alone():
    """It was measured beside another draft as well, in an hour when the machine was faster."""
    other = [
        {"setup": "no speculation", "load": 1, "round": number, "tok_s": 99.0, "accept_length": None}
        for number in range(3, 8)
    ]
    alone, beside = (reporting.aggregate(found, SETUPS)["levels"][0] for found in (LEVEL, [*LEVEL, *other]))
    for ratio in ("ratio_to_best", "ratio_to_no_spec", "ratio_to_best_of_other_rounds"):
        assert beside[ratio] == alone[ratio]
    assert beside["tok_s"]["no speculation"]["runs"] == 8


def test_summary_is_worst_and_mean_over_levels():
    second = samples(8, **{"no speculation": [10], "DSPARK K=7": [5], "DSPARK adaptive": [9]})
    found = reporting.aggregate([*LEVEL, *second, *MOVING], SETUPS)
    assert [level["concurrency"] for level in found["levels"]] == [1, 8]
    summary = found["summary"]["DSPARK adaptive"]
    first = reporting.aggregate(LEVEL, SETUPS)["levels"][0]["ratio_to_best"]["DSPARK adaptive"]["median"]
    assert summary["worst_level"] == pytest.approx(min(0.9, first))
    assert summary["mean_of_levels"] == pytest.approx((0.9 + first) / 2)
    assert summary["shifting_to_best_fixed"] == pytest.approx(1.1)
    assert summary["worst_to_no_spec"] == pytest.approx(0.9)


def test_rounds_that_only_one_of_two_has_are_no_pair():
    found = reporting.aggregate(
        [
            {"setup": "DSPARK K=7", "load": 1, "round": 0, "tok_s": 5.0, "accept_length": None},
            {"setup": "DSPARK adaptive", "load": 1, "round": 1, "tok_s": 50.0, "accept_length": None},
        ],
        SETUPS,
    )
    assert found["levels"][0]["ratio_to_best"] == {"DSPARK adaptive": None}
    assert found["shifting"] is None


@pytest.fixture
def report():
    found = {
        "setups": SETUPS,
        "samples": [*LEVEL, *MOVING],
        "series": {
            "DSPARK adaptive": [
                {"t_s": 0.0, "tok_s": 10.0, "running": 1},
                {"t_s": 1.0, "tok_s": 12.0, "running": 2, "k": 3, "predicted_tok_s": 13.0},
                {"t_s": 2.0, "tok_s": 12.0, "running": 2, "k": 0, "predicted_tok_s": None},
            ]
        },
        "left_out": {
            "DSPARK stock compact, table": "no graphs",
            "EAGLE3 K=3 at 4": "out of time",
            "x at 1": "out of time",
        },
        "inactive": {"DSPARK adaptive": ["tiers lack 0"]},
        "load": {"rounds": 3, "tokens": 96, "cell_s": 15.0, "quick": False},
        "model": {"target": "tiny", "dtype": "bfloat16", "drafts": {"DSPARK": "tiny-dspark"}},
        "machine": {"cpu": "a CPU", "cores": 2, "devices": [], "system": "Linux"},
        "versions": {"sglang": "0.5.23"},
        "date": "2026-01-01",
        "command": "spec-ext bench envelope",
    }
    return {**reporting.aggregate(found["samples"], SETUPS), **found}


def test_markdown_marks_what_is_missed_and_what_was_not_measured(report):
    text = reporting.markdown(report)
    assert "| tokens/s at requests in flight | 1 | shifting |" in text
    assert "| DSPARK K=7 | 22.0 (20.0 to 30.0) | 10.0 |" in text
    assert "| EAGLE3 K=3 | 90.0 (90.0 to 90.0) | not measured |" in text
    assert "**0.88, missed**" in text  # 0.875 of stock compact
    assert "- DSPARK stock compact, table: no graphs\n- EAGLE3 K=3 at 4, x at 1: out of time\n" in text
    assert "- DSPARK adaptive says: tiers lack 0" in text
    assert "a CPU, 2 cores" in text
    assert "median of 1 to 3 of 3 rounds" in text  # the shifting load has one sample


def test_a_cell_that_lacks_a_later_round_alone_is_measured(report):
    report["left_out"]["DSPARK K=7 at 1"] = "out of time"
    assert "DSPARK K=7 at 1" not in reporting.markdown(report)


def test_table_and_plots_come_from_the_json_alone(report, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    stored = {key: value for key, value in report.items() if key not in {"levels", "shifting", "summary"}}
    path = tmp_path / "envelope.json"
    path.write_text(json.dumps(stored))
    assert main(["bench", "envelope", "--render", str(path), "--out", str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.strip() == reporting.markdown(report).strip()
    for name in ("envelope.png", "shifting-dspark-adaptive.png"):
        assert (tmp_path / "out" / name).read_bytes().startswith(b"\x89PNG")
    assert not (tmp_path / "out" / "envelope.json").exists()
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- envelope -->\nold\n<!-- /envelope -->\nafter\n")
    into = ["--into", str(page), "--out", str(tmp_path), "--no-plot"]
    assert main(["bench", "envelope", "--render", str(path), *into]) == 0
    assert page.read_text() == f"before\n<!-- envelope -->\n{reporting.markdown(report)}<!-- /envelope -->\nafter\n"
    page.write_text("no marks")
    assert main(["bench", "envelope", "--render", str(path), *into]) == 2
    capsys.readouterr()
    path.write_text('{"samples": 3}')
    assert main(["bench", "envelope", "--render", str(path), "--out", str(tmp_path)]) == 2
    assert "not a report of this command" in capsys.readouterr().err


def test_series_counts_tokens_by_second_and_requests_in_flight():
    answers = [
        Answer(100.0, 102.5, ((100.2, 1), (101.1, 2), (102.4, 1)), 2.0),
        Answer(101.4, 102.0, ((101.9, 5),), None),
    ]
    rows = series(answers, [])
    assert [(row["t_s"], row["tok_s"], row["running"]) for row in rows] == [(0.0, 1.0, 1), (1.0, 7.0, 2), (2.0, 1.0, 0)]


def test_prediction_is_the_controllers_formula():
    """K = 2 at three requests: 3 (1 + 0.5 + 0.25) tokens over (1 x 2 + 9 x 2 + 1) ms."""
    curve = {"points": [1, 16], "seconds": [0.001, 0.016], "captured_max": 0}
    bucket = {
        "context_len": 256,
        "tokens": curve,
        "batch": None,
        "draft": [{"k": 2, "points": [1, 8], "seconds": [0.001, 0.001], "captured_max": 0}],
    }
    seen = {
        "k": 2,
        "rates": [0.5, 0.5, 0.9],
        "cost_table": {"buckets": [bucket], "fixed_s": 0.0, "fingerprint": {}},
        "verify_ratio": 2.0,
        "draft_ratio": 2.0,
        "fixed_s": 0.001,
    }
    assert predicted_tok_s(seen, 3) == pytest.approx(5.25 / 0.021)
    assert predicted_tok_s({**seen, "cost_table": None}, 3) is None
    assert predicted_tok_s(seen, 0) is None
