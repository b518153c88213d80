"""Steering a running server: what may be changed, what is refused with the rule, and what is shown."""

import concurrent.futures
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from sglang_spec_ext.runtime import ControlError, SpecExt

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


def test_the_state_tells_what_runs(adaptive) -> None:
    state = adaptive.control.state()
    assert state["mode"] == "adaptive"
    assert state["worker"].startswith("SpecExt")
    assert state["verify"] == ("ragged" if "ragged" in adaptive.setup.flags else "uniform")
    waits = state["estimator"] is not None and not state["estimator"]["warm"]
    assert [reason.partition(":")[0] for reason in state["inactive"]] == ["margin estimator is warming up"] * waits
    assert ("measured at this start" in state["profile"]) or ("kept from an earlier start" in state["profile"])
    assert state["cost_table"] == adaptive.control.cost_table()
    assert {curve["k"] for curve in state["cost_table"]["buckets"][0]["draft"]} >= set(state["tiers"]) - {0}


def test_modes_pins_and_reset_under_load_drop_no_request(adaptive) -> None:
    tiers = adaptive.control.state()["tiers"]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        running = [pool.submit(adaptive.generate, [5, 6, 7 + i], tokens=200) for i in range(8)]
        for k in tiers:
            adaptive.control.pin(k)
            assert adaptive.control.state()["pinned"] == k
        adaptive.control.unpin()
        for mode in ("shadow", "off", "adaptive"):
            adaptive.control.set_mode(mode)
            assert adaptive.control.state()["mode"] == mode
        adaptive.control.reset()
        answers = [future.result()[0] for future in running]
    assert [len(answer["output_ids"]) for answer in answers] == [200] * 8
    assert adaptive.control.state()["pinned"] is None


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"spec_ext_pin": 99}, "must be one of the tiers"),
        ({"spec_ext_pin": 0.5}, "must be one of the tiers"),
        ({"spec_ext_mode": 7}, "must be one of 0 (off)"),
        ({"spec_ext_unpin": 0}, "must be 1"),
        ({"spec_ext_reset": 2}, "must be 1"),
        ({"spec_ext_speed": 1}, "known keys are"),
    ],
)
def test_wrong_values_are_a_400_with_the_rule(adaptive, changes, rule) -> None:
    before = adaptive.control.state()["pinned"]
    answer = adaptive.client.post("/set_internal_state", json={"server_args": changes})
    assert answer.status_code == 400
    assert rule in answer.text
    assert adaptive.control.state()["pinned"] == before


def test_a_pin_needs_the_controller_to_act(adaptive) -> None:
    adaptive.control.set_mode("shadow")
    try:
        with pytest.raises(ControlError, match="the mode is shadow"):
            adaptive.control.pin(0)
    finally:
        adaptive.control.set_mode("adaptive")


def test_shadow_decides_and_changes_nothing(adaptive) -> None:
    adaptive.control.set_mode("shadow")
    try:
        adaptive.control.reset()
        adaptive.generate([5, 6, 7])
        state = adaptive.control.state()
        assert state["reasons"].keys() == {"shadow"}
        assert state["moves"] == {} or all(move.endswith(f"->{max(state['tiers'])}") for move in state["moves"])
        assert state["ledger"]["chosen_tok_s"] > 0
    finally:
        adaptive.control.set_mode("adaptive")


def test_metrics_are_read_by_prometheus_own_parser(adaptive) -> None:
    from prometheus_client.parser import text_string_to_metric_families

    for k in adaptive.control.state()["tiers"]:
        adaptive.control.pin(k)
        adaptive.generate([[5, 6, 7], [8, 9]], tokens=80)
    adaptive.control.unpin()
    adaptive.generate([5, 6, 7], tokens=200)
    text = adaptive.client.get("/metrics").text
    found = {family.name: family for family in text_string_to_metric_families(text)}
    ours = {name.removeprefix("sglang:spec_ext_") for name in found if name.startswith("sglang:spec_ext_")}
    assert ours >= {
        "steps", "switches", "draft_tokens", "accepted_tokens", "wasted_draft_tokens", "k", "verify_width",
        "accept_length", "verify_seconds", "step_seconds", "predicted_tokens_per_second",
        "measured_tokens_per_second", "regret_tokens_per_second", "dropped_samples",
    }  # fmt: skip
    drafted = by_k(found["sglang:spec_ext_draft_tokens"])
    accepted = by_k(found["sglang:spec_ext_accepted_tokens"])
    assert drafted[0] == accepted[0] == 0
    assert all(0 < accepted[k] < drafted[k] for k in drafted if k)  # at a K's own drafts, never above 1


