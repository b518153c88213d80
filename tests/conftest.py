"""Fixtures for every test: seeds, and the cached checkpoints."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def seeded() -> None:
    random.seed(0)


@pytest.fixture(scope="session")
def checkpoint() -> Callable[[str], Path]:
    """Return a function from a checkpoint's name to its folder, built on first use."""
    pytest.importorskip("torch")
    from sglang_spec_ext.models import prepare

    known = {model.name: model for model in prepare.models()}

    def folder(name: str) -> Path:
        for _ in prepare.prepare([known[name]]):
            pass
        return known[name].folder

    return folder
