"""Scenarios: what load and drafts do over time, and what a step then truly costs and yields.

A scenario file holds segments of constant load. All random draws (accepted drafts of every request in every
step, noise of every step's time) are made once, so that every policy meets the same luck and an oracle
exists.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve, check_points
from sglang_spec_ext.control.ladder import check_tiers
from sglang_spec_ext.records import FloatArray, IntArray, RequestClass

_ANY_BATCH = 1 << 20


class ScenarioError(ValueError):
    """A scenario file that cannot be run; the message names the field, the rule, the value and the cure."""


class CostSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """True cost of a step."""

    kind: Literal["linear", "stairs"]
    draft_s_per_pass: float
    verify_s_by_tokens: list[tuple[int, float]]
    k0_sync_s: float = 0.0


class ClassSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A share of the requests: chance of each next draft, one number or one per position."""

    share: float
    alpha: float | list[float]
    kind: Literal["plain", "grammar", "penalised", "hot"] = "plain"


class Segment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of one load; a list of batch sizes is gone through step by step, again and again."""

    steps: int
    batch: int | list[int]
    classes: list[ClassSpec]

    @property
    def cycle(self) -> list[int]:
        """Batch sizes in turn."""
        return [self.batch] if isinstance(self.batch, int) else self.batch


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A scenario file; `meaning` is for readers."""

    seed: int
    tiers: list[int]
    drafting: Literal["serial", "block"]
    cost: CostSpec
    segments: list[Segment]
    profile_bias: float | list[float] = 1.0  # factor on verify times, one or one per point
    step_noise: float = 0.0
    switch_s: float = 0.0  # seconds added to a step that changes K
    meaning: dict[str, str] = {}

    @property
    def biases(self) -> list[float]:
        """`profile_bias` of every point of `cost.verify_s_by_tokens`."""
        bias = self.profile_bias
        return bias if isinstance(bias, list) else [bias] * len(self.cost.verify_s_by_tokens)


def load_scenario(text: str | bytes) -> Scenario:
    """Parse and check a scenario; ScenarioError names what is wrong."""
    try:
        scenario = msgspec.json.decode(text, type=Scenario)
        check_tiers(scenario.tiers)
        points = scenario.cost.verify_s_by_tokens
        check_points("cost.verify_s_by_tokens", [p for p, _ in points], [s for _, s in points])
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise ScenarioError(f"scenario: {error}") from error
    biases = scenario.biases
    if len(biases) != len(points):
        raise ScenarioError(
            f"profile_bias: needs one number, or one for each of the {len(points)} points, got {len(biases)}"
        )
    positive = {
        "cost.draft_s_per_pass": scenario.cost.draft_s_per_pass,
        "profile_bias": min(biases),
    }
    for name, value in positive.items():
        if not value > 0:
            raise ScenarioError(f"{name}: must be > 0, got {value}")
    for name, value in {
        "cost.k0_sync_s": scenario.cost.k0_sync_s,
        "step_noise": scenario.step_noise,
        "switch_s": scenario.switch_s,
        "seed": scenario.seed,
    }.items():
        if value < 0:
            raise ScenarioError(f"{name}: must be >= 0, got {value}")
    if len(points) < 2:
        raise ScenarioError("cost.verify_s_by_tokens: needs at least two points")
    if not scenario.segments:
        raise ScenarioError("segments: needs at least one")
    for index, segment in enumerate(scenario.segments):
        _check_segment(f"segments[{index}]", segment, scenario.tiers[-1])
    return scenario


def _check_segment(name: str, segment: Segment, max_k: int) -> None:
    if segment.steps < 1 or not segment.cycle or min(segment.cycle) < 1:
        raise ScenarioError(
            f"{name}: steps and batch must be >= 1, got steps={segment.steps} batch={segment.batch}"
        )
    shares = [c.share for c in segment.classes]
    if not shares or min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-9:
        raise ScenarioError(f"{name}.classes: shares must be >= 0 and sum to 1, got {shares}")
    for spec in segment.classes:
        alphas = spec.alpha if isinstance(spec.alpha, list) else [spec.alpha]
        if any(not 0.0 <= a <= 1.0 for a in alphas):
            raise ScenarioError(f"{name}.classes: alpha must be in 0..1, got {spec.alpha}")
        if isinstance(spec.alpha, list) and len(alphas) < max_k:
            raise ScenarioError(
                f"{name}.classes: alpha needs one value per position up to the largest tier {max_k}, "
                f"got {len(alphas)}"
            )


