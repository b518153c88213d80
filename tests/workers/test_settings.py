"""From what the user asks to what the controller may choose."""

import json
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


SLOTS = {"1": {"candidate_steps": [1, 7]}, "8": {"candidate_steps": [1, 3], "ema_alpha": 0.2}}


@pytest.mark.parametrize(
    ("content", "caps"),
    [
        ({"num_speculative_tokens_per_batch_size": [[1, 4, 7], [5, 32, 3], [33, 64, 0]]}, {4: 7, 5: 3, 64: 0}),
        ([[1, 4, 7], [5, 32, 3]], {4: 7, 5: 3, 64: 3}),
        (SLOTS, {1: 7, 7: 7, 8: 3, 64: 3}),
    ],
    ids=["vllm", "vllm bare", "sglang"],
)
def test_a_ladder_file_bounds_k(tmp_path, content, caps) -> None:
    path = tmp_path / "ladder.json"
    path.write_text(json.dumps(content))
    settings = controller_settings(SpecExtConfig(ladder=str(path)), max_k=7, ranks=1)
    assert {size: settings.ladder.cap(size) for size in caps} == caps


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        ("[[1, 4, 9]]", r"num_speculative_tokens_per_batch_size\[0\]: K must be in 0..7"),
        ('{"num_speculative_tokens_per_batch_size": [[2, 4, 1]]}', "first band must start at 1"),
        ('{"num_speculative_tokens_per_batch_size": [[1, 4, 1]], "model": "m"}', "'model': unknown key"),
        ('{"1": {"candidate_steps": [1], "ema_alhpa": 0.2}}', "unknown key 'ema_alhpa'"),
        ('{"one": {}}', "adaptive config key 'one'"),
        ("{", "not JSON"),
        (None, "cannot be read"),
    ],
)
def test_a_ladder_that_cannot_be_used_is_refused_with_its_key(tmp_path, content, rule) -> None:
    path = tmp_path / "ladder.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=rf"--spec-ext-ladder .*ladder.json: .*{rule}"):
        controller_settings(SpecExtConfig(ladder=str(path)), max_k=7, ranks=1)


def test_the_launcher_refuses_a_wrong_ladder_before_anything_is_loaded(tmp_path) -> None:
    pytest.importorskip("torch")
    from sglang_spec_ext import launch

    path = tmp_path / "ladder.json"
    path.write_text('{"1": {"candidate_steps": []}}')
    with pytest.raises(ConfigError, match="candidate_steps needs a list"):
        launch._check_ladder(SpecExtConfig(mode="adaptive", ladder=str(path)))


ACTIVATE = """
import os, sys
from sglang_spec_ext import launch
from sglang_spec_ext.config import SpecExtConfig
with launch.ragged_mode_restored():
    launch.activate(
        SpecExtConfig(mode="adaptive", verify=sys.argv[2]),
        algorithm=sys.argv[1], disaggregation_mode="null", attention_dp=sys.argv[3] == "True",
    )
    inside = os.environ.get(launch.RAGGED_MODE)
print(inside, os.environ.get(launch.RAGGED_MODE))
"""


@pytest.mark.engine
@pytest.mark.parametrize(
    ("algorithm", "verify", "attention_dp", "given", "shown"),
    [
        ("DSPARK", "ragged", False, None, "compact None"),
        ("DSPARK", "ragged", False, "static", "static static"),  # a person's own choice stands
        ("DSPARK", "ragged", True, None, "None None"),  # runs uniform, and SGLang refuses the mode
        ("DSPARK", "uniform", False, None, "None None"),
        ("DFLASH", "ragged", False, None, "None None"),
    ],
)
def test_the_launcher_chooses_the_mode_that_a_ragged_dspark_needs(
    algorithm, verify, attention_dp, given, shown
) -> None:
    environment = {**os.environ, "SGLANG_PLATFORM": "spec_ext_cpu"}
    environment |= {} if given is None else {"SGLANG_RAGGED_VERIFY_MODE": given}
    done = subprocess.run(
        [sys.executable, "-c", ACTIVATE, algorithm, verify, str(attention_dp)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == shown


@pytest.mark.parametrize(
    ("proofs", "rule"),
    [
        ([None, None], "started without sglang-spec-ext"),
        (["ours", None], "started without sglang-spec-ext"),
        (["ours", "0.0.0"], r"runs sglang-spec-ext 0\.0\.0"),
        (["ours", "ours"], None),
    ],
)
def test_a_data_parallel_controller_proves_what_all_its_schedulers_proved(proofs, rule) -> None:
    pytest.importorskip("torch")
    from types import SimpleNamespace

    from sglang_spec_ext import __version__, flags, launch

    versions = [__version__ if proof == "ours" else proof for proof in proofs]
    infos = [{} if version is None else {launch.PROOF_KEY: {"version": version}} for version in versions]
    found = launch.forward_proof({"status": "ready"}, SimpleNamespace(_scheduler_init_infos=infos))
    with flags.exported(SpecExtConfig(mode="shadow")):
        if rule is None:
            launch.require_proof([found])
            return
        with pytest.raises(launch.NotActive, match=rule):
            launch.require_proof([found])
