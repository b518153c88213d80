"""The base of this project's errors, and how a launcher shows them."""

import sys
from types import TracebackType


class SpecExtError(Exception):
    """An error whose message names the field, the rule, the value and the cure; needs no traceback."""


class Fatal(SystemExit):
    """Ends a process of SGLang with one message: plain exceptions are swallowed there or end in a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(f"sglang-spec-ext: error: {message}")


def show_plainly() -> None:
    """Print a `SpecExtError` that ends this process as its message alone; the exit status stays 1."""
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, SpecExtError):
            sys.stderr.write(f"sglang-spec-ext: error: {error}\n")
        else:
            previous(kind, error, trace)

    sys.excepthook = hook
