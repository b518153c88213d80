"""Which K are allowed: the tiers that were captured, and an upper bound by batch size.

Two published forms of the bound are read as they are: vLLM's `num_speculative_tokens_per_batch_size` and the
JSON of SGLang's `--speculative-adaptive-config`. Both are checked to the last key, because a typo that passes
silently is a feature that silently does nothing.
"""

import json
import re
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

_SLOT_KEYS = {
    "candidate_steps",
    "ema_alpha",
    "update_interval",
    "warmup_batches",
    "up_hysteresis",
    "down_hysteresis",
    "ceiling_coeff",
}
VLLM_KEY = "num_speculative_tokens_per_batch_size"
LARGEST_K = 255


class LadderError(ValueError):
    """A ladder that must not be used; the message names the key, the rule, the value and the cure."""


def check_tiers(tiers: Sequence[Any], key: str = "tiers") -> tuple[int, ...]:
    """Return the tiers if they are distinct, rising K >= 0 with one above 0."""
    if not tiers or any(not _is_int(k) or not 0 <= k <= LARGEST_K for k in tiers):
        raise LadderError(f"{key}: needs integers in 0..{LARGEST_K}, got {list(tiers)}")
    if list(tiers) != sorted(set(tiers)):
        raise LadderError(f"{key}: must be distinct and rising, got {list(tiers)}; sort them, drop repeats")
    if tiers[-1] == 0:
        raise LadderError(f"{key}: holds only 0, so nothing is ever drafted; add a K above 0")
    return tuple(tiers)


@dataclass(frozen=True, slots=True)
class BatchLadder:
    """Largest K by batch size: `caps[i]` holds from `starts[i]` requests up to the next start."""

    starts: tuple[int, ...]
    caps: tuple[int, ...]
    ignored: tuple[str, ...] = ()  # keys that were valid and have no meaning here

    def cap(self, num_reqs: int) -> int:
        """Return the largest K allowed for a batch."""
        return self.caps[max(0, bisect_right(self.starts, num_reqs) - 1)]


