"""Cost tables: fitting, lookup, files, both SPS forms, what is refused, and online correction."""

import bisect
import itertools
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_spec_ext.control.cost_files import (
    export_sps_additive,
    export_sps_steps,
    import_sps,
    load_cost_table,
    save_cost_table,
)
from sglang_spec_ext.control.cost_fit import DraftSample, VerifySample, fit_cost_table
from sglang_spec_ext.control.curve import CostTableError, Curve, isotonic
from sglang_spec_ext.control.live_cost import LiveCost


def true_verify_s(batch, tokens):
    return 0.004 + 0.00003 * batch + 0.00001 * tokens


def samples(pairs=((1, 8), (1, 64), (8, 64), (8, 256), (32, 256), (32, 1024)), repeats=5):
    rng = np.random.default_rng(0)
    verify = [
        VerifySample(
            batch=b, tokens=t, seconds=true_verify_s(b, t) * (3.0 if i == 0 else rng.uniform(0.99, 1.01))
        )
        for b, t in pairs
        for i in range(repeats)  # the first repeat is a stall: a median must not see it
    ]
    draft = [
        DraftSample(batch=b, k=k, seconds=0.0003 * max(k, 0.5))
        for b in (1, 32)
        for k in (0, 1, 3)
        for _ in range(repeats)
    ]
    return verify, draft


def test_fit_tells_batch_and_tokens_apart():
    table = fit_cost_table(*samples())
    for batch, tokens in ((1, 8), (8, 256), (32, 1024), (1, 1024), (32, 8)):
        assert table.verify_s(tokens, batch) == pytest.approx(true_verify_s(batch, tokens), rel=0.02)
    assert table.draft_s(0, 8) == pytest.approx(0.00015)
    assert table.draft_s(2, 8) == pytest.approx(0.0006)  # a line between measured K
    assert table.draft_s(5, 8) == pytest.approx(0.0015)  # the last slope beyond


def test_fit_refuses_what_it_cannot_tell_apart():
    with pytest.raises(CostTableError, match="same token count at two batch sizes"):
        fit_cost_table(*samples(pairs=((1, 8), (1, 16), (8, 64), (8, 128))))
    with pytest.raises(CostTableError, match="repeats"):
        fit_cost_table(*samples(repeats=2))
    verify, draft = samples()
    with pytest.raises(CostTableError, match="finite"):
        fit_cost_table([*verify, VerifySample(batch=1, tokens=8, seconds=float("nan"))], draft)
    with pytest.raises(CostTableError, match="none"):
        fit_cost_table([], draft)


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_isotonic_is_sorted_and_keeps_the_mean(values):
    smooth = isotonic(values)
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(smooth))
    assert np.mean(smooth) == pytest.approx(np.mean(values))
    assert isotonic(sorted(values)) == pytest.approx(sorted(values))


@given(st.lists(st.integers(1, 500), min_size=2, max_size=8, unique=True), st.data())
def test_curve_is_a_staircase_then_lines_and_keeps_rising(sizes, data):
    points = sorted(sizes)
    seconds = np.cumsum([data.draw(st.floats(0.001, 1)) for _ in points])
    captured = data.draw(st.sampled_from([0, *points]))
    curve = Curve(tuple(points), tuple(seconds.tolist()), captured)
    everywhere = np.arange(1, 2 * points[-1])
    values = curve.at_many(everywhere)
    assert values == pytest.approx([curve.at(int(x)) for x in everywhere])
    assert (np.diff(values) >= -1e-12).all()
    assert curve.at(3 * points[-1]) > curve.at(2 * points[-1]) > seconds[-1]
    for x in range(1, captured + 1):
        assert curve.at(x) == seconds[bisect.bisect_left(points, x)]


@pytest.mark.parametrize(
    ("points", "seconds", "reason"),
    [
        ([1, 8, 4], [1.0, 2.0, 3.0], "strictly increasing"),
        ([0, 8], [1.0, 2.0], ">= 1"),
        ([1, 8], [1.0, 0.0], "> 0"),
        ([1, 8], [-1.0, 2.0], "> 0"),
        ([1, 8], [1.0, 0.5], "fall"),
        ([1, 8, 64], [1.0, 2.0], "truncated"),
        ([8], [1.0], "at least two"),
    ],
)
def test_broken_tables_are_refused_with_a_reason(tmp_path, make_table, points, seconds, reason):
    path = tmp_path / "table.json"
    save_cost_table(make_table(), path)
    raw = json.loads(path.read_text())
    raw["buckets"][0]["tokens"] |= {"points": points, "seconds": seconds}
    path.write_text(json.dumps(raw))
    with pytest.raises(CostTableError, match=reason):
        load_cost_table(path)


