"""What cannot be served ends with one clear message and a non-zero exit, and leaves nothing behind."""

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("sglang")

from sglang_spec_ext.testing import Server, running_server, session_members, start_server, wait_until_ready

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

CPU = {
    "SGLANG_PLATFORM": "spec_ext_cpu",
    "OMP_NUM_THREADS": "1",
    # a server that crashes would look for core dumps of CUDA for more than a minute
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}
BASE = ("--device", "cpu", "--dtype", "float32", "--max-total-tokens", "2048", "--max-running-requests", "4",
        "--skip-tokenizer-init", "--log-level", "error")  # fmt: skip
SHARED_MEMORY = Path("/dev/shm")

# sitecustomize of a child process: the plugin cannot be imported there
BROKEN_IN_CHILDREN = """
import sys
if "--multiprocessing-fork" in sys.orig_argv:
    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "sglang_spec_ext.plugin":
                raise ImportError("broken on purpose")
    sys.meta_path.insert(0, Broken())
"""


def fails(argv: list[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    """Start a server that must not come up; return its exit status and its output."""
    server = start_server(argv, environment={**CPU, **(environment or {})})
    try:
        try:
            status = server.process.wait(150)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the server did not end\n{server.log_tail()}")
        assert_nothing_runs(server)
        return status, server.log.read_text(encoding="utf-8", errors="replace")
    finally:
        server.kill()
        server.log.unlink()


def assert_nothing_runs(server: Server, within_s: float = 20.0) -> None:
    """A server that was killed needs a moment until its children are gone."""
    deadline = time.monotonic() + within_s
    while session_members(server.process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert session_members(server.process.pid) == []


def message_of(output: str) -> str:
    """Return the one line that this project printed."""
    found = re.findall(r"^sglang-spec-ext: error: (.*)$", output, re.MULTILINE)
    assert len(found) == 1, output[-3000:]
    return found[0]


@pytest.fixture(scope="module")
def target(checkpoint: Callable[[str], Path]) -> list[str]:
    return ["--model-path", str(checkpoint("blend-llama")), *BASE]


def speculative(algorithm: str, folder: Path) -> list[str]:
    return ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(folder)]


def test_unknown_value(target) -> None:
    status, output = fails([*target, "--spec-ext-mode", "sometimes"])
    assert status == 2
    assert "--spec-ext-mode" in output
    assert "sometimes" in output


@pytest.mark.parametrize(
    ("content", "names"),
    [(None, "absent.json"), ('{"mode"', "truncated"), ('{"mode": "shadow", "tierz": 1}', "tierz")],
    ids=["missing", "malformed", "unknown key"],
)
def test_bad_configuration_file(target, tmp_path: Path, content: str | None, names: str) -> None:
    path = tmp_path / "absent.json"
    if content is not None:
        path.write_text(content)
    status, output = fails([*target, "--spec-ext-config", str(path)])
    assert status == 1
    assert names in message_of(output)


def test_wrong_sglang_version(target, tmp_path: Path) -> None:
    metadata = tmp_path / "sglang-0.4.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.0\n")
    status, output = fails([*target, "--spec-ext-mode", "shadow"], {"PYTHONPATH": str(tmp_path)})
    assert status == 1
    message = message_of(output)
    assert "0.4.0" in message
    assert "0.5.23" in message


def test_platform_not_selected(target, checkpoint) -> None:
    arguments = [*target, *speculative("DSPARK", checkpoint("blend-dspark")), "--spec-ext-mode", "shadow"]
    status, output = fails(arguments, {"SGLANG_PLATFORM": ""})
    assert status == 1
    assert "SGLANG_PLATFORM=spec_ext_cpu" in message_of(output)


def test_draft_of_another_size(target, checkpoint, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(checkpoint("blend-dspark"), draft)
    config = json.loads((draft / "config.json").read_text())
    config["hidden_size"] = 256
    (draft / "config.json").write_text(json.dumps(config))
    status, output = fails([*target, *speculative("DSPARK", draft), "--spec-ext-mode", "shadow"])
    assert status == 1
    assert "hidden_size" in message_of(output)


def test_draft_with_a_missing_tensor(target, checkpoint, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    draft = tmp_path / "draft"
    shutil.copytree(checkpoint("blend-dflash"), draft)
    weights = load_file(draft / "model.safetensors")
    del weights["layers.1.mlp.down_proj.weight"]
    save_file(weights, draft / "model.safetensors")
    status, output = fails([*target, *speculative("DFLASH", draft)])
    assert status == 1
    assert "layers.1.mlp.down_proj.weight" in message_of(output)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        (["--speculative-algorithm", "STANDALONE"], "STANDALONE"),
        (["--tp", "2", "--dp", "2", "--enable-dp-attention"], "--attn-dp-size 2"),
    ],
    ids=["algorithm", "attention data parallelism"],
)
def test_the_cpu_platform_refuses_by_name(target, flags: list[str], names: str) -> None:
    """The rest of the refusals: `tests/cpu/test_refusals.py`."""
    status, output = fails([*target, *flags])
    assert status == 1
    assert names in message_of(output)


def test_plugin_broken_in_a_child(target, checkpoint, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(BROKEN_IN_CHILDREN)
    arguments = [*target, *speculative("DSPARK", checkpoint("blend-dspark")), "--spec-ext-mode", "shadow"]
    status, output = fails(arguments, {"PYTHONPATH": str(tmp_path)})
    assert status != 0
    assert "without its plugin" in message_of(output)
    assert "broken on purpose" in output


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file() or path.is_socket())


def shared_memory_of(pids: list[int]) -> set[Path]:
    """Return the shared-memory files that processes have mapped."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found |= {Path(path) for path in re.findall(rf"{SHARED_MEMORY}/\S+", Path(f"/proc/{pid}/maps").read_text())}
    return found


def assert_gone(files: set[Path], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while left := {path for path in files if path.exists()}:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_stopped_server_leaves_no_process_no_port_and_no_file(target, tmp_path: Path, how: signal.Signals) -> None:
    environment = {**CPU, "TMPDIR": str(tmp_path)}
    server: Server = start_server(target, environment=environment)
    try:
        wait_until_ready(server)
        members = server.session_members()
        assert len(members) >= 3
        shared_memory = shared_memory_of(members)
        assert shared_memory
        server.process.send_signal(how)
        server.process.wait(60)
        assert_nothing_runs(server)
    finally:
        server.kill()
        server.log.unlink()
    port = int(server.url.rpartition(":")[2])
    with socket.socket() as probe:
        # connections that the test itself closed may linger; a listener would still be in the way
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", port))
    assert leftovers(tmp_path) == []
    assert_gone(shared_memory)


def test_sglang_serve_takes_the_flags_too(target, checkpoint) -> None:
    import sys

    import httpx

    launcher = [str(Path(sys.executable).parent / "sglang"), "serve"]
    arguments = [*target, *speculative("DSPARK", checkpoint("blend-dspark")), "--spec-ext-mode", "shadow"]
    with running_server(arguments, environment=CPU, launcher=launcher) as server:
        info = httpx.get(f"{server.url}/server_info", timeout=60).json()
    assert info["spec_ext"]["mode"] == "shadow"
    assert info["spec_ext"]["worker"].startswith("SpecExt")
