"""How many GPUs a day's load needs with a controlled draft length, and with each fixed one.

A plan file describes GPU, model, draft and the day; `plan` gives the best K by batch size, and for every policy the
replicas of each hour: the fewest whose requests all keep the promised speed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec

from sglang_spec_ext.control.ladder import check_tiers
from sglang_spec_ext.control.roofline import PRESETS, Draft, Efficiency, Gpu, Model, Roofline

ADAPTIVE = "adaptive"


class CapacityError(ValueError):
    """A plan file that cannot be used; the message names the field, the rule, the value and the cure."""


class Hours(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A stretch of the day and its demand, in output tokens per second over the whole fleet."""

    hours: float
    tok_s: float


class Plan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan file."""

    gpu: str | Gpu  # name of a preset, or the figures
    model: Model
    draft: Draft
    tiers: tuple[int, ...]  # K to choose from, 0 = no speculation
    day: list[Hours]
    gpus_per_replica: int = 1
    context_len: int = 2048
    max_batch: int = 256
    min_tok_s_per_request: float = 0.0  # promised speed of every request
    overhead_s: float = 0.0005
    efficiency: Efficiency = Efficiency()


def load_plan(text: str | bytes, *, gpu: str | None = None) -> Plan:
    """Parse and check a plan file; `gpu` names a preset to plan for instead of the file's."""
    try:
        plan = msgspec.json.decode(text, type=Plan)
        if gpu is not None:
            plan = msgspec.structs.replace(plan, gpu=gpu)
        check_tiers(plan.tiers)
    except (msgspec.DecodeError, msgspec.ValidationError, ValueError) as error:
        raise CapacityError(f"plan: {error}") from error
    if isinstance(plan.gpu, str) and plan.gpu not in PRESETS:
        raise CapacityError(f"gpu: must be one of {', '.join(PRESETS)} or an object of figures, got {plan.gpu!r}")
    for name, value in _positive(plan):
        if not 0 < value < float("inf"):
            raise CapacityError(f"{name}: must be finite and > 0, got {value}")
    if plan.tiers[-1] > plan.draft.max_k:
        raise CapacityError(f"tiers: the draft makes {plan.draft.max_k} tokens, got K = {plan.tiers[-1]}; leave it out")
    rates = plan.draft.acceptance
    listed = rates if isinstance(rates, list) else [rates]
    if any(not 0.0 <= rate <= 1.0 for rate in listed):
        raise CapacityError(f"draft.acceptance: must be in 0..1, got {rates}")
    if isinstance(rates, list) and len(rates) < plan.tiers[-1]:
        raise CapacityError(
            f"draft.acceptance: needs one value a position up to K = {plan.tiers[-1]}, got {len(rates)}"
        )
    if not plan.day or any(part.tok_s < 0 for part in plan.day):
        raise CapacityError("day: needs at least one stretch, none with a demand below 0")
    return plan


def _positive(plan: Plan) -> list[tuple[str, float]]:
    gpu = plan.gpu if isinstance(plan.gpu, Gpu) else PRESETS[plan.gpu]
    numbers: dict[str, float] = {
        "gpus_per_replica": plan.gpus_per_replica,
        "context_len": plan.context_len,
        "max_batch": plan.max_batch,
        "model.params": plan.model.params,
        "model.bytes_per_param": plan.model.bytes_per_param,
        "model.kv_bytes_per_token": plan.model.kv_bytes_per_token,
        "draft.params": plan.draft.params,
        "draft.bytes_per_param": plan.draft.bytes_per_param,
        "efficiency.bandwidth": plan.efficiency.bandwidth,
        "efficiency.flop": plan.efficiency.flop,
        "efficiency.memory": plan.efficiency.memory,
        "gpu.bandwidth_bytes_s": gpu.bandwidth_bytes_s,
        "gpu.flop_s": gpu.flop_s,
        "gpu.memory_bytes": gpu.memory_bytes,
    }
    return [*numbers.items(), *((f"day[{i}].hours", part.hours) for i, part in enumerate(plan.day))]


