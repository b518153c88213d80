"""What a controller hands to that of another server, and takes from it: from prefill to decode."""

from collections.abc import Sequence

import numpy as np

from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.records import FloatArray, RequestClass

HANDED_WEIGHT = 16.0  # samples that another server's acceptance is worth


def state_of(controller: Controller) -> tuple[int, list[float]]:
    """Return (K in use, 0 for a budget; acceptance of plain requests by position, [] while nothing was seen)."""
    acceptance = controller.acceptance
    rates = acceptance.classes[RequestClass.PLAIN].rates() if acceptance.samples else []
    return max(controller.hysteresis.arm, 0), list(rates)


def absorb(controller: Controller, k: int, rates: Sequence[float]) -> None:
    """Start from another server's state; what this controller has seen or decided itself is worth more."""
    if rates and not controller.acceptance.samples:
        controller.acceptance.seed(RequestClass.PLAIN, rates, HANDED_WEIGHT)
    if k > 0 and k in controller.settings.tiers and not controller.decisions:
        controller.hysteresis.commit(0, k)


def foresee(controller: Controller, confidences: FloatArray) -> None:
    """Learn from what the draft promises for one request [positions]: a prefill server verifies nothing itself.

    It counts as one sample that reached and passed each position with that probability.
    """
    acceptance = controller.acceptance
    if confidences.size > acceptance.max_k or not ((confidences >= 0.0) & (confidences <= 1.0)).all():  # or NaN
        acceptance.dropped += 1
        return
    passed = np.cumprod(confidences).tolist()
    padding = [0.0] * (acceptance.max_k - len(passed))
    acceptance.classes[RequestClass.PLAIN].observe(1, [1.0, *passed[:-1], *padding], [*passed, *padding])
    acceptance.samples += 1
