"""Capacity plans: step times, ladder and GPU counts against numbers worked out by hand."""

import json

import pytest

from sglang_spec_ext.cli import main
from sglang_spec_ext.control.capacity import CapacityError, capacity, load_plan, roofline_of
from sglang_spec_ext.control.roofline import PRESETS

# 1 TB/s, 100 TFLOP/s, everything reached in full: the weights take 2 ms, a token 20 us of arithmetic, the K/V of a
# request 1 us; the draft's weights take 0.2 ms, a block of 8 costs 16 us of arithmetic a request
PLAN = {
    "gpu": {"name": "round", "bandwidth_bytes_s": 1e12, "flop_s": 1e14, "memory_bytes": 3e9, "source": "invented"},
    "model": {"params": 1e9, "bytes_per_param": 2, "kv_bytes_per_token": 1000},
    "draft": {"drafting": "block", "params": 1e8, "bytes_per_param": 2, "max_k": 7, "acceptance": 0.5},
    "tiers": [0, 3],
    "context_len": 1000,
    "max_batch": 128,
    "overhead_s": 0.0,
    "efficiency": {"bandwidth": 1.0, "flop": 1.0, "memory": 1.0},
    "day": [{"hours": 20, "tok_s": 800}, {"hours": 4, "tok_s": 100000}],
}


def plan(**changes):
    return load_plan(json.dumps({**PLAN, **changes}))


def test_step_times_and_rates_by_hand():
    cost = roofline_of(plan())
    assert cost.verify_s(1, 1) == pytest.approx(2.001e-3)  # memory
    assert cost.verify_s(400, 100) == pytest.approx(8e-3)  # arithmetic
    assert (cost.draft_s(0, 1), cost.draft_s(3, 1)) == (0.0, pytest.approx(0.2e-3))
    assert cost.draft_s(3, 100) == pytest.approx(1.6e-3)  # the whole block, whatever K
    assert cost.expected_tokens(3) == pytest.approx(1.875)
    assert cost.tok_s(3, 1) == pytest.approx(1.875 / 2.201e-3)
    assert cost.tok_s(0, 100) == pytest.approx(100 / 2.1e-3)
    assert cost.tok_s(3, 100) == pytest.approx(187.5 / 9.6e-3)


def test_serial_drafts_pay_for_each_token_and_acceptance_may_differ_by_position():
    draft = {**PLAN["draft"], "drafting": "serial", "acceptance": [0.5, 0.5, 0.0]}
    cost = roofline_of(plan(draft=draft))
    assert cost.draft_s(3, 1) == pytest.approx(0.6e-3)
    assert cost.expected_tokens(3) == pytest.approx(1.75)


def test_replicas_share_bandwidth_arithmetic_and_memory():
    one, two = roofline_of(plan()), roofline_of(plan(gpus_per_replica=2))
    assert two.verify_s(400, 100) == pytest.approx(one.verify_s(400, 100) / 2)
    assert one.largest_batch() == int(0.8e9 // (1000 * 1008))
    assert two.largest_batch() == int(3.8e9 // (1000 * 1008))


def test_ladder_switches_where_the_rates_cross():
    result = capacity(plan())
    cost = roofline_of(plan())
    (_, last, first_k), (_, end, second_k) = result["ladder"]
    assert (first_k, second_k, end) == (3, 0, 128)
    assert cost.tok_s(3, last) > cost.tok_s(0, last)
    assert cost.tok_s(3, last + 1) < cost.tok_s(0, last + 1)


def test_gpu_counts_of_the_day():
    """At most 128 requests: K=0 gives 128 / 2.56 ms = 50,000 tokens/s; K=3 gives 240 / 12.288 ms = 19,531."""
    found = capacity(plan())["policies"]
    assert found["K=0"]["replica_tok_s"] == pytest.approx(50_000)
    assert found["K=3"]["replica_tok_s"] == pytest.approx(1.875 / 96e-6)  # from 26 requests on, arithmetic alone
    assert found["adaptive"]["peak_gpus"] == found["K=0"]["peak_gpus"] == 2
    assert found["K=3"]["peak_gpus"] == 6
    quiet, busy = found["adaptive"]["day"]
    assert (quiet["replicas"], quiet["batch"], quiet["k"]) == (1, 1, 3)
    assert quiet["tok_s_per_request"] == pytest.approx(1.875 / 2.201e-3)
    assert (busy["replicas"], busy["k"]) == (2, 0)
    assert found["K=0"]["day"][0]["tok_s_per_request"] == pytest.approx(2 / (2.002e-3) / 2)
    assert found["adaptive"]["gpu_hours"] == 20 * 1 + 4 * 2


def test_promised_speed_limits_the_batch():
    """600 tokens/s a request is above plain decoding's 499.75, so K=0 alone serves nobody."""
    found = capacity(plan(min_tok_s_per_request=600))["policies"]
    assert found["K=0"] == {"served": False, "reason": "one request alone is slower than min_tok_s_per_request"}
    assert found["adaptive"]["served"]
    assert all(part["tok_s_per_request"] >= 600 for part in found["adaptive"]["day"])


def test_no_demand_needs_no_gpu():
    (hour,) = capacity(plan(day=[{"hours": 24, "tok_s": 0}]))["policies"]["adaptive"]["day"]
    assert (hour["replicas"], hour["gpus"], hour["batch"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"gpu": "A100"}, "must be one of H100, H200, B200"),
        ({"tiers": [0, 9]}, "the draft makes 7 tokens"),
        ({"tiers": [3, 0]}, "tiers: must be distinct and rising"),
        ({"draft": {**PLAN["draft"], "acceptance": [0.5]}}, "needs one value a position"),
        ({"draft": {**PLAN["draft"], "acceptance": 1.5}}, "must be in 0..1"),
        ({"day": []}, "needs at least one stretch"),
        ({"day": [{"hours": 0, "tok_s": 1}]}, "day[0].hours: must be finite and > 0"),
        ({"context_len": 0}, "context_len: must be finite and > 0"),
        ({"colour": 1}, "unknown field"),
    ],
)
def test_bad_plans_name_field_and_rule(changes, rule):
    with pytest.raises(CapacityError) as caught:
        plan(**changes)
    assert rule in str(caught.value)


def test_a_model_that_does_not_fit():
    with pytest.raises(CapacityError, match="do not fit into 1 x 3 GB"):
        capacity(plan(model={**PLAN["model"], "bytes_per_param": 4}))


def test_presets_are_dense_figures_with_a_source():
    assert {name: (gpu.bandwidth_bytes_s, gpu.memory_bytes) for name, gpu in PRESETS.items()} == {
        "H100": (3.35e12, 80e9),
        "H200": (4.8e12, 141e9),
        "B200": (8e12, 180e9),
    }
    assert all(gpu.source for gpu in PRESETS.values())


def test_command_prints_a_table_or_one_json_object(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(PLAN))
    assert main(["simulate", "capacity", str(path)]) == 0
    assert "GPUs at the peak" in capsys.readouterr().out
    assert main(["simulate", "capacity", str(path), "--gpu", "H100", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gpu"]["name"] == "H100 SXM"
    path.write_text("{}")
    assert main(["simulate", "capacity", str(path)]) == 2
    assert str(path) in capsys.readouterr().err