@dataclass(frozen=True, slots=True)
class Policy:
    """A rule from requests in flight to K."""

    name: str
    k_at: Callable[[int], int]


def roofline_of(plan: Plan) -> Roofline:
    """Return the step costs of one replica."""
    return Roofline(
        gpu=PRESETS[plan.gpu] if isinstance(plan.gpu, str) else plan.gpu,
        gpus=plan.gpus_per_replica,
        model=plan.model,
        draft=plan.draft,
        efficiency=plan.efficiency,
        context_len=plan.context_len,
        overhead_s=plan.overhead_s,
    )


def best_ladder(plan: Plan, cost: Roofline, largest: int) -> list[tuple[int, int, int]]:
    """Return [(first batch, last batch, best K), ...], the form of vLLM's `num_speculative_tokens_per_batch_size`."""
    rows: list[tuple[int, int, int]] = []
    for batch in range(1, largest + 1):
        k = max(plan.tiers, key=lambda k: cost.tok_s(k, batch))
        if rows and rows[-1][2] == k:
            rows[-1] = (rows[-1][0], batch, k)
        else:
            rows.append((batch, batch, k))
    return rows


def capacity(plan: Plan) -> dict[str, Any]:
    """Return ladder, and by policy the day with replicas, GPUs, batch, K and speed of a request."""
    cost = roofline_of(plan)
    largest = min(plan.max_batch, cost.largest_batch())
    if largest < 1:
        raise CapacityError(
            f"gpus_per_replica: the weights and one request of {plan.context_len} tokens do not fit into "
            f"{plan.gpus_per_replica} x {cost.gpu.memory_bytes / 1e9:.0f} GB; use more"
        )
    rows = best_ladder(plan, cost, largest)
    best = [k for first, last, k in rows for _ in range(first, last + 1)]
    policies = [Policy(ADAPTIVE, lambda batch: best[batch - 1])]
    policies += [Policy(f"K={k}", lambda _, k=k: k) for k in plan.tiers]  # type: ignore[misc]
    return {
        "gpu": {"name": cost.gpu.name, "source": cost.gpu.source, "per_replica": plan.gpus_per_replica},
        "largest_batch": largest,
        "ladder": [list(row) for row in rows],
        "policies": {policy.name: _day(plan, cost, policy, largest) for policy in policies},
    }


def _day(plan: Plan, cost: Roofline, policy: Policy, largest: int) -> dict[str, Any]:
    rates = [cost.tok_s(policy.k_at(batch), batch) for batch in range(1, largest + 1)]
    kept = [b for b, rate in enumerate(rates, 1) if rate / b >= plan.min_tok_s_per_request]
    if not kept:
        return {"served": False, "reason": "one request alone is slower than min_tok_s_per_request"}
    most = max(rates[batch - 1] for batch in kept)
    hours = [_stretch(plan, policy, part, rates, kept, most) for part in plan.day]
    return {
        "served": True,
        "replica_tok_s": most,
        "peak_gpus": max(hour["gpus"] for hour in hours),
        "gpu_hours": sum(part.hours * hour["gpus"] for part, hour in zip(plan.day, hours, strict=True)),
        "day": hours,
    }


def _stretch(
    plan: Plan, policy: Policy, part: Hours, rates: Sequence[float], kept: Sequence[int], most: float
) -> dict[str, Any]:
    """Return the fewest replicas for a demand, and how each of them then runs."""
    replicas = ceil(part.tok_s / most)
    if not replicas:
        return {"tok_s": part.tok_s, "replicas": 0, "gpus": 0, "batch": 0, "k": None, "tok_s_per_request": None}
    share = part.tok_s / replicas
    batch = next(b for b in kept if rates[b - 1] >= share)  # the smallest batch that keeps up
    return {
        "tok_s": part.tok_s,
        "replicas": replicas,
        "gpus": replicas * plan.gpus_per_replica,
        "batch": batch,
        "k": policy.k_at(batch),
        "tok_s_per_request": rates[batch - 1] / batch,
    }
