"""`renormalise` against a row-at-a-time rule and against SGLang's own filters."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.kernels.renormalise import renormalise


def brute_force(probs: list[float], top_k: int, top_p: float, min_p: float, order: str) -> list[float]:
    """Rank, cut and normalise one row in Python numbers."""
    ranked = sorted(range(len(probs)), key=lambda token: (-probs[token], token))
    norm = math.fsum(probs[t] for t in ranked[:top_k]) if order == "top_k_first" else 1.0
    kept, mass = [], 0.0
    for token in ranked[:top_k]:
        if top_p < 1.0 and mass / norm > top_p:
            break
        kept.append(token)
        mass += probs[token]
    kept = [token for token in kept if probs[token] >= probs[ranked[0]] * min_p]
    total = math.fsum(probs[token] for token in kept)
    return [probs[token] / total if token in kept else 0.0 for token in range(len(probs))]


@settings(max_examples=80, deadline=None)
@given(
    vocab_size=st.sampled_from([2, 65, 2500, 5003]),
    spread=st.sampled_from([0.0, 0.5, 3.0]),
    forbidden=st.booleans(),
    order=st.sampled_from(["joint", "top_k_first"]),
    data=st.data(),
    seed=st.integers(0, 1000),
)
def test_equals_the_rule_row_by_row(vocab_size, spread, forbidden, order, data, seed):
    """All filters, ties at every limit (coarse logits), rows with and without limits in one batch."""
    generator = torch.Generator().manual_seed(seed)
    rows = 5
    logits = (torch.randn(rows, vocab_size, generator=generator) * spread * 4).round() / 4
    if forbidden:
        logits[:, torch.rand(vocab_size, generator=generator) < 0.5] = -math.inf
        logits[:, vocab_size // 2] = 1.0
    top_ks = torch.tensor(
        data.draw(st.lists(st.sampled_from([1, 2, 60, 700, 2**30]), min_size=rows, max_size=rows))
    )
    # values that no sum of probabilities hits, so that rounding decides nothing
    ps = st.sampled_from([0.1234567, 0.5123457, 0.9123457, 0.99123457, 1.0])
    top_ps = torch.tensor(data.draw(st.lists(ps, min_size=rows, max_size=rows)))
    min_ps = torch.tensor(
        data.draw(st.lists(st.sampled_from([0.0, 0.0123, 0.77]), min_size=rows, max_size=rows))
    )
    temperatures = torch.tensor([0.5, 1.0, 2.0, 1.0, 0.25])
    got = renormalise(
        logits, temperatures=temperatures, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps, filter_order=order
    )
    probs = torch.softmax(logits / temperatures[:, None], dim=1)
    for row in range(rows):
        limits = (int(top_ks[row]), float(top_ps[row]), float(min_ps[row]))
        want = torch.tensor(brute_force(probs[row].tolist(), *limits, order))
        assert torch.equal(got[row] > 0, want > 0), (row, limits)
        torch.testing.assert_close(got[row], want, rtol=1e-5, atol=1e-9)


def test_equals_the_filters_of_sglang_sampler():
    """`joint` has the support and the weights of SGLang's PyTorch sampler in plain decoding."""
    sampler = pytest.importorskip("sglang.srt.layers.sampler", exc_type=ImportError)
    logits = torch.randn(6, 3000, generator=torch.Generator().manual_seed(3)) * 3
    temperatures = torch.tensor([0.7, 1.0, 1.3, 1.0, 0.9, 1.0])
    top_ks = torch.tensor([1, 20, 1 << 30, 50, 1 << 30, 700])
    top_ps = torch.tensor([1.0, 0.9, 0.8, 1.0, 1.0, 0.95])
    min_ps = torch.tensor([0.0, 0.05, 0.0, 0.2, 0.01, 0.0])
    _, weights, ids, _ = sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        torch.softmax(logits / temperatures[:, None], dim=1),
        top_ks,
        top_ps,
        min_ps,
        True,
        None,
        torch.arange(6),
        return_filtered_probs=True,
    )
    want = torch.zeros_like(logits).scatter_(1, ids.long(), weights / weights.sum(1, keepdim=True))
    got = renormalise(logits, temperatures=temperatures, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps)
    assert torch.equal(got > 0, want > 0)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-9)


def test_a_greedy_row_is_exactly_one_hot_on_the_first_largest_logit():
    """top_k = 1 puts exactly 1.0 on one id, so `target_only` accepts a matching draft whatever the coin."""
    logits = torch.zeros(2, 5000)
    logits[0, [40, 4000]] = 3.0
    got = renormalise(logits, temperatures=torch.ones(2, 1), top_ks=torch.tensor([1, 1]))
    assert got.argmax(1).tolist() == [40, 0]
    assert got.max(1).values.tolist() == [1.0, 1.0]
    assert (got > 0).sum(1).tolist() == [1, 1]


def test_a_nan_row_stays_nan_and_leaves_its_neighbours_alone():
    """NaN logits and rows without a finite logit are NaN; the others are as if alone."""
    logits = torch.randn(4, 3000, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits[1, 7] = math.nan
    logits[2] = -math.inf
    filters = {
        "top_ks": torch.full((4,), 40),
        "top_ps": torch.full((4,), 0.9),
        "min_ps": torch.full((4,), 0.1),
    }
    got = renormalise(logits, temperatures=torch.ones(4), **filters)
    assert got.isnan().all(dim=1).tolist() == [False, True, True, False]
    alone = renormalise(
        logits[[0, 3]], temperatures=torch.ones(2), **{name: value[:2] for name, value in filters.items()}
    )
    assert torch.equal(got[[0, 3]], alone)


def test_refusals_and_empty_batches():
    """N = 0 gives [0, V]; wrong shapes, dtypes and orders are named."""
    logits = torch.zeros(3, 7)
    assert renormalise(logits[:0], temperatures=torch.ones(0), top_ks=torch.ones(0).long()).shape == (0, 7)
    with pytest.raises(ValueError, match=r"temperatures must have shape \[3\]"):
        renormalise(logits, temperatures=torch.ones(2))
    with pytest.raises(TypeError, match=r"top_ks must be torch.int32 or torch.int64"):
        renormalise(logits, temperatures=torch.ones(3), top_ks=torch.ones(3))
    with pytest.raises(ValueError, match="filter_order must be one of joint, top_k_first"):
        renormalise(logits, temperatures=torch.ones(3), filter_order="top_p_first")
