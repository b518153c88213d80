"""The controller: observe finished steps, decide the next one.

It joins cost, acceptance, tiers, hysteresis, probing and survival planning; each of them is a module of its
own and this one only orders them. No clock, no torch: a worker reports seconds and counts in a
StepObservation and asks with a BatchState. With several ranks `decide` is a vote (`agreement.vote`), and
`adopt` makes the group's decision this rank's own.
"""

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import replace
from math import sqrt
from typing import Any

import numpy as np

from sglang_spec_ext.control.acceptance import CERTAIN, Acceptance
from sglang_spec_ext.control.agreement import Agreed, signature_of
from sglang_spec_ext.control.calibration import MarginEstimator, TemperatureScaling
from sglang_spec_ext.control.cost import CostTable
from sglang_spec_ext.control.hysteresis import Hysteresis
from sglang_spec_ext.control.ledger import Ledger
from sglang_spec_ext.control.live_cost import LiveCost
from sglang_spec_ext.control.probe import Probe
from sglang_spec_ext.control.settings import ControllerSettings, Verify
from sglang_spec_ext.control.survivals import Survivals
from sglang_spec_ext.control.tiers import Group, Score, gain_error, group_requests, score_tiers
from sglang_spec_ext.control.trial import Trials
from sglang_spec_ext.records import BatchState, Decision, IntArray, Mode, Reason, StepObservation

RAGGED = -1  # arm: the whole block drafted, a budget of it verified