def by_k(family) -> dict[int, float]:
    totals: dict[int, float] = {}
    for sample in family.samples:
        if sample.name.endswith("_total"):
            k = int(sample.labels["k"])
            totals[k] = totals.get(k, 0.0) + sample.value
    return totals


def test_without_the_servers_key_nothing_is_reachable(adaptive) -> None:
    import httpx

    url = str(adaptive.client.base_url)
    assert httpx.post(f"{url}/set_internal_state", json={"server_args": {"spec_ext_mode": 0}}).status_code == 401
    assert httpx.get(f"{url}/server_info").status_code == 401
    with pytest.raises(ControlError, match="401"):
        SpecExt(url).set_mode("off")
    assert adaptive.control.state()["mode"] == "adaptive"


def test_a_server_that_is_not_there_is_named() -> None:
    with pytest.raises(ControlError, match="cannot be reached"):
        SpecExt("http://127.0.0.1:9").state()


def test_top_shows_what_the_state_holds(adaptive, capsys) -> None:
    import argparse

    from sglang_spec_ext.commands import top

    parser = argparse.ArgumentParser()
    top.configure(parser)
    adaptive.generate([5, 6, 7], tokens=100)
    key = adaptive.client.headers["Authorization"].removeprefix("Bearer ")
    arguments = [str(adaptive.client.base_url), "--api-key", key]
    assert top.run(parser.parse_args([*arguments, "--once"])) == 0
    shown = capsys.readouterr().out
    state = adaptive.control.state()
    assert state["worker"] in shown
    assert "mode adaptive" in shown
    assert all(reason in shown for reason in state["reasons"])
    assert top.run(parser.parse_args([*arguments, "--json"])) == 0
    assert json.loads(capsys.readouterr().out)["tiers"] == state["tiers"]


def test_top_redraws_on_a_terminal_until_it_is_interrupted(adaptive) -> None:
    key = adaptive.client.headers["Authorization"].removeprefix("Bearer ")
    # a terminal's program takes Ctrl-C; one started by a shell's background job would ignore it
    command = ["env", "--default-signal=INT", sys.executable, "-m", "sglang_spec_ext.cli", "top"]
    command += [str(adaptive.client.base_url), "--interval", "0.2"]
    ours, theirs = pty.openpty()
    environment = {**os.environ, "SGLANG_API_KEY": key, "TERM": "xterm", "COLUMNS": "100", "LINES": "60"}
    shown = b""
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as process:
        os.close(theirs)
        try:
            deadline = time.monotonic() + 120
            while shown.count(b"mode adaptive") < 3 and time.monotonic() < deadline:
                if select.select([ours], [], [], 1.0)[0]:
                    shown += os.read(ours, 65536)
            process.send_signal(signal.SIGINT)
            deadline = time.monotonic() + 30
            # what is left must be read, or its last write waits
            while time.monotonic() < deadline and select.select([ours], [], [], 5.0)[0]:
                try:
                    shown += os.read(ours, 65536)
                except OSError:  # the terminal's other end is closed
                    break
            assert process.wait(30) == 0
        finally:
            process.kill()
            os.close(ours)
    text = shown.decode(errors="replace")
    assert text.count("mode adaptive") >= 3
    assert "\x1b[" in text  # drawn over the frame before, not below it
    assert adaptive.control.state()["worker"] in text
    assert "Traceback" not in text
