"""Free slots are filled at once where the controller acts; elsewhere, and on request, as SGLang does it."""

import os
import subprocess
import sys

import pytest

from sglang_spec_ext import flags
from sglang_spec_ext.config import SpecExtConfig

# what a scheduler's process does before it makes its scheduler
SCHEDULER = """
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.managers import scheduler
for given, slots in ((None, 16), (None, 4), (3, 16), (1, 16)):
    print(scheduler.resolve_min_free_slots(given, slots, is_dflash_family=True), end=" ")
"""


@pytest.mark.parametrize(
    ("mode", "found"), [("off", "3 None 3 None"), ("shadow", "3 None 3 None"), ("adaptive", "None None 3 None")]
)
def test_prefills_wait_for_free_slots_only_where_sglang_or_the_user_says_so(mode: str, found: str) -> None:
    with flags.exported(SpecExtConfig(mode=mode)):
        done = subprocess.run(
            [sys.executable, "-c", SCHEDULER],
            env={**os.environ, "SGLANG_PLATFORM": "spec_ext_cpu"},
            capture_output=True, text=True, timeout=120, check=True,
        )  # fmt: skip
    assert done.stdout.strip().splitlines()[-1].strip() == found
