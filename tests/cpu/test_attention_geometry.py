"""The mask and packing of the CPU attention against their definition, one entry at a time."""

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_spec_ext.cpu.attention import Geometry

REQUESTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4)


def geometry(requests: list[tuple[int, int]], trees=None) -> Geometry:
    """`requests` are (queries, tokens before them)."""
    q_lens = [q for q, _ in requests]
    kv_lens = [q + before for q, before in requests]
    slots = torch.zeros(len(requests), max(kv_lens), dtype=torch.int64)
    return Geometry(q_lens, kv_lens, slots, packed=True, trees=trees)


@settings(deadline=None, max_examples=80)
@given(requests=REQUESTS, causal=st.booleans(), window=st.integers(-1, 5), repeat=st.integers(1, 3))
def test_mask_is_its_definition(requests, causal: bool, window: int, repeat: int) -> None:
    found = geometry(requests)
    mask = found.mask(causal, window, repeat, torch.float32)
    q_max, kv_max = max(found.q_lens), max(found.kv_lens)
    if mask is None:
        mask = torch.zeros(len(requests), 1, repeat * q_max, kv_max)
    assert mask.shape == (len(requests), 1, repeat * q_max, kv_max)
    for b, (q_len, before) in enumerate(requests):
        for row in range(repeat * q_max):
            query = min(row % q_max, q_len - 1)  # padding queries see what the last one sees
            position = before + query
            for key in range(kv_max):
                seen = key < q_len + before
                seen &= not causal or key <= position
                seen &= window < 0 or key >= position - window
                assert (mask[b, 0, row, key] == 0) == seen


@settings(deadline=None, max_examples=40)
@given(requests=REQUESTS)
def test_ragged_queries_come_back_in_order(requests) -> None:
    found = geometry(requests)
    rows = torch.arange(sum(found.q_lens))
    if found.gather_rows is None:
        assert len(set(found.q_lens)) == 1
        return
    padded = rows[found.gather_rows.reshape(-1)]
    assert torch.equal(padded[found.scatter_rows], rows)


def test_a_tree_mask_is_used_as_it_is() -> None:
    trees = [torch.tensor([[True, True, False], [True, False, True]]), torch.tensor([[True, False], [True, True]])]
    mask = geometry([(2, 1), (2, 0)], trees).mask(True, -1, 1, torch.float32)
    assert torch.equal(mask[0, 0] == 0, trees[0])
    assert torch.equal(mask[1, 0, :, :2] == 0, trees[1])
    assert bool((mask[1, 0, :, 2] < 0).all())
