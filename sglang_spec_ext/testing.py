"""Helpers for tests of this project and of programs that use it: a real server as a context manager.

The server runs in a session of its own and is ended by its own process id; nothing it started survives it.
"""

import contextlib
import http.client
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_PORTS = range(10_000, 21_000)


def free_port() -> int:
    """Return a TCP port that nothing listens on, from a range of which nothing else draws.

    A server binds its port half a minute after it was chosen. From the operating system's own range (32768 and up),
    another process would be given the same port in between; SGLang draws its own from 22000 to 29999
    (`sglang/srt/utils/network.py`).
    """
    for port in random.SystemRandom().sample(_PORTS, 64):  # tests seed the common generator alike
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            return port
    raise OSError(f"none of 64 ports from {_PORTS.start} to {_PORTS.stop - 1} is free")


class ServerFailed(RuntimeError):
    """The server ended, or did not become ready in time; the message ends with its log."""


@dataclass
class Server:
    """A running server: its address, process and log."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def log_tail(self, characters: int = 4000) -> str:
        """Return the end of the log."""
        return self.log.read_text(encoding="utf-8", errors="replace")[-characters:]

    def session_members(self) -> list[int]:
        """Return the process ids that belong to the server's session, the server included."""
        return session_members(self.process.pid)

    def stop(self) -> int:
        """Ask the server to end and wait; see `wait_until_ended`."""
        self.ask_to_end()
        return self.wait_until_ended()

    def ask_to_end(self) -> None:
        """Ask the server to end, and do not wait."""
        if self.process.poll() is None:
            self.process.terminate()

    def wait_until_ended(self) -> int:
        """Wait; whatever outlives STOP_TIMEOUT_S is killed. Returns the exit status."""
        try:
            self.process.wait(STOP_TIMEOUT_S)
        finally:
            self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """Kill what is left of the server's session."""
        for pid in self.session_members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)


def session_members(session: int) -> list[int]:
    """Return the ids of the processes in a session that have not ended."""
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, IndexError, ValueError):
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            if int(fields[3]) == session and fields[0] != "Z":
                members.append(int(entry.name))
    return members


def start_server(
    argv: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] | None = None,
    port: int | None = None,
) -> Server:
    """Start `sglang.launch_server` with `argv`, on a free port; returns at once, before it is ready."""
    port = free_port() if port is None else port
    command = [*(launcher or [sys.executable, "-m", "sglang.launch_server"]), *argv]
    command += ["--host", HOST, "--port", str(port)]
    handle, name = tempfile.mkstemp(prefix="spec_ext_server_", suffix=".log")
    with os.fdopen(handle, "wb") as log:
        process = subprocess.Popen(
            command,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
    return Server(f"http://{HOST}:{port}", process, Path(name))


def wait_until_ready(server: Server, timeout_s: float = START_TIMEOUT_S, *, route: str = "/health") -> None:
    """Wait until the server answers `route`; raise `ServerFailed` with its log when it ends first."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise ServerFailed(f"the server ended with status {server.process.returncode}\n{server.log_tail()}")
        if _answers(server, route):
            return
        time.sleep(0.2)
    raise ServerFailed(f"the server was not ready after {timeout_s:.0f} s\n{server.log_tail()}")


def _answers(server: Server, route: str) -> bool:
    try:
        with urllib.request.urlopen(f"{server.url}{route}", timeout=5) as answer:  # noqa: S310 - our own loopback
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):  # URLError is one of the first
        return False


@contextlib.contextmanager
def running_server(
    argv: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    launcher: Sequence[str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[Server]:
    """Run a server for the duration of a block; ServerFailed with its log when it is not ready in time."""
    server = start_server(argv, environment=environment, launcher=launcher)
    try:
        wait_until_ready(server, timeout_s)
        yield server
    finally:
        try:
            server.stop()
        finally:
            server.log.unlink(missing_ok=True)
