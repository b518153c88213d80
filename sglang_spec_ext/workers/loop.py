"""Observe, decide, act: the step that all extended workers share.

A worker calls `begin` before a decode step, runs what the decision says, and calls `end`. SGLang reports
accepted tokens later (with overlap scheduling one step later), in the order of the steps; `resolve` takes
them in. What is known of finished steps reaches the controller at the `begin` of every DELIVER_STEPS-th step:
between two steps of a model the caches hold nothing of ours, so learning from four steps at once costs little
more than learning from one. A ragged budget is planned from survivals of a fixed age, so there it is each step.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sglang_spec_ext.control.agreement import absent_vote, vote
from sglang_spec_ext.control.agreement import resolve as resolve_votes
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.settings import Verify
from sglang_spec_ext.metrics import REFRESH_STEPS, Metrics
from sglang_spec_ext.records import BatchState, Decision, IntArray, Mode, Reason
from sglang_spec_ext.workers.batch_view import BatchView
from sglang_spec_ext.workers.clock import Clock, Stopwatch
from sglang_spec_ext.workers.overhead import Overhead
from sglang_spec_ext.workers.step import Step
from sglang_spec_ext.workers.votes import Ranks

DELIVER_STEPS = 4
NO_IDS: IntArray = np.zeros(0, np.int64)


class AdaptiveLoop:
    """The controller of one worker, and the steps it waits for."""

    def __init__(self, controller: Controller, *, clock: Clock, ranks: Ranks, metrics: Metrics) -> None:
        self.controller = controller
        self.clock = clock
        self.ranks = ranks
        self.metrics = metrics
        self.draft_watch = Stopwatch(clock)
        self.overhead = Overhead()
        self.forced: Decision | None = None  # the profiler's choice; its steps are not observed
        self.moves: Counter[tuple[int, int]] = Counter()  # (K before, K after) of steps in a row
        self.ragged_steps = 0
        self.ragged_tokens = [0, 0]  # draft tokens verified in ragged steps, and drafted
        self.unmatched = 0  # steps whose accepted tokens never came
        self.rejection: str | None = None  # the last update that was refused, and why
        self.own_s = 0.0  # host seconds spent here, in all steps so far
        self._view = BatchView()
        self._pending: deque[Step] = deque()
        self._previous: Step | None = None
        self._last: Step | None = None
        self._next_index = 0
        self._last_k: int | None = None
        self._signature: tuple[tuple[Mode, int | None, bool], int] | None = None

    @property
    def acts(self) -> bool:
        """Whether decisions change what runs now."""
        return self.forced is not None or self.controller.mode is Mode.ADAPTIVE

    def begin(self, batch: Any) -> Step:
        """Decide the step of a decode batch."""
        now = time.perf_counter()
        if self._previous is not None:
            self._previous.seconds = now - self._previous.launched
        if len(self._pending) >= DELIVER_STEPS or self.controller.settings.verify is Verify.RAGGED:
            self.deliver()
        view = self._view
        view.look(batch)
        decision = self.forced or self._decide(
            BatchState(
                step=self._next_index,
                num_reqs=len(view.reqs),
                classes=view.classes,
                request_ids=view.request_ids,
                context_len=view.context_len,
            )
        )
        self._count_move(decision.k)
        self.draft_watch.take()
        step = Step(
            self._next_index,
            decision,
            view.reqs,
            view.classes,
            view.request_ids,
            view.context_len,
            now,
            self.clock.now(),
        )
        self._next_index += 1
        self.own_s += time.perf_counter() - now
        return step

    def join(self) -> Step:
        """Decide an idle rank's part in the step of the others; nothing comes of it, so it does not `end`."""
        self.interrupt()
        decision = self.forced or self._decide(BatchState(step=self._next_index, num_reqs=0))
        return Step(self._next_index, decision, (), None, NO_IDS, 0, time.perf_counter(), self.clock.now())

    def end(self, step: Step) -> None:
        """Note that a step was launched as decided."""
        step.end = self.clock.now()
        now = time.perf_counter()
        step.draft = self.draft_watch.take()
        self._last = step
        if self.forced is not None:
            self._previous = None
            return
        self._pending.append(step)
        self._previous = step
        self.own_s += time.perf_counter() - now

    def last_parts(self) -> tuple[float, float]:
        """Return the seconds of drafting and of the rest in the last step, whose result has arrived."""
        assert self._last is not None
        return self._last.parts(self.clock)

    def interrupt(self) -> None:
        """Note that something else than a decode step runs: the time to the next one is no step's."""
        self._previous = None

    def resolve(self, accepted: Sequence[int]) -> None:
        """Take in the accepted draft tokens of the oldest step without them."""
        now = time.perf_counter()
        self._resolve(accepted)
        self.own_s += time.perf_counter() - now

    def _resolve(self, accepted: Sequence[int]) -> None:
        awaited = next((step for step in self._pending if step.accepted is None), None)
        if awaited is not None and len(awaited.reqs) == len(accepted):
            awaited.resolve(accepted)
            return
        self.unmatched += len(self._pending)
        self._pending.clear()

    def deliver(self) -> None:
        """Hand on to the controller, and to the metrics, what is known of finished steps."""
        while self._pending and self._pending[0].accepted is not None:
            step = self._pending.popleft()
            if step.decision.reason is Reason.MODE_OFF:
                continue
            draft_s, verify_s = step.parts(self.clock)
            cost = self.controller.cost
            if step.seconds is not None and cost is not None:
                self.overhead.observe(step.seconds, draft_s + verify_s, cost)
            observation = step.observation(draft_s, verify_s)
            if step.decision.budget is not None and step.verified is not None:
                self.ragged_steps += 1
                self.ragged_tokens[0] += int(step.verified.sum())
                self.ragged_tokens[1] += len(step.reqs) * step.decision.k
            self.controller.observe(observation)
            self.metrics.observe(observation, step.decision)
            if step.index % REFRESH_STEPS == 0:
                self.metrics.account(self.controller)

    def _decide(self, state: BatchState) -> Decision:
        controller = self.controller
        decision = controller.decide(state)
        if controller.mode is not Mode.ADAPTIVE:
            if self.ranks.independent:  # others may be told of this mode later, and wait for a vote until then
                self.ranks.minimum(absent_vote(self.signature))
            return decision if state.num_reqs else Decision(k=controller.settings.full_k, reason=Reason.EMPTY)
        if self.ranks.size > 1:
            mine = vote(decision, self.signature, cap=controller.cap(state))
            agreed = resolve_votes(self.ranks.minimum(mine), full_k=controller.settings.full_k)
            decision = controller.adopt(decision, agreed)
        return decision

    @property
    def signature(self) -> int:
        """The controller's signature; its table counts as it was measured, not as serving corrects it."""
        controller = self.controller
        key = (controller.mode, controller.pinned, controller.cost is not None)
        if self._signature is None or self._signature[0] != key:
            self._signature = (key, self._sign())
        return self._signature[1]

    def _sign(self) -> int:
        cost = self.controller.cost
        if cost is None:
            return self.controller.signature
        corrected = cost.table
        cost.table = replace(corrected, fixed_s=0.0)  # what serving measures differs from rank to rank
        try:
            return self.controller.signature
        finally:
            cost.table = corrected

    def _count_move(self, k: int) -> None:
        if self.forced is not None:
            return
        if self._last_k is not None and self._last_k != k:
            self.moves[self._last_k, k] += 1
        self._last_k = k

    def reset(self) -> None:
        """Forget what was learned and counted; steps in flight are still awaited."""
        self.controller.reset()
        self.overhead = Overhead()
        self.moves.clear()
        self.ragged_steps, self.ragged_tokens = 0, [0, 0]

    def snapshot(self) -> dict[str, Any]:
        """Plain facts for /server_info."""
        self.deliver()
        return {
            **self.controller.snapshot(),
            "k": self._last_k,
            "steps": self._next_index,
            "moves": {f"{before}->{after}": count for (before, after), count in sorted(self.moves.items())},
            "ragged": {"steps": self.ragged_steps, "verified": self.ragged_tokens[0], "drafted": self.ragged_tokens[1]},
            "unmatched_steps": self.unmatched,
            "own_s": self.own_s,
            "rejection": self.rejection,
            "ranks": self.ranks.size,
            "fixed_s": None if self.controller.cost is None else self.controller.cost.fixed_s,
        }
