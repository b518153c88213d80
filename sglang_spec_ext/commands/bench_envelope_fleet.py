"""The servers of `spec-ext bench envelope`: started when first asked for, all kept, or only the last few."""

import subprocess
import sys
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sglang_spec_ext.commands.bench_envelope_setups import ServerSpec
from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.runtime import SpecExt
from sglang_spec_ext.testing import Server, ServerFailed, running_server

# What a start must find free. A small server takes half of it; without the other half, pages of idle servers' code are
# dropped and read again in the middle of a measurement, which then takes up to twice the time.
MIN_FREE_BYTES = 5 << 30
START_TIMEOUT_S = 1800.0  # large weights, captured graphs and a profile
TABLE_TIMEOUT_S = 1200.0
TABLE_FLAG = "--speculative-dspark-sps-table-path"


class Unavailable(SpecExtError):
    """A setting cannot be measured here; the message is the reason that the report gives."""


@dataclass
class Running:
    """A server that answers, and its control where it runs the extension."""

    server: Server
    control: SpecExt | None
    closing: ExitStack

    @property
    def url(self) -> str:
        """Address of the server."""
        return self.server.url


class Fleet:
    """Servers by name; with `alive` set, at most so many at a time, the oldest ends first."""

    def __init__(self, specs: list[ServerSpec], *, alive: int | None, home: Path) -> None:
        self._specs = {spec.name: spec for spec in specs}
        self._alive = alive
        self._home = home  # profiles of this run alone: one from an earlier, busier hour would mislead
        self._running: dict[str, Running] = {}
        self._refused: dict[str, str] = {}
        self.table: Path | None = None  # SGLang's cost table, once measured

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *error: object) -> None:
        for name in list(self._running):
            self.stop(name)

    def get(self, name: str) -> Running:
        """Return the server, started if need be; Unavailable with the reason, the same one each time."""
        if name in self._refused:
            raise Unavailable(self._refused[name])
        if name not in self._running:
            while self._alive is not None and len(self._running) >= self._alive:
                self.stop(next(iter(self._running)))
            try:
                self._running[name] = self._start(self._specs[name])
            except (ServerFailed, Unavailable) as error:
                self._refused[name] = reason_of(error)
                raise Unavailable(self._refused[name]) from error
        return self._running[name]

    def stop(self, name: str) -> None:
        """End a server."""
        self._running.pop(name).closing.close()

    def _start(self, spec: ServerSpec) -> Running:
        free = free_bytes()
        if free is not None and free < MIN_FREE_BYTES:
            raise Unavailable(
                f"{free / 2**30:.1f} GiB of memory are free, a start needs {MIN_FREE_BYTES >> 30}; use --alive 1"
            )
        if spec.needs_table:
            if self.table is None:
                raise Unavailable("SGLang's profiler gave no cost table")
            spec = replace(spec, arguments=(*spec.arguments, TABLE_FLAG, str(self.table)))
        closing = ExitStack()
        server = closing.enter_context(serving(spec, {"SPEC_EXT_HOME": str(self._home)}))
        control = SpecExt(server.url) if spec.extended else None
        return Running(server, control, closing)


def serving(spec: ServerSpec, environment: dict[str, str]) -> AbstractContextManager[Server]:
    """Run a server for the duration of a block."""
    return running_server(spec.arguments, environment={**spec.environment, **environment}, timeout_s=START_TIMEOUT_S)


def reason_of(error: Exception) -> str:
    """Return one line of why a server did not start: the last error that its log names."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines)[-1][:300]


def free_bytes() -> int | None:
    """Return the memory that a new process can have; None where the system does not say."""
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    fields = dict(line.split(":", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def profile_by_sglang(spec: ServerSpec, out: Path, *, batch_sizes: list[int], steady_s: float) -> Path:
    """Measure a DSpark cost table with SGLang's own profiler on a server of its own; Unavailable when it refuses."""
    table = out / "sglang_sps.json"
    command: list[Any] = [sys.executable, "-m", "sglang.benchmark.dspark_sps_profiler", "all", "--no-plot"]
    command += ["--out", table, "--batch-size", *batch_sizes]
    command += ["--min-steady-steps", 12, "--min-steady-seconds", steady_s]
    try:
        with serving(spec, {}) as server:
            done = subprocess.run(
                [str(part) for part in [*command, "--base-url", server.url]],
                capture_output=True, text=True, timeout=TABLE_TIMEOUT_S, check=False,
            )  # fmt: skip
    except (ServerFailed, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"SGLang's profiler: {reason_of(error)}") from error
    if done.returncode != 0 or not table.exists():
        raise Unavailable(f"SGLang's profiler: {reason_of(RuntimeError(done.stderr or done.stdout or 'no output'))}")
    return table
