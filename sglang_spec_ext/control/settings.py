"""Settings of the controller, checked once."""

from dataclasses import dataclass, field
from enum import StrEnum

from sglang_spec_ext.control.hysteresis import HysteresisSettings
from sglang_spec_ext.control.ladder import BatchLadder, check_tiers
from sglang_spec_ext.control.probe import ProbeSettings
from sglang_spec_ext.records import Mode


class Verify(StrEnum):
    """`uniform`: one K for the batch; `ragged`: a budget, shared out by survival."""

    UNIFORM = "uniform"
    RAGGED = "ragged"


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerSettings:
    """What a person may set; the defaults are the product's."""

    tiers: tuple[int, ...]  # every K that was captured, rising; 0 = plain decoding
    fixed_k: int | None = None  # K of the engine's own fixed-width path; None: the largest tier
    mode: Mode = Mode.ADAPTIVE
    verify: Verify = Verify.UNIFORM  # an engine that needs equal blocks must leave it uniform
    ladder: BatchLadder | None = None
    hysteresis: HysteresisSettings = field(default_factory=HysteresisSettings)
    probe: ProbeSettings = field(default_factory=ProbeSettings)
    resume_warmup_steps: int = 0  # steps after K = 0 whose acceptance is not believed (unsynced draft KV)
    ragged_overhead_s: float = 0.0  # what the ragged path costs over the fixed-width one, measured
    ranks: int = 1  # above 1, decisions are votes and take effect through `adopt`

    def __post_init__(self) -> None:
        check_tiers(self.tiers)
        if self.fixed_k is not None and self.fixed_k not in self.tiers:
            raise ValueError(f"fixed_k: must be one of the tiers {list(self.tiers)}, got {self.fixed_k}")
        if self.resume_warmup_steps < 0 or self.resume_warmup_steps >= self.probe.steps:
            raise ValueError(
                f"resume_warmup_steps: must be in 0..{self.probe.steps - 1}, one below probe.steps, got "
                f"{self.resume_warmup_steps}; a probe shorter than the warm-up measures nothing"
            )
        if not 0.0 <= self.ragged_overhead_s < float("inf"):
            raise ValueError(f"ragged_overhead_s: must be finite and >= 0, got {self.ragged_overhead_s}")
        if self.ranks < 1:
            raise ValueError(f"ranks: must be >= 1, got {self.ranks}")

    @property
    def max_k(self) -> int:
        """Largest tier: buffers and KV reserves are sized by it, never by the K in use."""
        return self.tiers[-1]

    @property
    def full_k(self) -> int:
        """K of the fixed-width path."""
        return self.max_k if self.fixed_k is None else self.fixed_k

    @property
    def smallest_draft(self) -> int:
        """Smallest K above 0: what a probe runs."""
        return next(k for k in self.tiers if k > 0)
