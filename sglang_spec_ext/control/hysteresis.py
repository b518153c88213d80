"""When to leave the arm in use: margin, dwell time, switch cost.

A switch happens only if the predicted gain exceeds the margin, the last switch is `dwell_steps` old, and
the gain over the expected stay pays the switch. The margin starts at `min_gain` and halves each time a
better arm has waited `patience_steps`, down to a quarter or the noise of the prediction: a small gain that
lasts is worth taking. Inside one dwell there is at most one free switch, so A -> B -> A cannot happen
there. After a trial (trial.py), in the dwell after its own, a better arm needs no margin: both arms are measured
by then, and the tried one has no claim beyond being better. A cap that forbids the arm in use is obeyed at once;
going back up is a free switch, and the caller offers only arms that were allowed during the whole last dwell.
"""

from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.records import Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class HysteresisSettings:
    """Limits of switching."""

    min_gain: float = 0.04
    dwell_steps: int = 16
    patience_steps: int = 128
    switch_cost_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.min_gain < 1.0:
            raise ValueError(f"min_gain: must be in 0..1, got {self.min_gain}; 0.04 is the default")
        if self.dwell_steps < 1:
            raise ValueError(f"dwell_steps: must be >= 1, got {self.dwell_steps}; 16 is the default")
        if self.patience_steps < self.dwell_steps:
            raise ValueError(
                f"patience_steps: must be >= dwell_steps={self.dwell_steps}, got {self.patience_steps}"
            )
        if not 0.0 <= self.switch_cost_s < float("inf"):
            raise ValueError(f"switch_cost_s: must be finite and >= 0, got {self.switch_cost_s}")


class Hysteresis:
    """The arm in use and the rule to leave it; arms are any integers."""

    def __init__(self, arm: int, settings: HysteresisSettings) -> None:
        self.settings = settings
        self.arm = arm
        self.switches = 0
        self.last_switch = -settings.dwell_steps  # the first switch needs no dwell
        self.expected_stay = float(4 * settings.dwell_steps)  # steps, learned from past stays
        self._better_since: int | None = None
        self._on_trial = False

    def rested(self, step: int) -> bool:
        """Return whether the last switch is a dwell old."""
        return step - self.last_switch >= self.settings.dwell_steps

    def propose(self, step: int, arm: int, *, gain: float, noise: float, step_s: float) -> tuple[int, Reason]:
        """Return the arm to run when `arm` is the best one of this step, and why; nothing moves yet.

        `gain` is its predicted rate over that of the arm in use, minus 1; `noise` the standard error of that;
        `step_s` the seconds of a step.
        """
        if arm == self.arm or gain <= 0.0:
            self._better_since = None
            return self.arm, Reason.BEST
        if self._better_since is None:
            self._better_since = step
        if gain <= self.margin(step, noise):
            return self.arm, Reason.MARGIN
        if not self.rested(step):
            return self.arm, Reason.DWELL
        if gain * self.expected_stay * step_s <= self.settings.switch_cost_s:
            return self.arm, Reason.SWITCH_COST
        return arm, Reason.SWITCH

    def margin(self, step: int, noise: float) -> float:
        """Gain that a better arm must exceed at `step`."""
        if self._on_trial and step - self.last_switch < 2 * self.settings.dwell_steps:
            return 0.0
        since = step if self._better_since is None else self._better_since
        waited = (step - since) // self.settings.patience_steps
        return max(noise, self.settings.min_gain * 0.5 ** min(waited, 2))

    def commit(self, step: int, arm: int, *, trial: bool = False) -> None:
        """Take an arm: what `propose` returned, a cap, a pin, a trial, or what all ranks agreed on."""
        if arm == self.arm:
            return
        if self.switches:
            self.expected_stay += 0.25 * (step - self.last_switch - self.expected_stay)
        self.arm, self.last_switch = arm, step
        self.switches += 1
        self._better_since = None
        self._on_trial = trial

    def snapshot(self) -> dict[str, Any]:
        """Plain facts."""
        return {
            "arm": self.arm,
            "switches": self.switches,
            "last_switch": self.last_switch,
            "expected_stay_steps": self.expected_stay,
            "better_since": self._better_since,
        }
