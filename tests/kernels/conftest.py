"""Poisoned memory, and where the Triton tests run.

Tests of Triton modules (`*_triton.py`) need a process in which triton was first imported under
TRITON_INTERPRET=1, or a GPU. Without either they are not collected here; `test_in_interpreter.py` runs them
in a process of its own.
"""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

collect_ignore_glob = [] if INTERPRETED or torch.cuda.is_available() else ["*_triton.py"]

INT_POISON = -77
_EMPTY_FUNCTIONS = ("empty", "empty_like", "empty_strided")


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill uninitialised memory with what no correct result contains."""
    if tensor.dtype.is_floating_point:
        return tensor.fill_(float("nan"))
    if tensor.dtype is torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(0xA5 if tensor.dtype is torch.uint8 else INT_POISON)


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Make uninitialised tensors visibly wrong, integers included."""
    for name in _EMPTY_FUNCTIONS:
        original = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *args, _original=original, **kwargs: poison_(_original(*args, **kwargs))
        )
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *args, **kwargs: poison_(new_empty(self, *args, **kwargs))
    )


@pytest.fixture(scope="session")
def triton_device() -> str:
    """Where tensors of a Triton test live: the CPU under the interpreter, else the GPU."""
    return "cpu" if INTERPRETED else "cuda"
