"""The load and the loop around it: bounds of requests in flight, turns, time limit, failures by name."""

import argparse
import asyncio
import json
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_spec_ext.cli import UsageError, main
from sglang_spec_ext.commands import bench_envelope
from sglang_spec_ext.commands import bench_envelope_load as load
from sglang_spec_ext.commands import bench_envelope_measure as measure
from sglang_spec_ext.commands import bench_envelope_setups as setting
from sglang_spec_ext.commands.bench_envelope_fleet import Fleet, Unavailable, reason_of
from sglang_spec_ext.commands.bench_envelope_setups import Role, Setup


class Client:
    """Stands for `sglang.benchmark.serving`: answers after a few turns of the event loop."""

    RequestFuncInput = SimpleNamespace

    def __init__(self, fail: bool = False) -> None:
        self.fail, self.running, self.sent = fail, 0, []  # sent: (answer length, in flight with it)

    async def async_request_sglang_generate(self, request):
        self.running += 1
        self.sent.append((request.output_len, self.running))
        start = time.perf_counter()
        for _ in range(request.output_len):
            await asyncio.sleep(0)
        self.running -= 1
        return SimpleNamespace(
            success=not self.fail, error="refused", output_len=request.output_len, start_time=start, ttft=0.0,
            itl=[0.0] * (request.output_len - 1), spec_accept_length=2.0,
        )  # fmt: skip


def phase(concurrency, *lengths):
    return load.Phase(concurrency, tuple(load.Ask("p", 1, length) for length in lengths))


def test_a_phase_holds_its_bound_and_the_next_one_starts_while_it_drains():
    client = Client()
    answers = asyncio.run(load._drive(client, "url", [phase(1, 3, 3), phase(4, *[50] * 8), phase(2, 5, 5)]))
    assert [answer.tokens for answer in answers] == [3, 3, *[50] * 8, 5, 5]
    in_flight = [running for _, running in client.sent]
    assert max(in_flight[:2]) == 1
    assert max(in_flight[2:10]) == 4
    assert max(in_flight[10:]) <= 2


def test_a_refused_request_ends_the_load_with_the_servers_words():
    with pytest.raises(load.LoadFailed, match="refused"):
        asyncio.run(load._drive(Client(fail=True), "url", [phase(1, 3)]))


def test_throughput_and_accept_length_of_a_load():
    answers = [load.Answer(0.0, 2.0, ((1.0, 10),), 2.0), load.Answer(1.0, 4.0, ((2.0, 30),), 3.0)]
    assert load.tokens_per_second(answers) == 10.0
    assert load.accept_length(answers) == pytest.approx(40 / 15)  # tokens over steps
    assert load.accept_length([load.Answer(0.0, 1.0, ((1.0, 1),), None)]) is None


def test_throughput_of_a_stretch_counts_every_token_that_came_in_it():
    answers = [
        load.Answer(0.0, 9.0, ((1.0, 5), (2.0, 1), (5.9, 1), (6.0, 9)), None),
        load.Answer(3.0, 4.0, ((3.5, 4),), None),
    ]
    assert load.rate_between(answers, 2.0, 6.0) == 6 / 4.0


class Prompts(load.Prompts):
    """Four prompts that need no tokenizer."""

    def __init__(self) -> None:
        self._texts, self._lens = list("abcd"), [1, 1, 1, 1]


def test_prompts_come_in_turn_and_the_shifting_load_varies_lengths():
    assert [ask.prompt for ask in Prompts().take(6, start=3, max_tokens=(5,))] == list("dabcda")
    phases = load.shifting(Prompts(), waves=1, tokens=40, start=0, largest=8)
    assert [part.concurrency for part in phases] == [1, 8, 4, 8, 1]
    assert [len(part.asks) for part in phases] == [4, 8, 4, 8, 4]
    lengths = {ask.max_tokens for part in phases for ask in part.asks}
    assert len(lengths) > 4
    assert min(lengths) >= 20
    assert max(lengths) <= 60


SETUPS = [
    Setup("no speculation", "plain", "", Role.NONE),
    Setup("D K=0", "ours", "D", Role.FIXED, pin=0),
    Setup("D shadow", "ours", "D", Role.SHADOW),
    Setup("D adaptive", "ours adaptive", "D", Role.ADAPTIVE),
]


class Control:
    """Notes how a server was steered."""

    def __init__(self) -> None:
        self.calls = []

    def unpin(self):
        self.calls.append("unpin")

    def set_mode(self, mode):
        self.calls.append(mode)

    def pin(self, k):
        self.calls.append(k)

    def state(self):
        return {"inactive": ["tiers lack 0"]}