def test_file_round_trip_and_fingerprint(tmp_path):
    path = tmp_path / "table.json"
    verify, draft = samples()
    here = {"model": "m", "device": "cpu"}
    table = fit_cost_table(verify, draft, captured_tokens=256, fingerprint=here)
    save_cost_table(table, path)
    again = load_cost_table(path, here)
    assert again == table
    assert again.digest() == table.digest()
    with pytest.raises(CostTableError, match="device: file 'cpu', here 'gpu'"):
        load_cost_table(path, {"model": "m", "device": "gpu"})
    path.write_text(path.read_text()[:-30])
    with pytest.raises(CostTableError, match="not a cost table"):
        load_cost_table(path)
    path.write_text(json.dumps({**json.loads(json.dumps(table.as_dict())), "format": "x", "version": 1}))
    with pytest.raises(CostTableError, match="format"):
        load_cost_table(path)


def floor_lookup(raw, tokens):
    """SGLang's step form."""
    index = max(0, bisect.bisect_right(raw["sample_batch_tokens"], tokens) - 1)
    return 1.0 / raw["sample_steps_per_sec"][index]


def test_exported_steps_give_our_time_under_sglang_s_lookup(make_table):
    table = make_table(
        points=(8, 16, 64, 256), seconds=(0.01, 0.011, 0.02, 0.05), captured=256, draft_s=0.001
    )
    raw = json.loads(export_sps_steps(table, gamma=7))
    for tokens in range(1, 257):
        assert floor_lookup(raw, tokens) == pytest.approx(table.verify_s(tokens, 1) + table.draft_s(7, 1))
    assert raw["max_batch_tokens"] == 256


def test_exported_additive_form_gives_our_time_and_comes_back():
    table = fit_cost_table(*samples(), captured_tokens=256)
    raw = json.loads(export_sps_additive(table, gamma=3))

    def theirs(batch, tokens):
        alpha = np.interp(batch, raw["bs_probes"], raw["alpha_seconds"])
        return raw["bias_seconds"] + alpha + np.interp(tokens, raw["m_probes"], raw["theta_seconds"])

    for batch, tokens in ((1, 8), (8, 9), (8, 64), (32, 256), (32, 1024)):
        ours = table.verify_s(tokens, batch) + table.draft_s(3, batch)
        assert theirs(batch, tokens) == pytest.approx(ours)
    back = import_sps(json.dumps(raw), gamma=3, draft_s=0.0009)
    for batch, tokens in ((1, 8), (8, 64), (32, 1024)):
        assert back.verify_s(tokens, batch) + 0.0009 == pytest.approx(theirs(batch, tokens))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sample_steps_per_sec": [100.0, 0.0]}, "> 0"),
        ({"sample_steps_per_sec": [100.0]}, "truncated"),
        ({"sample_batch_tokens": [64, 8]}, "increasing"),
        ({"sample_batch_tokens": [8], "sample_steps_per_sec": [100.0], "max_batch_tokens": 8}, "no slope"),
        ({"max_batch_tokens": 512}, "truncated"),
        ({"bias_second": 1.0}, "bias_second"),
    ],
)
def test_sps_tables_that_would_verify_everything_are_refused(change, reason):
    raw = {"sample_batch_tokens": [8, 64], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 64}
    assert import_sps(json.dumps(raw), gamma=7, draft_s=0.001).verify_s(64, 8) == pytest.approx(0.019)
    with pytest.raises(CostTableError, match=reason):
        import_sps(json.dumps(raw | change), gamma=7, draft_s=0.001)


def test_coverage_is_demanded_by_name(make_table):
    table = make_table()
    table.require_coverage(4096)
    with pytest.raises(CostTableError, match="measured up to 4096, but a full batch verifies 8192"):
        table.require_coverage(8192)


@pytest.mark.parametrize("bias", [0.5, 2.0])
def test_residuals_correct_a_wrong_table_for_sizes_never_run(make_table, bias):
    truth, live = make_table(), LiveCost(make_table(bias=bias))
    rng = np.random.default_rng(1)
    for _ in range(20):
        step_s = (truth.draft_s(3, 8) + truth.verify_s(32, 8)) * rng.lognormal(0, 0.02)
        live.observe(k=3, tokens=32, batch=8, step_s=step_s)
    for tokens in (8, 64, 4096):
        assert live.verify_s(tokens, 8) == pytest.approx(truth.verify_s(tokens, 8), rel=0.05)
    assert live.report()["verify_ratio"] == pytest.approx(1 / bias, rel=0.05)
    assert not live.drifting


def test_drift_is_reported_and_bad_times_are_dropped(make_table):
    table, live = make_table(), LiveCost(make_table())
    rng = np.random.default_rng(1)
    drifted = []
    for step in range(240):
        factor = 1.0 if step < 190 else 1.4
        live.observe(k=0, tokens=8, batch=8, verify_s=table.verify_s(8, 8) * factor * rng.lognormal(0, 0.01))
        drifted.append(live.drifting)
    assert not any(drifted[:190])
    assert sum(drifted[190:]) >= 10
    assert not any(drifted[-10:])  # it lasted, so all sizes were shifted, those never run too
    assert live.verify_s(4096, 8) == pytest.approx(1.4 * table.verify_s(4096, 8), rel=0.05)
    for bad in (float("nan"), float("inf"), 0.0, -1.0):
        live.observe(k=0, tokens=8, batch=8, verify_s=bad)
    assert live.report()["dropped"] == 4
