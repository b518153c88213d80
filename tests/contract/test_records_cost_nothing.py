"""A server that is not disaggregated installs none of the hooks of PD records, in no process."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("sglang")

from sglang_spec_ext import plugin
from sglang_spec_ext.hooks import PD_HOOKS

LAUNCH = """
import sys
from sglang_spec_ext import flags, hook_install, launch
from sglang_spec_ext.config import SpecExtConfig
chosen = SpecExtConfig(mode="shadow", pd_transport=sys.argv[2])
launch.activate(chosen, algorithm="DSPARK", disaggregation_mode=sys.argv[1], attention_dp=False)
installed = [hook for hook in hook_install.installed() if hook.when == "pd"]
print(flags.active_config().pd_transport, len(installed), "sglang_spec_ext.disagg.session" in sys.modules)
"""

def run(code: str, *arguments: str, **environment: str) -> str:
    command = [sys.executable, "-P", "-c", code, *arguments]
    environment = {**os.environ, "SGLANG_PLATFORM": "spec_ext_cpu", **environment}
    shown = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=300)
    return shown.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("mode", "transport", "carried", "hooks"),
    [
        ("null", "aux", "off", 0),
        ("decode", "sidecar", "sidecar", len(PD_HOOKS)),
    ],
)
def test_the_launcher_decides_by_the_mode_of_the_server(mode, transport, carried, hooks) -> None:
    assert run(LAUNCH, mode, transport) == f"{carried} {hooks} False"


def test_a_child_follows_what_the_launcher_decided() -> None:
    assert "pd" not in plugin._wanted(on_cpu=True, active=True, records=False)
    assert plugin._wanted(on_cpu=False, active=True, records=True) >= {"pd", "active"}