@pytest.fixture
def bench(monkeypatch):
    """Return a function that runs the loop over servers that answer at once."""

    def run(
        *, rounds=2, first_round=0, side_by_side=True, deadline=float("inf"), broken=(), shifting=None,
        interrupted_after=None,
    ):  # fmt: skip
        controls, driven = {"ours": Control(), "ours adaptive": Control()}, []

        def get(name):
            if name in broken:
                raise Unavailable(f"{name} does not start")
            return SimpleNamespace(url=name, control=controls.get(name))

        def drive(url, phases):
            driven.append(phases)
            if len(driven) == interrupted_after:
                raise KeyboardInterrupt
            asks = [ask for part in phases for ask in part.asks]
            return [load.Answer(i, i + 1.0, ((i + 0.5, ask.max_tokens),), None) for i, ask in enumerate(asks)]

        monkeypatch.setattr(load, "drive", drive)
        amount = measure.Amount(
            concurrency=(1, 2), rounds=rounds, tokens=8, cell_s=0.0, deadline=deadline,
            shifting_rounds=rounds if shifting is None else shifting,
            first_round=first_round,
        )  # fmt: skip
        bench = measure.Bench(
            SimpleNamespace(get=get), SETUPS, Prompts(), amount, lambda _: None, side_by_side=side_by_side
        )
        found = bench.run()
        run.driven = driven
        return found, controls

    return run


def test_every_setting_meets_every_load_in_every_round_in_turn(bench):
    found, controls = bench()
    keys = [(sample["round"], sample["load"], sample["setup"]) for sample in found.samples]
    assert len(set(keys)) == len(keys) == 2 * 3 * 4
    assert [setup for _, load, setup in keys[:4]] == ["no speculation", "D K=0", "D shadow", "D adaptive"]
    assert [setup for _, load, setup in keys[12:16]] == ["D K=0", "D shadow", "D adaptive", "no speculation"]
    assert controls["ours"].calls[:4] == ["adaptive", 0, "unpin", "shadow"]
    assert controls["ours adaptive"].calls == []  # it stays up, as in production
    assert found.left_out == {}
    assert found.inactive == {"D adaptive": ["tiers lack 0"]}
    assert set(found.series) == {setup.name for setup in SETUPS}


def test_a_level_is_measured_while_it_is_full(bench):
    """Behind a lead and before a mark, so that neither the start nor the drain of a batch is in it."""
    found, _ = bench(rounds=1, shifting=0)
    timed, *loads = [phases for phases in bench.driven if phases[0].concurrency == 2]
    assert [len(part.asks) for part in timed] == [2]
    assert [[len(part.asks) for part in parts] for parts in loads] == [[2, 2, 1]] * 4
    assert [parts[2].asks[0].max_tokens for parts in loads] == [1, 1, 1, 1]
    for sample, (_, measured, _) in zip([s for s in found.samples if s["load"] == 2], loads, strict=True):
        tokens = sum(ask.max_tokens for ask in measured.asks)
        assert (sample["requests"], sample["tokens"], sample["tok_s"]) == (2, tokens, tokens / 2.0)


def test_one_server_at_a_time_does_all_its_loads_before_the_next_starts(bench):
    found, _ = bench(rounds=1, side_by_side=False)
    names = [sample["setup"] for sample in found.samples]
    assert names == ["no speculation"] * 3 + ["D K=0", "D shadow"] * 3 + ["D adaptive"] * 3


def test_the_shifting_load_can_be_left_out(bench):
    found, _ = bench(rounds=1, shifting=0)
    assert {sample["load"] for sample in found.samples} == {1, 2}
    assert found.series == {}
    found, _ = bench(rounds=3, shifting=1)
    assert {sample["round"] for sample in found.samples if sample["load"] == "shifting"} == {0}
    assert {sample["round"] for sample in found.samples} == {0, 1, 2}


def test_rounds_of_another_draft_have_numbers_of_their_own(bench):
    found, _ = bench(rounds=2, first_round=4)
    assert [sample["round"] for sample in found.samples] == [4] * 12 + [5] * 12
    assert set(found.series) == {setup.name for setup in SETUPS}


def test_nothing_starts_after_the_limit_and_a_server_that_fails_is_named(bench):
    found, _ = bench(deadline=0.0)
    assert found.samples == []
    assert found.left_out["D adaptive at 2"] == "out of time"
    found, _ = bench(broken=("plain",))
    assert found.left_out == {"no speculation": "plain does not start"}
    assert {sample["setup"] for sample in found.samples} == {"D K=0", "D shadow", "D adaptive"}


def test_an_interrupt_keeps_what_was_measured(bench):
    found, _ = bench(interrupted_after=3)  # a wave that is timed, a load, the next load
    assert [sample["setup"] for sample in found.samples] == ["no speculation"]
    assert found.left_out == {"what was to follow": "interrupted"}
    assert found.interrupted
    with pytest.raises(KeyboardInterrupt):
        bench(interrupted_after=1)


