"""Time stamps of the parts of a step, on the host or on the device that runs them."""

import time
from typing import Any, Protocol


class Clock(Protocol):
    """Gives stamps and the seconds between two of them."""

    def now(self) -> Any:
        """Return a stamp of what was launched up to here."""

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two stamps; asked for only after the step's result has arrived."""


class HostClock:
    """For devices that run synchronously: wall time."""

    def now(self) -> float:
        """See Clock."""
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        """See Clock."""
        return end - start


class DeviceClock:
    """For devices with streams: events on the current stream, so that nothing waits for the device."""

    def __init__(self, device_module: Any) -> None:
        self._device = device_module

    def now(self) -> Any:
        """See Clock."""
        event = self._device.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """See Clock."""
        return float(start.elapsed_time(end)) / 1000.0


def clock_for(device: str) -> Clock:
    """Return the clock of a device such as `cpu` or `cuda`."""
    import torch

    name = str(device).partition(":")[0]
    return HostClock() if name == "cpu" else DeviceClock(torch.get_device_module(name))


class Stopwatch:
    """Adds up the time of one part of a step that runs in several pieces."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._pieces: list[tuple[Any, Any]] = []

    def add(self, start: Any) -> None:
        """Add the piece from `start` until now."""
        self._pieces.append((start, self.clock.now()))

    def take(self) -> list[tuple[Any, Any]]:
        """Return the pieces of this step and start anew."""
        pieces, self._pieces = self._pieces, []
        return pieces
