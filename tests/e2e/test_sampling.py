"""Sampled output follows the target's distribution, whatever the algorithm.

Each drawn token is turned into a uniform number: with the tokens ordered by probability, u = F(token - 1) + v * p
(token), v uniform. If the token was drawn from p, u is uniform on [0, 1], whatever p was at that place; a
chi-square test on the bins follows. The distributions come from the target itself in transformers, filtered by the
definition of each parameter.
"""

import random

import pytest
import torch

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

BINS = 20
# the 99.99 % quantile of chi-square with 19 degrees of freedom
LIMIT = 50.80
REQUESTS, TOKENS = 56, 100

PARAMETERS = {
    "temperature": {"temperature": 0.9},
    "top-k and top-p": {"temperature": 1.1, "top_k": 12, "top_p": 0.85},
    "min-p": {"temperature": 1.0, "min_p": 0.08},
}


def filtered(logits: torch.Tensor, *, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0):
    """Return the distribution of one place [V], by definition: joint top-k and top-p, then min-p."""
    p = (logits / temperature).softmax(-1).double()
    order = p.argsort(descending=True, stable=True)
    ranked = p[order]
    keep = (ranked.cumsum(0) - ranked) <= top_p
    if top_k:
        keep[top_k:] = False
    keep &= ranked >= min_p * ranked[0]
    kept = torch.zeros_like(p)
    kept[order[keep]] = ranked[keep]
    return kept / kept.sum()


def uniform_of(p: torch.Tensor, token: int, v: float) -> float:
    order = p.argsort(descending=True, stable=True)
    place = int((order == token).nonzero())
    before = float(p[order[:place]].sum())
    return before + v * float(p[token])


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_algorithm_samples_from_the_target(served, reference, name) -> None:
    params = PARAMETERS[name]
    rng = random.Random(5)
    prompts = [[rng.randrange(3, 63) for _ in range(6)] for _ in range(REQUESTS)]
    answers = served.generate(prompts, max_new_tokens=TOKENS, **params)
    draws = []
    for ids, answer in zip(prompts, answers, strict=True):
        tokens = answer["output_ids"]
        logits = reference.logits([*ids, *tokens])[len(ids) - 1 : -1]
        for place, token in enumerate(tokens):
            p = filtered(logits[place], **params)
            assert p[token] > 0, f"token {token} lies outside the filtered support"
            draws.append(uniform_of(p, token, rng.random()))
    assert len(draws) >= 5000
    counts = torch.histc(torch.tensor(draws), BINS, 0.0, 1.0)
    expected = len(draws) / BINS
    statistic = float(((counts - expected) ** 2 / expected).sum())
    assert statistic < LIMIT, f"chi-square {statistic:.1f}, counts {counts.int().tolist()}"


def test_a_seed_is_accepted(served) -> None:
    found = served.generate([5, 9, 11], temperature=1.0, sampling_seed=7)
    assert len(found[0]["output_ids"]) == 32


def test_greedy_and_sampled_requests_share_a_batch(served, reference) -> None:
    rng = random.Random(6)
    prompts = [[rng.randrange(3, 63) for _ in range(9)] for _ in range(6)]
    body = {
        "input_ids": prompts,
        "sampling_params": [
            {"temperature": float(i % 2), "max_new_tokens": 24, "ignore_eos": True} for i in range(6)
        ],
    }
    answers = served.client.post("/generate", json=body).json()
    for i in (0, 2, 4):
        assert answers[i]["output_ids"] == reference.greedy(prompts[i], 24)
