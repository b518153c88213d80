"""Shared pieces of the control tests: vectors, tables, observations."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.cost import ContextBucket, CostTable
from sglang_spec_ext.control.curve import Curve
from sglang_spec_ext.control.settings import ControllerSettings
from sglang_spec_ext.records import StepObservation

VECTORS = Path(__file__).parent / "vectors"
TIERS = (0, 1, 3, 5, 7)


@pytest.fixture(scope="session")
def vector() -> Callable[[str], Any]:
    return lambda name: json.loads((VECTORS / name).read_text())


@pytest.fixture(scope="session")
def scenario_text() -> Callable[[str], str]:
    def read(name: str) -> str:
        own = VECTORS / "scenarios" / f"{name}.json"
        return (own if own.exists() else VECTORS / f"{name}.json").read_text()

    return read


@pytest.fixture
def make_table() -> Callable[..., CostTable]:
    """A serial drafter on a memory-bound target with a knee; every part can be replaced."""

    def build(
        points: tuple[int, ...] = (1, 64, 256, 4096),
        seconds: tuple[float, ...] = (0.010, 0.010, 0.013, 0.19),
        *,
        captured: int = 0,
        draft_s: float = 0.0005,
        k0_s: float = 0.0,
        tiers: tuple[int, ...] = TIERS,
        bias: float = 1.0,
    ) -> CostTable:
        draft = tuple((k, Curve((1, 1024), (k * draft_s or k0_s,) * 2)) for k in sorted({0, *tiers}))
        tokens = Curve(points, tuple(s * bias for s in seconds), captured)
        return CostTable((ContextBucket(0, tokens, None, draft),))

    return build


@pytest.fixture
def make_controller(make_table: Callable[..., CostTable]) -> Callable[..., Controller]:
    def build(table: CostTable | None = None, **settings: Any) -> Controller:
        settings.setdefault("tiers", TIERS)
        return Controller(ControllerSettings(**settings), table if table is not None else make_table())

    return build


@pytest.fixture
def observation() -> Callable[..., StepObservation]:
    """`observation(k, accepted, ...)`."""

    def build(k: int, accepted: Any, **fields: Any) -> StepObservation:
        fields.setdefault("step", 0)
        return StepObservation(k=k, accepted=np.asarray(accepted), **fields)

    return build
