"""`survival_plan` on the CPU: against a sort in Python, and the lossless rule by enumeration."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.kernels.cases import confidence_case
from sglang_spec_ext.kernels.chain_accept import chain_accept
from sglang_spec_ext.kernels.survival_plan import MAX_POSITIONS, survival_plan

APPENDIX_A = json.loads((Path(__file__).parent / "vectors" / "appendix_a.json").read_text())


def brute_force(confidences: list, budget: int, caps: list | None) -> list[int]:
    """Sort every position of every request by (survival, position, request) and take the best."""
    ranked = []
    for request, row in enumerate(confidences):
        if any(not 0.0 <= c <= 1.0 for c in row):
            continue
        cap = len(row) if caps is None else caps[request]
        survival = 1.0
        for position, c in enumerate(row[: max(cap, 0)]):
            survival *= c
            if survival > 0.0:
                ranked.append((-survival, position, request))
    lens = [1 if caps is None or caps[r] >= 0 else 0 for r in range(len(confidences))]
    for _, _, request in sorted(ranked)[: max(budget, 0)]:
        lens[request] += 1
    return lens


@settings(max_examples=80, deadline=None)
@given(
    num_requests=st.sampled_from([1, 2, 7, 33, 64]),
    num_positions=st.sampled_from([0, 1, 5, 7, 15]),
    fraction=st.sampled_from([-0.1, 0.0, 0.2, 0.5, 0.9, 2.0]),
    capped=st.booleans(),
    on_device=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_equals_a_sort_of_all_positions(num_requests, num_positions, fraction, capped, on_device, seed):
    """Lengths and offsets, with ties, bad rows, caps, padding requests and a budget held in a tensor."""
    case = confidence_case(num_requests, num_positions, seed=seed)
    caps = case["caps"] if capped else None
    budget = int(fraction * num_requests * num_positions)
    plan = survival_plan(case["confidences"], torch.tensor([budget]) if on_device else budget, caps=caps)
    want = brute_force(case["confidences"].tolist(), budget, caps.tolist() if capped else None)
    assert plan.verify_lens.tolist() == want
    assert plan.offsets.tolist() == [sum(want[:r]) for r in range(num_requests + 1)]
    assert int(plan.total) == sum(want)
    assert plan.verify_lens.dtype is plan.offsets.dtype is torch.int32


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 12), budget=st.integers(0, 60), seed=st.integers(0, 1000))
def test_a_bad_row_leaves_its_neighbours_alone(rows, budget, seed):
    """Turning one row bad changes the others only by the budget that it no longer takes."""
    confidences = torch.rand(rows, 5, generator=torch.Generator().manual_seed(seed))
    confidences[0, 2] = math.nan
    with_bad = survival_plan(confidences, budget)
    without = survival_plan(confidences[1:], budget)
    assert with_bad.verify_lens.tolist() == [1, *without.verify_lens.tolist()]


def emitted_first_token(budget_of) -> list[float]:
    """Exact distribution of the first emitted token over drafts and coins, for a rule that names the budget.

    One request, two drafts; the second confidence depends on the first token drawn, as a live head's would.
    """
    tokens, p, q = APPENDIX_A["tokens"], APPENDIX_A["target_p"], APPENDIX_A["draft_q"]
    emitted = [0.0, 0.0]
    grid = 200
    for first in range(2):
        live = torch.tensor(
            [[APPENDIX_A["confidence_1"], APPENDIX_A["confidence_2_given_first"][tokens[first]]]]
        )
        plan = survival_plan(live, budget_of(live))
        coins = (torch.arange(grid) + 0.5) / grid
        # accept chance of the first draft, by a grid over its coin; the last token by a grid over its own
        for coin in coins.tolist():
            result = chain_accept(
                torch.tensor([[first, 0]] * grid),
                mode="rejection",
                target_probs=torch.tensor([p]).repeat(3 * grid, 1),
                draft_probs=torch.tensor([[q, q]]).expand(grid, -1, -1),
                uniforms=torch.tensor([[coin, 0.0]] * grid),
                final_uniforms=coins,
                verify_lens=plan.verify_lens.expand(grid).contiguous(),
            )
            for token in range(2):
                share = (result.committed[:, 0] == token).double().mean().item()
                emitted[token] += q[first] * share / grid
    return emitted


def argmax_over_live_confidences(live: torch.Tensor) -> int:
    """The rule that is not lossless: the best budget by the very confidences that are ranked."""
    speed = APPENDIX_A["steps_per_second_by_verify_tokens"]
    survival = live.cumprod(1)[0].tolist()
    rates = [(1 + sum(survival[:n])) * speed[str(1 + n)] for n in range(3)]
    return max(range(3), key=rates.__getitem__)


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_a_budget_fixed_beforehand_emits_the_target_distribution(budget):
    """DSpark paper, appendix A: ranking live confidences under a fixed budget is lossless."""
    want = APPENDIX_A["first_token_distribution"]["budget_fixed_beforehand"]
    assert emitted_first_token(lambda _: budget) == pytest.approx(want, abs=1e-9)


def test_the_enumeration_sees_a_planner_that_is_not_lossless():
    """The counter-example of the same appendix: a live budget moves the distribution."""
    want = APPENDIX_A["first_token_distribution"]["argmax_over_live_confidences"]
    assert emitted_first_token(argmax_over_live_confidences) == pytest.approx(want, abs=1e-9)


def test_empty_batches_and_refusals():
    """R = 0 and G = 0 are defined; wrong arguments are named."""
    assert survival_plan(torch.zeros(0, 7), 5).offsets.tolist() == [0]
    assert survival_plan(torch.zeros(3, 0), 5).offsets.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match=f"at most {MAX_POSITIONS} positions"):
        survival_plan(torch.zeros(4096, 5), 1)
    with pytest.raises(TypeError, match=r"confidences must be torch\.float32"):
        survival_plan(torch.zeros(2, 3).double(), 1)
    with pytest.raises(TypeError, match="budget must be an int"):
        survival_plan(torch.zeros(2, 3), 1.5)
    with pytest.raises(ValueError, match=r"caps must have shape \[2\]"):
        survival_plan(torch.zeros(2, 3), 1, caps=torch.zeros(3).int())