def read_ladder(path: str | Path, *, max_k: int) -> BatchLadder:
    """Read a file in either form: an object with vLLM's key (or its bare list of bands), or SGLang's slots."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LadderError(f"{path}: cannot be read ({error}); give a JSON file") from error
    try:
        raw = _strict_json(text)
        if isinstance(raw, list):
            return from_vllm_table(raw, max_k=max_k)
        if not isinstance(raw, dict) or VLLM_KEY not in raw:
            return from_sglang_adaptive(text)
        if len(raw) > 1:
            other = next(key for key in raw if key != VLLM_KEY)
            raise LadderError(f"{other!r}: unknown key beside {VLLM_KEY}; leave it out")
        return from_vllm_table(raw[VLLM_KEY], max_k=max_k)
    except LadderError as error:
        raise LadderError(f"{path}: {error}") from error


def from_vllm_table(rows: Sequence[Any], *, max_k: int) -> BatchLadder:
    """Read `[[first, last, K], ...]`: starts at 1, no overlap; a gap keeps the K before it."""
    key = VLLM_KEY
    if not isinstance(rows, list | tuple) or not rows:
        raise LadderError(f"{key}: needs a list of [first, last, K], got {rows!r}")
    starts, caps = [], []
    previous_last = 0
    for index, row in enumerate(rows):
        name = f"{key}[{index}]"
        if not isinstance(row, list | tuple) or len(row) != 3 or any(not _is_int(v) for v in row):
            raise LadderError(f"{name}: needs three integers [first, last, K], got {row!r}")
        first, last, k = row
        if first < 1 or last < first:
            raise LadderError(f"{name}: needs 1 <= first <= last, got {row!r}")
        if index == 0 and first != 1:
            raise LadderError(f"{name}: the first band must start at 1, got {first}")
        if first <= previous_last:
            raise LadderError(f"{name}: starts at {first}, but the band before it ends at {previous_last}")
        if not 0 <= k <= max_k:
            raise LadderError(f"{name}: K must be in 0..{max_k}, the drafts made per step, got {k}")
        starts.append(first)
        caps.append(k)
        previous_last = last
    return BatchLadder(tuple(starts), tuple(caps))


def from_sglang_adaptive(text: str | bytes) -> BatchLadder:
    """Read SGLang's adaptive JSON; a slot bounds K by its largest candidate.

    The older flat form with `candidate_steps` at the top is one slot from batch 1. What tunes SGLang's own
    moving average is checked and listed in `ignored`.
    """
    raw = _strict_json(text)
    if not isinstance(raw, dict):
        raise LadderError(f"adaptive config: needs an object of batch-size slots, got {type(raw).__name__}")
    slots: dict[int, tuple[str, dict[str, Any]]] = {}
    shared = {key: value for key, value in raw.items() if key in _SLOT_KEYS}
    for key, value in raw.items():
        if key in _SLOT_KEYS:
            continue
        if not re.fullmatch(r"[0-9]+", key):
            raise LadderError(
                f"adaptive config key {key!r}: neither a batch size >= 1 nor one of {sorted(_SLOT_KEYS)}"
            )
        size = int(key)
        if size < 1:
            raise LadderError(f"adaptive config key {key!r}: a batch size must be >= 1")
        if size in slots:
            first = slots[size][0]
            raise LadderError(f"adaptive config key {key!r}: same batch size as key {first!r}; keep one")
        if not isinstance(value, dict):
            raise LadderError(f"adaptive config key {key!r}: needs an object, got {value!r}")
        slots[size] = (key, value)
    if not slots:
        slots[1] = ("candidate_steps", {})
    caps = [_slot_cap(key, {**shared, **own}) for key, own in (slots[size] for size in sorted(slots))]
    used = set(shared).union(*(own for _, own in slots.values())) - {"candidate_steps"}
    # below the first slot SGLang uses the first one
    return BatchLadder(tuple(sorted(slots)), tuple(caps), tuple(sorted(used)))


def _slot_cap(key: str, slot: dict[str, Any]) -> int:
    name = f"adaptive config key {key!r}"
    unknown = sorted(slot.keys() - _SLOT_KEYS)
    if unknown:
        raise LadderError(f"{name}: unknown key {unknown[0]!r}; known are {sorted(_SLOT_KEYS)}")
    steps = slot.get("candidate_steps")
    if not isinstance(steps, list) or not steps or any(not _is_int(k) for k in steps):
        raise LadderError(f"{name}: candidate_steps needs a list of integers, got {steps!r}")
    if not all(0 <= k <= LARGEST_K for k in steps):
        raise LadderError(f"{name}: candidate_steps needs integers in 0..{LARGEST_K}, got {steps!r}")
    if len(set(steps)) != len(steps):
        raise LadderError(f"{name}: candidate_steps repeats a value: {steps}")
    for field, low, high in (
        ("ema_alpha", 0.0, 1.0),
        ("up_hysteresis", -LARGEST_K, LARGEST_K),
        ("down_hysteresis", -LARGEST_K, LARGEST_K),
        ("ceiling_coeff", 0.0, LARGEST_K),
    ):
        value = slot.get(field, low)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise LadderError(f"{name}: {field} must be a number in {low}..{high}, got {value!r}")
    if slot.get("ema_alpha", 0.2) == 0:
        raise LadderError(f"{name}: ema_alpha 0 never learns; use a value above 0")
    for field, least in (("update_interval", 1), ("warmup_batches", 0)):
        value = slot.get(field, least)
        if not _is_int(value) or value < least:
            raise LadderError(f"{name}: {field} must be an integer >= {least}, got {value!r}")
    up, down = slot.get("up_hysteresis", 0.0), slot.get("down_hysteresis", -0.25)
    if up < down:
        raise LadderError(
            f"{name}: up_hysteresis {up} is below down_hysteresis {down}, so K flips at constant acceptance"
        )
    largest: int = max(steps)
    return largest


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _strict_json(text: str | bytes) -> Any:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, value in items:
            if key in result:
                raise LadderError(f"adaptive config key {key!r}: given twice; keep one")
            result[key] = value
        return result

    def constant(name: str) -> float:
        raise LadderError(f"adaptive config: {name} is not a number JSON allows; use a finite one")

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
    except json.JSONDecodeError as error:
        raise LadderError(f"adaptive config: not JSON ({error})") from error
    return _finite(value)


def _finite(value: Any) -> Any:
    """Reject numbers such as 1e999, which Python reads as infinity."""
    if isinstance(value, float) and not isfinite(value):
        raise LadderError("adaptive config: holds a number too large to be finite")
    if isinstance(value, dict):
        for inner in value.values():
            _finite(inner)
    return value
