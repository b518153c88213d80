"""What a step costs: draft_s(K, batch) + verify_s(tokens, batch) + fixed_s, by bucket of context length.

The table is measured on the real path at start-up and is additive in batch and tokens: with one batch size
alone the two cannot be told apart, so both are swept. Nothing here is refused quietly: a table that cannot
be trusted raises CostTableError with the reason, because a planner that prices tokens at zero verifies
everything.
"""

import json
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_spec_ext.control.curve import CostTableError, Curve, check_points
from sglang_spec_ext.records import FloatArray, IntArray


class StepCost(Protocol):
    """Seconds of the parts of a step; the planner needs nothing else."""

    @property
    def fixed_s(self) -> float:
        """Seconds of a step that neither K nor the batch changes."""

    def draft_s(self, k: int, batch: int, context_len: int = 0) -> float:
        """Seconds of drafting K tokens per request; at K = 0 what keeps the draft usable."""

    def verify_s(self, tokens: int, batch: int, context_len: int = 0) -> float:
        """Seconds of one target pass over `tokens` tokens of `batch` requests."""

    def verify_many(self, tokens: IntArray, batch: int, context_len: int = 0) -> FloatArray:
        """Seconds [N] for token counts [N]."""


@dataclass(frozen=True, slots=True)
class ContextBucket:
    """Curves measured at one context length."""

    context_len: int
    tokens: Curve  # seconds of a target pass by token count, at the smallest batch
    batch: Curve | None  # seconds to add by batch size; None when one batch size was swept
    draft: tuple[tuple[int, Curve], ...]  # (K, seconds by batch), K rising

    def __post_init__(self) -> None:
        label = f"context_len={self.context_len}"
        if len(self.tokens.points) < 2:
            raise CostTableError(
                f"{label} tokens: one size {self.tokens.points} has no slope; measure at least two"
            )
        check_points(f"{label} tokens", self.tokens.points, self.tokens.seconds)
        if self.batch is not None:
            check_points(f"{label} batch", self.batch.points, self.batch.seconds, zero_ok=True)
        ks = [k for k, _ in self.draft]
        if ks != sorted(set(ks)) or any(k < 0 for k in ks):
            raise CostTableError(f"{label} draft: K must be >= 0 and strictly increasing, got {ks}")
        if not any(k > 0 for k in ks):
            raise CostTableError(f"{label} draft: no K > 0 was measured; measure drafting at each tier")
        for k, curve in self.draft:
            check_points(f"{label} draft K={k}", curve.points, curve.seconds, zero_ok=k == 0)

    def draft_s(self, k: int, batch: int) -> float:
        """Seconds of drafting; between measured K > 0 a line, beyond the last one its slope."""
        below: tuple[int, float] | None = None
        for measured_k, curve in self.draft:
            if measured_k == k:
                return curve.at(batch)
            if measured_k == 0:
                continue
            if measured_k > k:
                above = curve.at(batch)
                if below is None or k == 0:
                    return above if k else 0.0
                return below[1] + (above - below[1]) * (k - below[0]) / (measured_k - below[0])
            below = (measured_k, curve.at(batch))
        assert below is not None  # __post_init__ requires a K > 0
        positive = [(m, c) for m, c in self.draft if m > 0]
        if k == 0 or len(positive) == 1:
            return below[1] if k else 0.0
        earlier_k, earlier = positive[-2]
        slope = max(0.0, below[1] - earlier.at(batch)) / (below[0] - earlier_k)
        return below[1] + slope * (k - below[0])

    def verify_s(self, tokens: int, batch: int) -> float:
        """Seconds of one target pass."""
        return self.tokens.at(tokens) + (0.0 if self.batch is None else self.batch.at(batch))

    def verify_many(self, tokens: IntArray, batch: int) -> FloatArray:
        """Seconds [N] of target passes over tokens [N]."""
        return self.tokens.at_many(tokens) + (0.0 if self.batch is None else self.batch.at(batch))


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured cost of a step, for one model, draft, device and back end (`fingerprint`)."""

    buckets: tuple[ContextBucket, ...]  # rising context length
    fixed_s: float = 0.0
    fingerprint: Mapping[str, str] = field(default_factory=dict)
    _lengths: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        lengths = tuple(bucket.context_len for bucket in self.buckets)
        if not lengths or list(lengths) != sorted(set(lengths)) or lengths[0] < 0:
            raise CostTableError(f"buckets: context lengths must rise and be >= 0, got {list(lengths)}")
        if not 0 <= self.fixed_s < float("inf"):
            raise CostTableError(f"fixed_s: must be finite and >= 0, got {self.fixed_s}; measure it again")
        object.__setattr__(self, "_lengths", lengths)

    def bucket(self, context_len: int) -> ContextBucket:
        """Return the bucket at or above a context length, the last one beyond."""
        return self.buckets[self.bucket_index(context_len)]

    def bucket_index(self, context_len: int) -> int:
        """Index of `bucket(context_len)`."""
        last = len(self._lengths) - 1
        return min(bisect_left(self._lengths, context_len), last) if last else 0

    def draft_s(self, k: int, batch: int, context_len: int = 0) -> float:
        """See StepCost."""
        return self.bucket(context_len).draft_s(k, batch)

    def verify_s(self, tokens: int, batch: int, context_len: int = 0) -> float:
        """See StepCost."""
        return self.bucket(context_len).verify_s(tokens, batch)

    def verify_many(self, tokens: IntArray, batch: int, context_len: int = 0) -> FloatArray:
        """See StepCost."""
        return self.bucket(context_len).verify_many(tokens, batch)

    def require_coverage(self, tokens: int) -> None:
        """Raise CostTableError unless every bucket was measured up to `tokens` verify tokens."""
        for bucket in self.buckets:
            if bucket.tokens.largest < tokens:
                raise CostTableError(
                    f"context_len={bucket.context_len} tokens: measured up to {bucket.tokens.largest}, but a "
                    f"full batch verifies {tokens}; measure up to there, or lower the batch limit or K"
                )

    def as_dict(self) -> dict[str, Any]:
        """Plain form of the table, as saved; `digest` is over this."""
        return {
            "buckets": [
                {
                    "context_len": bucket.context_len,
                    "tokens": _curve_dict(bucket.tokens),
                    "batch": None if bucket.batch is None else _curve_dict(bucket.batch),
                    "draft": [{"k": k, **_curve_dict(curve)} for k, curve in bucket.draft],
                }
                for bucket in self.buckets
            ],
            "fixed_s": self.fixed_s,
            "fingerprint": dict(self.fingerprint),
        }

    def digest(self) -> str:
        """SHA-256 of the table; ranks compare it before they decide anything together."""
        import hashlib  # here: OpenSSL is a good part of importing this package

        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=False)
        return hashlib.sha256(text.encode()).hexdigest()


def _curve_dict(curve: Curve) -> dict[str, Any]:
    return {
        "points": list(curve.points),
        "seconds": list(curve.seconds),
        "captured_max": curve.captured_max,
    }