class Controller:
    """Chooses K, or a budget, for each step of one model replica."""

    def __init__(
        self,
        settings: ControllerSettings,
        cost: CostTable | None,
        *,
        scaling: TemperatureScaling | None = None,
        estimator: MarginEstimator | None = None,
    ) -> None:
        self.settings = settings
        self.mode = settings.mode
        self.pinned: int | None = None
        self.scaling = scaling
        self.estimator = estimator
        self.cost = None if cost is None else LiveCost(cost)
        self._start()

    def _start(self) -> None:
        settings = self.settings
        self.acceptance = Acceptance(settings.max_k)
        self.hysteresis = Hysteresis(settings.full_k, settings.hysteresis)
        self.probe = Probe(settings.probe)
        self.trials = Trials()
        self.ledger = Ledger(settings.tiers)
        ragged = settings.verify is Verify.RAGGED
        self.survivals = Survivals(self.scaling, self.estimator) if ragged else None
        self.decisions = 0
        self.probe_steps = 0
        self.reasons: Counter[str] = Counter()
        self.warming_steps = 0  # observations after K = 0 that were not believed
        self._caps: deque[int] = deque(maxlen=settings.hysteresis.dwell_steps)
        self._steps_at_zero = 0
        self._warmup_left = 0
        self._wished = settings.full_k  # arm of the last choice, before ranks agreed
        self._settled = False  # the last choice would be the same for a batch like the last one
        self._stands: tuple[Any, IntArray | None, Decision] | None = None  # a choice that holds until there is news
        self._news = False  # something was observed since arms were last weighed
        self._probe_answered = False
        self._probe_step = -1
        self._probed_k = 0

    def price(self, table: CostTable) -> None:
        """Take a cost table, measured after this was made, and start anew; settings, scaling and estimator stay."""
        self.cost = LiveCost(table)
        self._start()

    # observing

    def observe(self, observation: StepObservation) -> None:
        """Learn from one finished step."""
        self._stands, self._news = None, True
        rows, verified = np.asarray(observation.accepted).size, observation.verified
        drafted = rows * observation.k if verified is None else int(np.sum(verified))
        if self.cost is not None and rows:
            self.cost.observe(
                k=observation.k,
                tokens=rows + drafted + observation.prefill_tokens,
                batch=rows,
                context_len=observation.context_len,
                draft_s=observation.draft_s,
                verify_s=observation.verify_s,
                step_s=observation.step_s,
            )
        used = accepted = 0
        if observation.k and self._warmup_left:
            self._warmup_left -= 1
            self.warming_steps += 1
        else:
            used, accepted = self.acceptance.observe(observation)
            self._probe_answered = self._probe_answered or observation.step == self._probe_step
        self.ledger.measured(used + accepted, observation.step_s, drafted=drafted, accepted=accepted)
        if self.survivals is not None:
            self.survivals.observe(observation)

    # deciding

    def decide(self, batch: BatchState) -> Decision:
        """Return what to run for the next step; with several ranks, this rank's vote."""
        if not batch.num_reqs:
            return self._count(Decision(k=0, reason=Reason.EMPTY))
        if self.mode is Mode.OFF or self.cost is None:
            reason = Reason.MODE_OFF if self.mode is Mode.OFF else Reason.NO_COST_TABLE
            return self._count(self._run(self.settings.full_k, reason))
        self.decisions += 1
        cap = self.cap(batch)
        if self.pinned is not None:
            return self._count(self._pinned(cap))
        self._caps.append(cap)
        ready = self.mode is Mode.ADAPTIVE and self.probe.tick(batch.num_reqs)
        sizes = (batch.num_reqs, batch.prefill_tokens, batch.context_len, min(self._caps), self.hysteresis.arm)
        key = (*sizes, ready, self.mode)
        if self._stands is not None and key == self._stands[0] and batch.classes is self._stands[1]:
            self.ledger.repeated()
            return self._count(self._stands[2])
        decision = self._choose(batch, cap, ready)
        if self.mode is Mode.SHADOW:
            wanted = decision.k if decision.budget is None else None
            shown = self._run(self.settings.full_k, Reason.SHADOW)
            decision = replace(
                shown,
                wanted_k=wanted,
                predicted_tok_s=decision.predicted_tok_s,
                predicted_step_s=decision.predicted_step_s,
            )
        settled = self._settled and batch.caps is None and self.survivals is None
        self._stands = (key, batch.classes, decision) if settled else None
        return self._count(decision)

    def cap(self, batch: BatchState) -> int:
        """Largest K that ladder, engine and requests allow at this batch."""
        cap = self.settings.max_k if batch.max_k is None else min(batch.max_k, self.settings.max_k)
        if self.settings.ladder is not None:
            cap = min(cap, self.settings.ladder.cap(batch.num_reqs))
        return cap if batch.caps is None else min(cap, int(batch.caps.max()))

    def _choose(self, batch: BatchState, cap: int, ready: bool) -> Decision:
        """Weigh all arms; `ready`: a probe may start in this step."""
        assert self.cost is not None
        steady = min(self._caps)  # what was allowed during the whole last dwell
        tiers = [k for k in self.settings.tiers if k <= steady] or [self.settings.tiers[0]]
        groups = group_requests(batch, self.settings.max_k)
        scores = score_tiers(tiers, groups, batch=batch, acceptance=self.acceptance, cost=self.cost)
        arms = {score.k: score for score in scores}
        plan = None if self.survivals is None else self.survivals.plan(batch, steady, self.acceptance, self.cost)
        if plan is not None:
            arms[RAGGED] = Score(
                self.settings.max_k, plan.tokens, plan.seconds + self.settings.ragged_overhead_s
            )
        best = max(arms, key=lambda arm: arms[arm].tokens / arms[arm].seconds)
        arm, reason = self._held(arms, best, cap, groups)
        if self._news and reason in (Reason.BEST, Reason.MARGIN):  # else a choice that stands would hide a trial
            arm, reason = self._tried(batch, arms, scores, arm, reason)
        self._news = False
        self._wished = arm
        if self.settings.ranks == 1:
            self._commit(arm, reason)
        score = arms[arm]
        self.ledger.predicted(scores, score, arms[best])
        self._settled = reason is Reason.BEST
        moved = reason in (Reason.SWITCH, Reason.TRIAL, Reason.CAPPED)
        probed = None if moved else self._probe_arm(batch, arm, arms, groups, ready)
        if probed is not None:
            self._settled = False
            self.probe_steps += 1
            return replace(self._run(probed, Reason.PROBE, arms[probed], probe=True), wanted_k=arm)
        if arm == RAGGED:
            assert plan is not None
            everything = plan.budget == batch.num_reqs * self.settings.full_k
            return self._run(self.settings.max_k, reason, score, budget=None if everything else plan.budget)
        if cap < self.settings.tiers[0]:
            reason = Reason.LADDER_FLOOR
        elif cap == 0 and batch.caps is not None and not batch.caps.any():
            reason = Reason.OPTED_OUT
        return self._run(arm, reason, score)

    def _held(
        self, arms: dict[int, Score], best: int, cap: int, groups: Sequence[Group]
    ) -> tuple[int, Reason]:
        """Return the arm that hysteresis lets run, and why."""
        assert self.cost is not None
        current = self.hysteresis.arm
        if current not in arms:
            return best, Reason.CAPPED if current > cap or current == RAGGED else Reason.SWITCH
        gain = arms[best].rate / arms[current].rate - 1.0
        noise = 0.0
        if gain > self.hysteresis.margin(self.decisions, 0.0):  # else it stays whatever the noise is
            accepted = gain_error(groups, self.acceptance, arms[best], arms[current])
            noise = sqrt(accepted * accepted + 2.0 * self.cost.standard_error**2)
            if self.cost.drifting:
                noise += abs(self.cost.surprise)
        return self.hysteresis.propose(
            self.decisions, best, gain=gain, noise=noise, step_s=arms[current].seconds
        )

    def _tried(
        self, batch: BatchState, arms: dict[int, Score], scores: Sequence[Score], arm: int, reason: Reason
    ) -> tuple[int, Reason]:
        """Return the arm to try in place of the one in use, or that one with its reason."""
        assert self.cost is not None
        rested = self.hysteresis.rested(self.decisions)
        if self.mode is not Mode.ADAPTIVE or arm == RAGGED or not rested or self.cost.drifting:
            return arm, reason
        others = (score for score in scores if score.k != arm)
        found = self.trials.pick(self.decisions, batch, arms[arm], others, self.cost)
        return (arm, reason) if found is None else (found, Reason.TRIAL)

    def _probe_arm(
        self, batch: BatchState, arm: int, arms: dict[int, Score], groups: Sequence[Group], ready: bool
    ) -> int | None:
        """Return the K to probe in this step, if any."""
        if self.mode is not Mode.ADAPTIVE or arm == RAGGED:
            return None
        above = [score for k, score in arms.items() if k > arm]
        if self.probe.proceed():
            return self._probed_k if self._probed_k in arms else None
        if not above or not (ready or self._probe_answered):
            return None
        floor = arms[arm].rate * (1.0 + self.settings.hysteresis.min_gain / 4.0)
        likely = max(above, key=lambda score: score.rate)
        if self._probe_answered:
            self._probe_answered = False
            improving = arm == 0 and any(self.acceptance.classes[c].improving for c, _, _ in groups)
            self.probe.report(likely.rate > floor or improving)
        if not ready:
            return None
        hope, hoped_k = max((self._hope(groups, score), score.k) for score in above)
        if hope > floor and (arm or self.probe.probes % 2):
            return self._start_probe(batch, arm, hoped_k)
        certain = (_tokens_if_certain(groups, score.k) / score.seconds for score in above)
        return self._start_probe(batch, arm, likely.k) if not arm and max(certain) > floor else None

    def _hope(self, groups: Sequence[Group], score: Score) -> float:
        """Rate of a K if what was not measured were accepted."""
        tokens = sum(
            count * self.acceptance.classes[request_class].optimistic()[min(score.k, cap)]
            for request_class, cap, count in groups
        )
        return tokens / score.seconds

    def _start_probe(self, batch: BatchState, arm: int, k: int) -> int:
        self.probe.start()
        self._probed_k, self._probe_step = k, batch.step
        if arm == 0:
            self._warmup_left = self.settings.resume_warmup_steps
            if not self.probe.promising:
                for state in self.acceptance.classes:
                    state.grow_wary()
        return k

    def _commit(self, arm: int, reason: Reason) -> None:
        """Make an arm the one in use."""
        if arm == 0:
            self._steps_at_zero += 1
        elif self._steps_at_zero:
            self._steps_at_zero = 0
            self._warmup_left = self.settings.resume_warmup_steps
        if arm != self.hysteresis.arm:
            self._probe_answered = self.probe.promising = False
            for state in self.acceptance.classes:
                state.wary = False
        self.hysteresis.commit(self.decisions, arm, trial=reason is Reason.TRIAL)

    def _pinned(self, cap: int) -> Decision:
        assert self.pinned is not None
        if self.pinned <= cap:
            return self._run(self.pinned, Reason.PINNED)
        lower = [k for k in self.settings.tiers if k <= cap]
        return self._run(lower[-1] if lower else self.settings.tiers[0], Reason.CAPPED)

    def _run(
        self,
        k: int,
        reason: Reason,
        score: Score | None = None,
        *,
        budget: int | None = None,
        probe: bool = False,
    ) -> Decision:
        return Decision(
            k=k,
            reason=reason,
            budget=budget,
            bypass=budget is None and k == self.settings.full_k and k > 0,
            probe=probe,
            wanted_k=None if budget is not None else k,
            predicted_tok_s=None if score is None else score.rate,
            predicted_step_s=None if score is None else score.seconds,
        )

    def _count(self, decision: Decision) -> Decision:
        self.reasons[decision.reason] += 1
        return decision

    # ranks

    @property
    def signature(self) -> int:
        """Number that must be equal on all ranks: table, ladder, settings, mode and pin."""
        table = "" if self.cost is None else self.cost.table.digest()
        return signature_of(repr(self.settings), self.mode, repr(self.pinned), table)

    def adopt(self, wish: Decision, agreed: Agreed) -> Decision:
        """Make the group's decision this rank's own and return what to run."""
        if agreed.reason in (Reason.RANK_ABSENT, Reason.RANK_MISMATCH, Reason.ALL_IDLE):
            assert agreed.reason is not None
            return self._count(self._run(agreed.k, agreed.reason))
        if agreed.reason is Reason.PROBE:
            if not wish.probe:
                self.probe.join()
            return self._count(self._run(agreed.k, Reason.PROBE, probe=True))
        granted = (agreed.k, agreed.budget) == (wish.k, wish.budget)
        if wish.reason is not Reason.EMPTY and self.mode is Mode.ADAPTIVE and self.pinned is None:
            # a budget of everything runs as one K for all, and the arm is the budget's all the same
            arm = agreed.k if agreed.budget is None else RAGGED
            self._commit(self._wished if granted else arm, wish.reason if granted else Reason.RANK_MINIMUM)
        if granted:
            return wish
        return self._count(
            replace(self._run(agreed.k, Reason.RANK_MINIMUM, budget=agreed.budget), wanted_k=wish.wanted_k)
        )

    # runtime control

    def set_mode(self, mode: Mode) -> None:
        """Switch between off, shadow and adaptive; estimates are kept."""
        self.mode, self._stands = Mode(mode), None

    def pin(self, k: int) -> None:
        """Fix K to one of the tiers."""
        if isinstance(k, bool) or k not in self.settings.tiers:
            raise ValueError(f"pin: k must be one of the tiers {list(self.settings.tiers)}, got {k!r}")
        self.pinned = k

    def unpin(self) -> None:
        """Give the choice back; the pinned K stays in use until a better one passes the rules."""
        if self.pinned is not None:
            self.hysteresis.commit(self.decisions, self.pinned)
        self.pinned = None

    def reset(self) -> None:
        """Forget acceptance, corrections, accounting and the pin; keep table, settings and mode."""
        self.pinned = None
        if self.cost is not None:
            self.cost = LiveCost(self.cost.table)
        self._start()

    def snapshot(self) -> dict[str, Any]:
        """Everything worth showing, as plain dicts, lists, strings and numbers."""
        return {
            "mode": str(self.mode),
            "verify": str(self.settings.verify),
            "pinned": self.pinned,
            "tiers": list(self.settings.tiers),
            "decisions": self.decisions,
            "reasons": {str(reason): count for reason, count in self.reasons.items()},
            "probe_steps": self.probe_steps,
            "warming_steps": self.warming_steps,
            "inactive": self.inactive_reasons(),
            "hysteresis": self.hysteresis.snapshot(),
            "probe": self.probe.snapshot(),
            "acceptance": self.acceptance.snapshot(),
            "cost": None if self.cost is None else self.cost.report(),
            "estimator": None if self.estimator is None else self.estimator.snapshot(),
            "promise_ratio": None if self.survivals is None else self.survivals.promise.ratio,
            "ledger": self.ledger.snapshot(),
        }

    def inactive_reasons(self) -> list[str]:
        """Sentences on what is switched on but cannot act now."""
        reasons = []
        if self.mode is not Mode.OFF and self.cost is None:
            reasons.append("no cost table: nothing was measured, the fixed width runs")
        if self.settings.verify is Verify.RAGGED and self.estimator is not None and not self.estimator.warm:
            reasons.append("margin estimator is warming up: one K for the whole batch until it is fitted")
        if self.mode is not Mode.OFF and 0 not in self.settings.tiers:
            reasons.append("tiers lack 0: speculation is never switched off")
        return reasons


def _tokens_if_certain(groups: Sequence[Group], k: int) -> float:
    """Tokens of a step if each draft token were accepted with probability CERTAIN."""
    return sum(count * sum(CERTAIN**j for j in range(min(k, cap) + 1)) for _, cap, count in groups)
