"""The part that every extended worker shares."""

from functools import cache


class SpecExtWorker:
    """Marks a worker of ours; the built-in worker class follows in the method resolution order."""


@cache
def extend(base: type) -> type:
    """Return the extended form of a built-in worker class."""
    return type(f"SpecExt{base.__name__}", (SpecExtWorker, base), {})
