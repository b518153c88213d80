"""The step that all workers share: what it waits for, what it believes, what it measures."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from sglang_spec_ext.control.agreement import vote
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve
from sglang_spec_ext.control.settings import ControllerSettings, Verify
from sglang_spec_ext.metrics import NoMetrics
from sglang_spec_ext.records import Decision, Mode, Reason, RequestClass, StepObservation
from sglang_spec_ext.workers.loop import AdaptiveLoop
from sglang_spec_ext.workers.votes import OneRank

TIERS = (0, 1, 3)
FREE = CostTable(
    (ContextBucket(0, Curve((1, 64), (0.010, 0.011)), None, ((1, Curve((1, 64), (1e-4, 1e-4))),)),), 0.001
)


@dataclass
class TickingClock:
    """Each stamp is one millisecond after the one before."""

    ticks: int = 0

    def now(self) -> int:
        self.ticks += 1
        return self.ticks

    def seconds(self, start: int, end: int) -> float:
        return (end - start) / 1000.0


@dataclass
class Seen(NoMetrics):
    """Remembers what the controller was told."""

    observations: list[StepObservation] = field(default_factory=list)

    def observe(self, observation: StepObservation, decision: Decision) -> None:
        self.observations.append(observation)


class Request(SimpleNamespace):
    """A request as SGLang shows it to a worker."""

    def __init__(self, rid: str, **sampling: object) -> None:
        params = {
            "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0,
            "logit_bias": None, "top_k": 1, "temperature": 1.0, **sampling,
        }  # fmt: skip
        super().__init__(rid=rid, grammar=None, is_retracted=False, ended=False, seqlen=10)
        self.sampling_params = SimpleNamespace(**params)

    def finished(self) -> bool:
        return self.ended


def batch_of(*reqs: Request) -> SimpleNamespace:
    return SimpleNamespace(reqs=list(reqs), seq_lens_cpu=np.full(len(reqs), 10))


def loop_of(ranks: object = None, **settings: object) -> AdaptiveLoop:
    controller = Controller(ControllerSettings(tiers=TIERS, ranks=getattr(ranks, "size", 1), **settings), FREE)
    return AdaptiveLoop(controller, clock=TickingClock(), ranks=ranks or OneRank(), metrics=Seen())


def run(loop: AdaptiveLoop, batch: SimpleNamespace) -> Decision:
    step = loop.begin(batch)
    loop.end(step)
    return step.decision


def test_results_that_come_late_belong_to_the_oldest_step_without_them() -> None:
    loop, batch = loop_of(), batch_of(Request("a"), Request("b"))
    run(loop, batch)
    run(loop, batch)  # overlap: launched before the first result
    loop.resolve([2, 1])
    loop.resolve([0, 3])
    run(loop, batch)
    loop.deliver()
    assert [list(seen.accepted) for seen in loop.metrics.observations] == [[2, 1], [0, 3]]
    assert [seen.step for seen in loop.metrics.observations] == [0, 1]


def test_the_controller_learns_from_some_steps_at_once_unless_a_budget_needs_the_latest() -> None:
    for verify, steps in ((Verify.UNIFORM, [0, 0, 0, 0, 4]), (Verify.RAGGED, [0, 1, 2, 3, 4])):
        loop, batch = loop_of(verify=verify), batch_of(Request("a"))
        seen = []
        for _ in range(5):
            run(loop, batch)
            loop.resolve([0])
            seen.append(len(loop.metrics.observations))
        assert seen == steps


def test_in_mode_off_nothing_is_observed_and_results_still_find_their_step() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    for mode in (Mode.OFF, Mode.ADAPTIVE, Mode.OFF):
        loop.controller.set_mode(mode)
        assert run(loop, batch).k == 3
    for accepted in (3, 1, 2):
        loop.resolve([accepted])
    loop.deliver()
    assert [(seen.step, list(seen.accepted)) for seen in loop.metrics.observations] == [(1, [1])]
    assert loop.unmatched == 0


def test_rows_that_ended_meanwhile_are_no_samples() -> None:
    loop, gone = loop_of(), Request("b")
    run(loop, batch_of(Request("a"), gone, Request("c")))
    gone.ended = True
    loop.resolve([3, 3, 0])
    run(loop, batch_of(Request("a"), Request("c")))
    loop.deliver()
    assert loop.metrics.observations[0].valid.tolist() == [True, False, True]
    assert loop.controller.acceptance.samples == 2
    assert loop.controller.acceptance.dropped == 1


def test_a_result_of_another_size_is_counted_and_never_believed() -> None:
    loop = loop_of()
    run(loop, batch_of(Request("a"), Request("b")))
    loop.resolve([1])
    run(loop, batch_of(Request("a")))
    loop.deliver()
    assert loop.unmatched == 1
    assert not loop.metrics.observations


def test_a_step_is_timed_to_the_next_one_unless_something_came_between() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    for interrupted in (False, True, False):
        run(loop, batch)
        loop.resolve([0])
        if interrupted:
            loop.interrupt()
    run(loop, batch)
    loop.deliver()
    seconds = [seen.step_s for seen in loop.metrics.observations]
    assert seconds[1] is None
    assert seconds[0] is not None
    assert seconds[2] is not None


def test_drafting_is_told_apart_from_the_rest_of_the_step() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    step = loop.begin(batch)  # stamp 1
    start = loop.clock.now()  # 2
    loop.draft_watch.add(start)  # 3
    loop.end(step)  # 4
    loop.resolve([0])
    run(loop, batch)
    loop.deliver()
    seen = loop.metrics.observations[0]
    assert (seen.draft_s, seen.verify_s) == pytest.approx((0.001, 0.002))


def test_time_outside_the_worker_becomes_the_fixed_part_of_the_table() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    for _ in range(40):
        run(loop, batch)
        loop.resolve([0])
        loop._previous.launched -= 0.5  # as if the scheduler had taken half a second
    assert loop.controller.cost.fixed_s == pytest.approx(0.5, abs=0.01)


def test_forced_steps_leave_no_trace() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    loop.forced = Decision(k=1, reason=Reason.PINNED)
    for _ in range(3):
        assert run(loop, batch).k == 1
    loop.forced = None
    assert loop.snapshot()["decisions"] == 0
    assert not loop.moves


def test_moves_count_every_change_of_k() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    for k in (0, 3, 1, 1, 0):
        loop.controller.pin(k)
        run(loop, batch)
        loop.resolve([0])
    assert loop.moves == {(0, 3): 1, (3, 1): 1, (1, 0): 1}


def test_requests_are_classed_by_what_changes_their_acceptance() -> None:
    grammar = Request("g")
    grammar.grammar = object()
    batch = batch_of(
        Request("a"), grammar, Request("p", presence_penalty=0.5), Request("h", top_k=1 << 30, temperature=1.0)
    )
    loop = loop_of()
    step = loop.begin(batch)
    assert list(step.classes) == [
        RequestClass.PLAIN, RequestClass.GRAMMAR, RequestClass.PENALISED, RequestClass.HOT,
    ]  # fmt: skip


class TwoRanks:
    """This rank and one whose vote is given."""

    size, is_first, independent = 2, True, False

    def __init__(self, other: Decision | None, signature: int | None = None) -> None:
        self.other, self.signature, self.calls = other, signature, 0

    def minimum(self, mine: list[int]) -> list[int]:
        self.calls += 1
        signature = mine[4] if self.signature is None else self.signature
        theirs = vote(self.other, signature, cap=3)
        return [min(pair) for pair in zip(mine, theirs, strict=True)]

    def first(self, value: object) -> object:
        return value


@pytest.mark.parametrize(
    ("other", "signature", "k", "reason"),
    [
        (Decision(k=1, reason=Reason.BEST), None, 1, Reason.RANK_MINIMUM),
        (Decision(k=0, reason=Reason.EMPTY), None, 3, Reason.PINNED),
        (Decision(k=1, reason=Reason.BEST), 7, 3, Reason.RANK_MISMATCH),
    ],
    ids=["a lower vote wins", "an idle rank is neutral", "other tables run the fixed width"],
)
def test_two_ranks_decide_alike_with_one_vote_a_step(other, signature, k, reason) -> None:
    ranks = TwoRanks(other, signature)
    loop = loop_of(ranks)
    loop.controller.pin(3)
    decision = run(loop, batch_of(Request("a")))
    assert (decision.k, decision.reason) == (k, reason)
    assert ranks.calls == 1


def test_the_fixed_part_that_serving_measures_is_not_part_of_the_signature() -> None:
    loop, batch = loop_of(), batch_of(Request("a"))
    before = loop.signature
    for _ in range(40):
        run(loop, batch)
        loop.resolve([0])
        loop._previous.launched -= 0.5
    assert loop.controller.cost.fixed_s > 0.1
    assert loop.signature == before
    loop.controller.pin(1)
    pinned = loop.signature
    assert pinned != before
    loop.controller.unpin()
    assert loop.signature == before  # worked out anew, with a table that serving has corrected
    fresh = loop_of()
    fresh.controller.pin(1)
    assert fresh.signature == pinned
    loop.controller.set_mode(Mode.SHADOW)
    assert loop.signature not in {before, pinned}
