"""Runs policies through a scenario and compares them with every fixed K and an oracle.

The oracle uses, in each segment, the K with the best expected tokens per second. `switches` counts changes
of K outside probes; a probe is one step at another K.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.scenario import (
    Scenario,
    SegmentDraws,
    TrueCost,
    draw_segment,
    expected_rate,
    profile_of,
    survival_curve,
)
from sglang_spec_ext.control.settings import ControllerSettings
from sglang_spec_ext.records import BatchState, FloatArray, StepObservation


@dataclass(frozen=True, slots=True)
class Choice:
    """What a policy wants of one step."""

    k: int
    draft_k: int  # drafts made; a rule that always drafts in full pays for them at any K
    probe: bool = False


class Policy(Protocol):
    """What the simulator needs of a rule."""

    def choose(self, batch: BatchState) -> Choice:
        """Choose K for a step."""

    def observe(self, observation: StepObservation) -> None:
        """Learn from the finished step."""


class AdaptivePolicy:
    """This library's controller."""

    name = "adaptive"

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.observe = controller.observe

    def choose(self, batch: BatchState) -> Choice:
        """Ask the controller."""
        decision = self.controller.decide(batch)
        return Choice(decision.k, draft_k=decision.k, probe=decision.probe)


@dataclass(slots=True)
class Run:
    """What one policy did, step by step."""

    segments: list[int] = field(default_factory=list)  # steps in each
    ks: list[int] = field(default_factory=list)
    probes: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def tok_s(self) -> float:
        """Tokens per second over the whole."""
        return sum(self.tokens) / sum(self.seconds)

    def bounds(self) -> Iterator[slice]:
        """Steps of each segment."""
        start = 0
        for steps in self.segments:
            yield slice(start, start + steps)
            start += steps

    def segment_tok_s(self) -> list[float]:
        """Tokens per second of each segment."""
        return [sum(self.tokens[part]) / sum(self.seconds[part]) for part in self.bounds()]

    def switches(self, part: slice = slice(None)) -> int:
        """Changes of K outside probes."""
        held = [k for k, probe in zip(self.ks[part], self.probes[part], strict=True) if not probe]
        return int(np.count_nonzero(np.diff(held)))

    def probe_fraction(self, part: slice = slice(None)) -> float:
        """Share of steps that were probes."""
        return sum(self.probes[part]) / len(self.probes[part])

    def k_histogram(self) -> dict[str, int]:
        """Steps by K."""
        return {str(k): count for k, count in sorted(Counter(self.ks).items())}


class World:
    """A scenario with its draws made."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.cost = TrueCost(scenario.cost, scenario.drafting)
        self.draws: list[SegmentDraws] = [draw_segment(scenario, i) for i in range(len(scenario.segments))]
        self._times: dict[tuple[int, int, int], float] = {}

    def step_s(self, batch: int, k: int, draft_k: int) -> float:
        """True seconds of a step before noise."""
        key = (batch, k, draft_k)
        if key not in self._times:
            self._times[key] = self.cost.draft_s(draft_k, batch) + self.cost.verify_s(batch * (k + 1), batch)
        return self._times[key]

    def run(self, policy_of: Callable[[int], Policy], progress: Callable[[int], None] | None = None) -> Run:
        """Run a policy; `policy_of(segment)` may give another one in each segment."""
        run = Run()
        step, last_k = 0, None
        for index, draws in enumerate(self.draws):
            policy = policy_of(index)
            run.segments.append(len(draws.batches))
            starts = draws.starts.tolist()
            for offset, batch in enumerate(draws.batches.tolist()):
                rows = slice(starts[offset], starts[offset + 1])
                classes = None if draws.classes is None else draws.classes[rows]
                choice = policy.choose(BatchState(step=step, num_reqs=batch, classes=classes))
                accepted = np.minimum(draws.accepted[rows], choice.k)
                seconds = self.step_s(batch, choice.k, choice.draft_k) * float(draws.noise[offset])
                policy.observe(
                    StepObservation(step=step, k=choice.k, accepted=accepted, classes=classes, step_s=seconds)
                )
                if last_k not in (None, choice.k):
                    seconds += self.scenario.switch_s
                run.ks.append(choice.k)
                run.probes.append(choice.probe)
                run.tokens.append(batch + int(accepted.sum()))
                run.seconds.append(seconds)
                step, last_k = step + 1, choice.k
            if progress is not None:
                progress(step)
        return run

    def oracle_ks(self) -> list[int]:
        """K with the best expected tokens per second in each segment."""
        scenario = self.scenario
        return [
            max(scenario.tiers, key=lambda k: expected_rate(scenario, segment, k))
            for segment in scenario.segments
        ]

    def run_fixed(self, ks: Sequence[int]) -> Run:
        """Run one given K in each segment."""
        run = Run()
        last_k: int | None = None
        for k, draws in zip(ks, self.draws, strict=True):
            steps = len(draws.batches)
            accepted = np.add.reduceat(np.minimum(draws.accepted, k), draws.starts[:-1])
            seconds = np.array([self.step_s(batch, k, k) for batch in draws.batches.tolist()]) * draws.noise
            if last_k not in (None, k):
                seconds[0] += self.scenario.switch_s
            run.segments.append(steps)
            run.ks += [k] * steps
            run.probes += [False] * steps
            run.tokens += (draws.batches + accepted).tolist()
            run.seconds += seconds.tolist()
            last_k = k
        return run

    def true_expected(self, index: int) -> Callable[[int], float]:
        """Expected tokens per request by K in a segment."""
        classes = self.scenario.segments[index].classes
        curve: FloatArray = sum(
            (spec.share * survival_curve(spec, self.scenario.tiers[-1]) for spec in classes),
            np.zeros(self.scenario.tiers[-1]),
        )
        totals = np.cumsum([1.0, *curve]).tolist()
        return lambda k: float(totals[k])


def adaptive_policy(scenario: Scenario, settings: ControllerSettings | None = None) -> AdaptivePolicy:
    """The controller with default settings and the table that a start-up profile gives."""
    settings = settings or ControllerSettings(tiers=tuple(scenario.tiers))
    return AdaptivePolicy(Controller(settings, profile_of(scenario)))


def moving_rate(run: Run, window: int) -> Sequence[float]:
    """Tokens per second over the last `window` steps, for each step."""
    tokens = np.cumsum([0, *run.tokens])
    seconds = np.cumsum([0.0, *run.seconds])
    stop = np.arange(1, len(tokens))
    start = np.maximum(0, stop - window)
    rates: list[float] = ((tokens[stop] - tokens[start]) / (seconds[stop] - seconds[start])).tolist()
    return rates