def choice(**changes):
    wanted = {
        "target": Path("target"),
        "drafts": {"DSPARK": Path("block"), "EAGLE3": Path("serial")},
        "dtype": "bfloat16",
        "max_concurrency": 8,
        "tokens": 64,
        "kinds": frozenset(setting.KINDS),
    }
    return setting.Choice(**{**wanted, **changes})


def test_the_servers_and_settings_of_the_comparison():
    specs = setting.servers(choice())
    assert [spec.name for spec in specs] == [
        "DSPARK ours", "DSPARK ours adaptive", "DSPARK ours ragged",
        "DSPARK stock", "DSPARK stock compact", "DSPARK stock compact, table",
        "EAGLE3 ours", "EAGLE3 ours adaptive", "EAGLE3 stock", "EAGLE3 stock adaptive", "no speculation",
    ]  # fmt: skip
    tiers = {"DSPARK ours": [0, 7], "EAGLE3 ours": [0, 3]}
    found = setting.setups(specs, tiers, frozenset(setting.KINDS))
    assert [(setup.name, str(setup.role)) for setup in found] == [
        ("DSPARK K=0", "fixed"), ("DSPARK K=7", "fixed"), ("DSPARK shadow", "shadow"), ("DSPARK adaptive", "adaptive"),
        ("DSPARK adaptive ragged", "adaptive"), ("DSPARK stock", "static"), ("DSPARK stock compact", "stock"),
        ("DSPARK stock compact, table", "stock"), ("EAGLE3 K=0", "fixed"), ("EAGLE3 K=3", "fixed"),
        ("EAGLE3 shadow", "shadow"), ("EAGLE3 adaptive", "adaptive"), ("EAGLE3 stock", "static"),
        ("EAGLE3 stock adaptive", "stock"), ("no speculation", "none"),
    ]  # fmt: skip


def test_every_server_argument_is_one_that_sglang_and_the_extension_know():
    server_args = pytest.importorskip("sglang.srt.server_args")
    from sglang_spec_ext import flags

    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    if "--spec-ext-mode" not in parser.format_help():
        flags.add_arguments(parser)
    for spec in [*setting.servers(choice()), setting.recording_server(choice())]:
        parser.parse_args(list(spec.arguments))


def test_drafts_are_named_by_algorithm():
    assert setting.parse_drafts(["DSPARK=a/b"]) == {"DSPARK": Path("a/b")}
    for wrong in ("a/b", "NGRAM=a/b"):
        with pytest.raises(UsageError, match="must be ALGORITHM=FOLDER"):
            setting.parse_drafts([wrong])


def test_a_server_without_the_table_it_needs_is_refused_and_stays_so(tmp_path):
    spec = setting.ServerSpec("compact", (), needs_table=True)
    with Fleet([spec], alive=None, home=tmp_path) as fleet:
        for _ in range(2):
            with pytest.raises(Unavailable, match="no cost table"):
                fleet.get("compact")


def test_the_reason_of_a_failed_start_is_the_last_error_of_its_log():
    log = "the server ended with status 1\nINFO a\nValueError: compact needs X\n  File b\n"
    assert reason_of(RuntimeError(log)) == "ValueError: compact needs X"
    assert reason_of(RuntimeError("one\ntwo")) == "two"


@pytest.mark.parametrize(("interrupted", "rounds"), [(False, [(0, 2), (2, 2)]), (True, [(0, 2)])])
def test_drafts_come_one_after_the_other_and_an_interrupt_ends_all(interrupted, rounds, monkeypatch, tmp_path, capsys):
    for name in ("target", "block", "serial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    seen = []

    def measure_draft(args, choice, amount, found):
        seen.append((list(choice.drafts), amount.first_round, amount.rounds, amount.deadline))
        found.interrupted = interrupted
        found.samples.append(
            {"setup": "no speculation", "load": 1, "round": amount.first_round, "tok_s": 1.0, "accept_length": None}
        )
        return {setup.name: setup for setup in SETUPS if setup.family == "" or len(seen) == 2}

    monkeypatch.setattr(bench_envelope, "_measure_draft", measure_draft)
    folders = {name: str(tmp_path / name) for name in ("target", "block", "serial")}
    drafts = ["--draft", f"DSPARK={folders['block']}", "--draft", f"EAGLE3={folders['serial']}"]
    wanted = ["bench", "envelope", "--json", "--no-plot", "--rounds", "2", "--limit", "60", "--out", str(tmp_path)]
    assert main([*wanted, "--target", folders["target"], *drafts]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(first, count) for _, first, count, _ in seen] == rounds
    assert [names for names, *_ in seen] == [["DSPARK"], ["EAGLE3"]][: len(rounds)]
    assert [sample["round"] for sample in report["samples"]] == [first for first, _ in rounds]
    assert list(report["setups"])[-1] == "no speculation"
    if not interrupted:
        assert seen[1][3] - seen[0][3] == pytest.approx(30.0)
