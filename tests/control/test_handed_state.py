"""What one controller hands to another: acceptance and K, taken only while there is nothing better."""

import numpy as np
import pytest

from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.handed_state import absorb, foresee, state_of
from sglang_spec_ext.control.settings import ControllerSettings
from sglang_spec_ext.records import RequestClass, StepObservation


def controller() -> Controller:
    return Controller(ControllerSettings(tiers=(0, 1, 3)), None)


def plain_rates(of: Controller) -> list[float]:
    return of.acceptance.classes[RequestClass.PLAIN].rates()


def test_a_controller_that_saw_nothing_hands_on_its_k_alone() -> None:
    assert state_of(controller()) == (3, [])


def test_promises_of_the_draft_become_the_acceptance_that_is_handed_on() -> None:
    prefill, decode = controller(), controller()
    for _ in range(400):
        foresee(prefill, np.array([0.9, 0.5, 0.2], np.float32))
    k, rates = state_of(prefill)
    assert rates == pytest.approx([0.9, 0.5, 0.2], abs=0.05)
    absorb(decode, k, rates)
    assert plain_rates(decode) == pytest.approx(rates, abs=0.2)
    assert plain_rates(decode)[0] > plain_rates(decode)[1] > plain_rates(decode)[2]


@pytest.mark.parametrize("promise", [[0.5, float("nan"), 0.5], [1.5, 0.5, 0.5], [-0.1, 0.5, 0.5], [0.5] * 4])
def test_a_promise_that_is_no_probability_is_dropped_and_counted(promise: list[float]) -> None:
    prefill = controller()
    foresee(prefill, np.array(promise, np.float32))
    assert state_of(prefill)[1] == []
    assert prefill.acceptance.dropped == 1


def test_what_a_controller_saw_itself_is_kept() -> None:
    decode = controller()
    decode.observe(StepObservation(step=0, k=3, accepted=np.array([0, 1, 3])))
    before = plain_rates(decode)
    absorb(decode, 1, [0.01, 0.01, 0.01])
    assert plain_rates(decode) == before


def test_k_is_taken_before_the_first_decision_alone_and_only_if_it_is_a_tier() -> None:
    decode = controller()
    for k, arm in ((2, 3), (0, 3), (1, 1)):
        absorb(decode, k, [])
        assert decode.hysteresis.arm == arm
    decode.decisions = 1
    absorb(decode, 3, [])
    assert decode.hysteresis.arm == 1
