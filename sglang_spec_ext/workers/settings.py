"""From the user's configuration to the controller's settings."""

from sglang_spec_ext.config import ConfigError, SpecExtConfig
from sglang_spec_ext.control.hysteresis import HysteresisSettings
from sglang_spec_ext.control.ladder import BatchLadder, LadderError, read_ladder
from sglang_spec_ext.control.probe import ProbeSettings
from sglang_spec_ext.control.settings import ControllerSettings, Verify
from sglang_spec_ext.records import Mode

LADDER = (0, 1, 2, 3, 5, 7, 11, 15)
PATIENCE_STEPS = 128


def tiers_of(chosen: str, max_k: int) -> tuple[int, ...]:
    """Return the tiers for a draft that makes `max_k` tokens; ConfigError when one of them is larger."""
    if chosen == "auto":
        return (*(k for k in LADDER if k < max_k), max_k)
    tiers = {int(part) for part in chosen.split(",")}
    too_large = sorted(k for k in tiers if k > max_k)
    if too_large:
        raise ConfigError(
            f"--spec-ext-tiers {chosen}: K = {too_large[0]} is more than the {max_k} tokens that "
            f"the draft makes; use values up to {max_k}"
        )
    return tuple(sorted(tiers | {max_k}))


def ladder_of(path: str, max_k: int) -> BatchLadder | None:
    """Return the ladder of a draft that makes `max_k` tokens; ConfigError when the file asks for more."""
    if path == "none":
        return None
    try:
        return read_ladder(path, max_k=max_k)
    except LadderError as error:
        raise ConfigError(f"--spec-ext-ladder {error}") from error


def controller_settings(chosen: SpecExtConfig, *, max_k: int, ranks: int) -> ControllerSettings:
    """Return the settings of the controller of one replica."""
    return ControllerSettings(
        tiers=tiers_of(chosen.tiers, max_k),
        fixed_k=max_k,
        ladder=ladder_of(chosen.ladder, max_k),
        mode=Mode(chosen.mode),
        verify=Verify(chosen.verify),
        hysteresis=HysteresisSettings(
            min_gain=chosen.min_gain,
            dwell_steps=chosen.dwell_steps,
            patience_steps=max(PATIENCE_STEPS, chosen.dwell_steps),
        ),
        probe=ProbeSettings(max_fraction=chosen.probe_max_fraction),
        ranks=ranks,
    )
