"""`chain_accept` on the CPU: against a loop over requests, exact distributions, edges and refusals."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.kernels.cases import chain_case
from sglang_spec_ext.kernels.chain_accept import NO_TOKEN, chain_accept

MODES = ("greedy", "target_only", "rejection")


def brute_force(case: dict) -> tuple[list, list, list]:
    """One request, one draft, one token at a time, in Python numbers."""
    drafts = case["drafts"].tolist()
    num_drafts = case["drafts"].shape[1]
    width = num_drafts + 1
    accepted, bonuses, committed = [], [], []
    for r, chain in enumerate(drafts):
        start = r * width if case["row_starts"] is None else int(case["row_starts"][r])
        verify_len = width if case["verify_lens"] is None else int(case["verify_lens"][r])
        if verify_len == 0:
            accepted.append(0)
            bonuses.append(NO_TOKEN)
            committed.append([NO_TOKEN] * width)
            continue
        n = 0
        while n < verify_len - 1 and brute_accepts(case, r, n, start + n, chain[n]):
            n += 1
        if case["mode"] == "greedy":
            bonus = int(case["target_ids"][start + n])
        else:
            bonus = brute_draw(case, r, n, start + n, chain[n] if n < verify_len - 1 else None)
        accepted.append(n)
        bonuses.append(bonus)
        committed.append(chain[:n] + [bonus] + [NO_TOKEN] * (num_drafts - n))
    return accepted, bonuses, committed


def brute_accepts(case: dict, r: int, n: int, row: int, token: int) -> bool:
    """Say whether one draft is accepted."""
    if case["mode"] == "greedy":
        return int(case["target_ids"][row]) == token
    if not 0 <= token < case["target_probs"].shape[1]:
        return False
    p = float(case["target_probs"][row, token])
    coin = float(case["uniforms"][r, n])
    if case["mode"] == "target_only":
        return coin < p
    q = float(case["draft_probs"][r, n, token])
    return q > 0 and coin < p / q


def brute_draw(case: dict, r: int, n: int, row: int, rejected: int | None) -> int:
    """Draw the last token by walking the weights."""
    weights = case["target_probs"][row].tolist()
    if rejected is not None and case["mode"] == "target_only" and 0 <= rejected < len(weights):
        weights[rejected] = 0.0
    if rejected is not None and case["mode"] == "rejection":
        residual = [max(p - q, 0.0) for p, q in zip(weights, case["draft_probs"][r, n].tolist(), strict=True)]
        weights = (
            residual if any(residual) else weights
        )  # p == q: a token outside the vocabulary was rejected
    goal = float(case["final_uniforms"][r]) * math.fsum(weights)
    mass = 0.0
    for token, weight in enumerate(weights):
        mass += weight
        if mass > goal:
            return token
    raise AssertionError("exact sums always pass the goal")


@settings(max_examples=60, deadline=None)
@given(
    num_requests=st.sampled_from([1, 2, 7, 33]),
    num_drafts=st.sampled_from([0, 1, 3, 7]),
    vocab_size=st.sampled_from([2, 5, 97, 1021]),
    mode=st.sampled_from(MODES),
    layout=st.sampled_from(["dense", "capped", "ragged"]),
    seed=st.integers(0, 10_000),
)
def test_twin_equals_brute_force(num_requests, num_drafts, vocab_size, mode, layout, seed):
    """Accepted lengths, bonus and committed tokens of every request, in all layouts."""
    case = chain_case(num_requests, num_drafts, vocab_size, mode=mode, layout=layout, seed=seed)
    result = chain_accept(**case)
    accepted, bonuses, committed = brute_force(case)
    assert result.num_accepted.tolist() == accepted
    assert result.bonus.tolist() == bonuses
    assert result.committed.tolist() == committed
    lens = case["verify_lens"]
    assert result.bonus_valid.tolist() == [True] * num_requests if lens is None else (lens > 0).tolist()


def emitted_distribution(mode: str, p: torch.Tensor, q: torch.Tensor, verify_len: int) -> dict:
    """Exact chance of each committed sequence, by summing over all drafts and a fine grid of both coins.

    p: [K + 1, V] and q: [K, V], context free (place i has row i), multiples of 1/8. Coins at (2i + 1) / 2g
        are
    exact for acceptance chances that are multiples of 1/g.
    """
    num_drafts, vocab_size = q.shape
    grid = 840  # every p / q with eighths, and every normalised residual of up to eight eighths
    coins = (torch.arange(grid) + 0.5) / grid
    chances: dict = {}
    if mode == "rejection":
        chains = list(itertools.product(range(vocab_size), repeat=num_drafts))
    else:
        chains = [tuple(q.argmax(1).tolist())]
    for chain in chains:
        drafted = math.prod(float(q[i, x]) for i, x in enumerate(chain)) if mode == "rejection" else 1.0
        if drafted == 0.0:
            continue
        for level, coin_chance in accept_levels(mode, p, q, chain):
            result = chain_accept(
                torch.tensor([chain] * grid),
                mode=mode,
                target_probs=p.repeat(grid, 1),
                draft_probs=q.expand(grid, -1, -1) if mode == "rejection" else None,
                uniforms=torch.tensor([level] * grid),
                final_uniforms=coins,
                verify_lens=torch.full((grid,), verify_len),
            )
            for row in result.committed.tolist():
                emitted = tuple(token for token in row if token != NO_TOKEN)
                chances[emitted] = chances.get(emitted, 0.0) + drafted * coin_chance / grid
    return chances


def accept_levels(mode: str, p: torch.Tensor, q: torch.Tensor, chain: tuple) -> list:
    """Cut the unit cube of coins where decisions change: (coins inside a cell, chance of the cell)."""
    cuts = []
    for i, token in enumerate(chain):
        accept = float(p[i, token])
        if mode == "rejection":
            accept = min(1.0, accept / float(q[i, token]))
        edges = sorted({0.0, accept, 1.0})
        cuts.append([((a + b) / 2, b - a) for a, b in itertools.pairwise(edges) if b > a])
    return [([c for c, _ in cell], math.prod(w for _, w in cell)) for cell in itertools.product(*cuts)]


P = torch.tensor([[4, 3, 1], [1, 0, 7], [2, 2, 4]]) / 8
Q = torch.tensor([[2, 2, 4], [4, 2, 2]]) / 8


@pytest.mark.parametrize("verify_len", [1, 2, 3])
@pytest.mark.parametrize("mode", ["target_only", "rejection"])
def test_emitted_tokens_follow_the_target_exactly(mode, verify_len):
    """The first token is distributed as p_0; given it, the second (where emitted) as p_1; and so on."""
    chances = emitted_distribution(mode, P, Q, verify_len)
    assert math.isclose(sum(chances.values()), 1.0, rel_tol=1e-6)
    assert max(map(len, chances)) == verify_len
    for place in range(verify_len):
        for prefix in {tokens[:place] for tokens in chances if len(tokens) > place}:
            longer = {t: c for t, c in chances.items() if t[:place] == prefix and len(t) > place}
            total = sum(longer.values())
            for token in range(3):
                got = sum(c for t, c in longer.items() if t[place] == token) / total
                assert math.isclose(got, float(P[place, token]), abs_tol=1e-5), (place, prefix, token)


def test_a_draft_without_probability_is_rejected_at_the_edge_of_the_generator():
    """Coin 0.0 accepts nothing that p gives no mass, and a token of weight zero is never drawn."""
    p = torch.tensor([[0.0, 1.0, 0.0, 0.0]]).repeat(2, 1)
    q = torch.tensor([[[0.0, 0.0, 1.0, 0.0]]])
    for mode, draft_probs in (("target_only", None), ("rejection", q)):
        for final in (0.0, 1.0 - 2.0**-24, 1.0):
            result = chain_accept(
                torch.tensor([[2]]),
                mode=mode,
                target_probs=p,
                draft_probs=draft_probs,
                uniforms=torch.zeros(1, 1),
                final_uniforms=torch.tensor([final]),
            )
            assert result.committed.tolist() == [[1, NO_TOKEN]], (mode, final)


def test_a_draft_not_drawn_from_q_is_rejected():
    """q(x) = 0, NaN or infinite proves that x did not come from q: no division makes it acceptable."""
    for bad in (0.0, math.nan, math.inf, -0.25):
        result = chain_accept(
            torch.tensor([[0]]),
            mode="rejection",
            target_probs=torch.tensor([[1.0, 0.0]] * 2),
            draft_probs=torch.tensor([[[bad, 1.0]]]),
            uniforms=torch.zeros(1, 1),
            final_uniforms=torch.zeros(1),
        )
        assert result.num_accepted.tolist() == [0], bad
        assert result.bonus.tolist() == [0], bad


def test_rows_without_mass_are_flagged_and_leave_their_neighbours_alone():
    """NaN and all-zero rows give an id inside the vocabulary and bonus_valid False."""
    p = torch.tensor([[0.25, 0.75]] * 6)
    p[0:2], p[4:6] = math.nan, 0.0
    result = chain_accept(
        torch.tensor([[1], [1], [1]]),
        mode="target_only",
        target_probs=p,
        uniforms=torch.zeros(3, 1),
        final_uniforms=torch.full((3,), 0.5),
    )
    assert result.bonus_valid.tolist() == [False, True, False]
    assert result.committed.tolist() == [[0, NO_TOKEN], [1, 1], [0, NO_TOKEN]]


def test_no_requests_give_empty_results():
    """R = 0 in every mode, with the dtypes of any other call."""
    for mode in MODES:
        case = chain_case(0, 3, 5, mode=mode, layout="dense", seed=0)
        result = chain_accept(**case)
        assert result.committed.shape == (0, 4)
        assert result.num_accepted.dtype is torch.int32
        assert result.bonus.dtype is torch.int64
        assert result.bonus_valid.dtype is torch.bool


WRONG = {
    "unknown mode": ({"mode": "tree"}, ValueError, "mode must be one of"),
    "float drafts": ({"drafts": torch.zeros(2, 3)}, TypeError, "drafts must be"),
    "missing coins": ({"uniforms": None}, ValueError, "uniforms must be given"),
    "unread argument": (
        {"target_ids": torch.zeros(8, dtype=torch.long)},
        ValueError,
        "target_ids must be None",
    ),
    "half precision": ({"target_probs": torch.zeros(8, 5).half()}, TypeError, "target_probs must be"),
    "too few rows": ({"target_probs": torch.zeros(7, 5)}, ValueError, "R \\* \\(K \\+ 1\\) = 8 rows"),
    "other vocabulary": ({"draft_probs": torch.zeros(2, 3, 4)}, ValueError, r"shape \[2, 3, 5\]"),
    "transposed": ({"target_probs": torch.zeros(5, 8).T}, ValueError, "contiguous in its last dimension"),
    "other device": ({"uniforms": torch.zeros(2, 3, device="meta")}, ValueError, "must be on cpu"),
}


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_wrong_arguments_are_refused_by_name(wrong):
    """Each refusal names the argument and the rule."""
    change, error, message = WRONG[wrong]
    case = chain_case(2, 3, 5, mode="rejection", layout="dense", seed=1)
    with pytest.raises(error, match=message):
        chain_accept(**(case | change))