@dataclass(frozen=True, slots=True)
class TrueCost:
    """StepCost of the scenario's world."""

    spec: CostSpec
    drafting: str

    @property
    def fixed_s(self) -> float:
        """See StepCost."""
        return 0.0

    def draft_s(self, k: int, batch: int, context_len: int = 0) -> float:  # noqa: ARG002
        """Serial: K passes for K drafts; block: one pass; K = 0: what keeps the draft usable."""
        if not k:
            return self.spec.k0_sync_s
        return self.spec.draft_s_per_pass * (k if self.drafting == "serial" else 1)

    def verify_s(self, tokens: int, batch: int, context_len: int = 0) -> float:
        """See StepCost."""
        return float(self.verify_many(np.array([tokens]), batch, context_len)[0])

    def verify_many(self, tokens: IntArray, batch: int, context_len: int = 0) -> FloatArray:  # noqa: ARG002
        """Lines between points or the next point at or above; the last slope beyond."""
        points = np.array([p for p, _ in self.spec.verify_s_by_tokens])
        seconds = np.array([s for _, s in self.spec.verify_s_by_tokens])
        if self.spec.kind == "linear":
            inside = np.interp(tokens, points, seconds)
        else:
            inside = seconds[np.minimum(np.searchsorted(points, tokens), len(points) - 1)]
        slope = (seconds[-1] - seconds[-2]) / (points[-1] - points[-2])
        result: FloatArray = inside + np.maximum(tokens - points[-1], 0) * slope
        return result


def profile_of(scenario: Scenario) -> CostTable:
    """Return the table a start-up profile would give: the truth times `profile_bias`."""
    points, true_s = zip(*scenario.cost.verify_s_by_tokens, strict=True)
    seconds = tuple(s * bias for s, bias in zip(true_s, scenario.biases, strict=True))
    captured = points[-1] if scenario.cost.kind == "stairs" else 0
    truth = TrueCost(scenario.cost, scenario.drafting)
    draft = []
    for k in sorted({0, *scenario.tiers}):
        cost_s = truth.draft_s(k, 1)
        draft.append((k, Curve((1, _ANY_BATCH), (cost_s, cost_s))))
    return CostTable((ContextBucket(0, Curve(points, seconds, captured), None, tuple(draft)),))


@dataclass(frozen=True, slots=True)
class SegmentDraws:
    """All luck of one segment; the requests of step i are rows starts[i] to starts[i + 1]."""

    batches: IntArray  # [steps]
    starts: IntArray  # [steps + 1]
    accepted: IntArray  # [rows] drafts accepted if all were verified, at most the largest tier
    classes: IntArray | None  # [rows] RequestClass; None: all plain
    noise: FloatArray  # [steps] factor on the step's time


def survival_curve(spec: ClassSpec, max_k: int) -> FloatArray:
    """Probability [max_k] that position 1, 2, ... is accepted."""
    alphas = spec.alpha[:max_k] if isinstance(spec.alpha, list) else [spec.alpha] * max_k
    return np.cumprod(alphas)


def draw_segment(scenario: Scenario, index: int) -> SegmentDraws:
    """Draw one segment; the same scenario and index always give the same draws."""
    segment = scenario.segments[index]
    rng = np.random.default_rng([scenario.seed, index])
    max_k = scenario.tiers[-1]
    # falling survivals, reversed: a uniform number then falls behind as many as it fails
    rising = [survival_curve(spec, max_k)[::-1] for spec in segment.classes]
    edges = np.cumsum([spec.share for spec in segment.classes])
    batches = np.resize(np.array(segment.cycle), segment.steps)
    kinds = [RequestClass[spec.kind.upper()] for spec in segment.classes]
    accepted, classes = [], []
    for batch in batches.tolist():
        # systematic sampling: the expected number of requests of each class is share * batch exactly
        bounds = np.floor(edges * batch + rng.random()).astype(np.int64)
        bounds[-1] = batch
        counts = np.diff(np.minimum(bounds, batch), prepend=0)
        for survivals, count in zip(rising, counts.tolist(), strict=True):
            accepted.append(max_k - np.searchsorted(survivals, rng.random(count), side="right"))
        classes.append(np.repeat(kinds, counts))
    plain = all(kind is RequestClass.PLAIN for kind in kinds)
    return SegmentDraws(
        batches,
        np.concatenate([[0], np.cumsum(batches)]),
        np.concatenate(accepted),
        None if plain else np.concatenate(classes),
        np.exp(scenario.step_noise * rng.standard_normal(segment.steps)),
    )


def expected_rate(scenario: Scenario, segment: Segment, k: int) -> float:
    """Expected tokens per second of a fixed K in a segment."""
    cost = TrueCost(scenario.cost, scenario.drafting)
    per_request = 1.0 + sum(
        spec.share * float(survival_curve(spec, k).sum()) for spec in segment.classes if k
    )
    return rate_over(segment.cycle, per_request, cost, k)


def rate_over(batches: Sequence[int], per_request: float, cost: TrueCost, k: int) -> float:
    """Tokens per second over batch sizes taken in turn."""
    seconds = sum(cost.draft_s(k, batch) + cost.verify_s(batch * (k + 1), batch) for batch in batches)
    return sum(batches) * per_request / seconds
