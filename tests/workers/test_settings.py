"""From what the user asks to what the controller may choose."""

import os
import subprocess
import sys

import pytest

from sglang_spec_ext.config import ConfigError, SpecExtConfig
from sglang_spec_ext.workers.settings import controller_settings, tiers_of


@pytest.mark.parametrize(
    ("chosen", "max_k", "tiers"),
    [
        ("auto", 7, (0, 1, 2, 3, 5, 7)),
        ("auto", 3, (0, 1, 2, 3)),
        ("auto", 1, (0, 1)),
        ("auto", 16, (0, 1, 2, 3, 5, 7, 11, 15, 16)),
        ("3,0,1", 7, (0, 1, 3, 7)),  # the draft's own K is always there: buffers are sized by it
        ("7", 7, (7,)),
    ],
)
def test_tiers(chosen, max_k, tiers) -> None:
    assert tiers_of(chosen, max_k) == tiers


def test_a_tier_above_the_draft_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"K = 9 is more than the 7 tokens.*use values up to 7"):
        tiers_of("0,9", 7)


def test_settings_carry_the_flags() -> None:
    chosen = SpecExtConfig(mode="shadow", min_gain=0.1, dwell_steps=300, probe_max_fraction=0.0)
    settings = controller_settings(chosen, max_k=7, ranks=2)
    assert (settings.mode, settings.full_k, settings.max_k, settings.ranks) == ("shadow", 7, 7, 2)
    assert (settings.hysteresis.min_gain, settings.hysteresis.dwell_steps) == (0.1, 300)
    assert settings.hysteresis.patience_steps >= 300
    assert settings.probe.max_fraction == 0.0


ACTIVATE = """
import os, sys
from sglang_spec_ext import launch
from sglang_spec_ext.config import SpecExtConfig
with launch.ragged_mode_restored():
    launch.activate(
        SpecExtConfig(mode="adaptive", verify=sys.argv[2]), algorithm=sys.argv[1], disaggregation_mode="null"
    )
    inside = os.environ.get(launch.RAGGED_MODE)
print(inside, os.environ.get(launch.RAGGED_MODE))
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("algorithm", "verify", "given", "shown"),
    [
        ("DSPARK", "ragged", None, "compact None"),
        ("DSPARK", "ragged", "static", "static static"),  # a person's own choice stands
        ("DSPARK", "uniform", None, "None None"),
        ("DFLASH", "ragged", None, "None None"),
    ],
)
def test_the_launcher_chooses_the_mode_that_a_ragged_dspark_needs(algorithm, verify, given, shown) -> None:
    environment = {**os.environ, "SGLANG_PLATFORM": "spec_ext_cpu"}
    environment |= {} if given is None else {"SGLANG_RAGGED_VERIFY_MODE": given}
    done = subprocess.run(
        [sys.executable, "-c", ACTIVATE, algorithm, verify],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == shown
