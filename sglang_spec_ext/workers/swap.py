"""Attributes of a worker that change together with the verify width."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Swap:
    """A set of attribute values that a worker takes on for a step, then gives back.

    What the step assigned to these attributes (buffers that grew) is kept for the next step at this width.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    @contextmanager
    def on(self, worker: Any) -> Iterator[None]:
        """Give the worker these values for the duration of a block."""
        own = {name: getattr(worker, name) for name in self._values}
        for name, value in self._values.items():
            setattr(worker, name, value)
        try:
            yield
        finally:
            for name, value in own.items():
                self._values[name] = getattr(worker, name)
                setattr(worker, name, value)
