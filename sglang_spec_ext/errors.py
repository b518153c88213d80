"""The base of this project's errors, and how a launcher shows them."""

import sys
from types import TracebackType


class SpecExtError(Exception):
    """An error whose message names the field, the rule, the value and the cure; needs no traceback."""


def show_plainly() -> None:
    """Print a `SpecExtError` that ends this process as its message alone; the exit status stays 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SpecExtError):
            sys.stderr.write(f"sglang-spec-ext: error: {error}\n")
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
