"""`margin_features` on the CPU: every row against Python, edges and refusals."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang_spec_ext.kernels.cases import logits_case
from sglang_spec_ext.kernels.margin_features import margin_features

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def brute_force(row: list[float]) -> tuple[int, float, float]:
    """Argmax, margin and log-sum-exp of one row of numbers."""
    nans = [i for i, x in enumerate(row) if math.isnan(x)]
    if nans:
        return nans[0], math.nan, math.nan
    top_id = max(range(len(row)), key=lambda i: (row[i], -i))
    top = row[top_id]
    if top == -math.inf:
        return top_id, math.nan, -math.inf
    second = max((x for i, x in enumerate(row) if i != top_id), default=-math.inf)
    return top_id, top - second, top + math.log(math.fsum(math.exp(x - top) for x in row))


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.sampled_from([1, 7, 33]),
    vocab_size=st.sampled_from([1, 2, 97, 1021]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 1000),
)
def test_equals_brute_force(num_rows, vocab_size, dtype, seed):
    """Ids and margins exactly (the logits are multiples of 1/4), log-sum-exps to float32."""
    logits = logits_case(num_rows, vocab_size, dtype=dtype, seed=seed)
    got = margin_features(logits)
    ids, margins, lses = zip(*(brute_force(row) for row in logits.tolist()), strict=True)
    assert got.top_ids.tolist() == list(ids)
    torch.testing.assert_close(got.margins, torch.tensor(margins), rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.log_sum_exps, torch.tensor(lses), rtol=1e-6, atol=1e-5, equal_nan=True)


def test_empty_batches_and_refusals():
    """N = 0 is empty; V = 0, integers and column-major logits are named."""
    assert margin_features(torch.zeros(0, 5)).margins.shape == (0,)
    with pytest.raises(ValueError, match="at least one column"):
        margin_features(torch.zeros(3, 0))
    with pytest.raises(TypeError, match="logits must be"):
        margin_features(torch.zeros(3, 4, dtype=torch.int32))
    with pytest.raises(ValueError, match="contiguous in its last dimension"):
        margin_features(torch.zeros(4, 3).T)
