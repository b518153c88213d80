"""Cost of a decision. Run apart: `pytest tests/control/test_benchmark.py --benchmark-only`.

The aims are 50 microseconds for `decide` and 20 for `observe` at 64 requests, and 1 ms for a whole plan of 512
requests by 16 positions. Nothing here asserts a time.
"""

import numpy as np
import pytest

from sglang_spec_ext.control.verify import allocate, plan_budget, survival_of
from sglang_spec_ext.records import BatchState

pytestmark = pytest.mark.benchmark(min_rounds=20, max_time=0.5, warmup=True, warmup_iterations=50)
REQS = 64


@pytest.fixture(params=["one class", "four classes"])
def classes(request):
    return None if request.param == "one class" else np.arange(REQS) % 4


@pytest.fixture
def stepping(make_controller, observation, classes):
    controller = make_controller()
    rng = np.random.default_rng(0)
    accepted = [np.minimum(rng.geometric(0.4, REQS) - 1, 3) for _ in range(64)]
    seen = [observation(3, a, classes=classes, step_s=0.012) for a in accepted]
    batch = BatchState(step=0, num_reqs=REQS, classes=classes)
    for one in seen:
        controller.decide(batch)
        controller.observe(one)
    return controller, batch, seen


def test_decide(benchmark, stepping):
    """After each observation, so that nothing is answered from what was kept."""
    controller, batch, seen = stepping
    turn = iter(range(10**9))

    def setup():
        controller.observe(seen[next(turn) % len(seen)])

    decision = benchmark.pedantic(controller.decide, args=(batch,), setup=setup, rounds=500)
    assert decision is None or decision.k in controller.settings.tiers


def test_observe(benchmark, stepping):
    controller, _, seen = stepping
    before = controller.acceptance.samples
    benchmark(controller.observe, seen[0])
    assert controller.acceptance.samples > before


def test_whole_plan(benchmark, make_table):
    confidences = np.random.default_rng(0).uniform(0.6, 1.0, (512, 16))
    cost = make_table()

    def plan():
        survival = survival_of(confidences)
        return allocate(survival, plan_budget(survival, cost).budget)

    assert benchmark(plan).shape == (512,)
