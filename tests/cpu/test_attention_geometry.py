"""The mask and packing of the CPU attention against their definition, one entry at a time."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType

from sglang_spec_ext.cpu.attention import TorchSpecAttention
from sglang_spec_ext.cpu.attention_geometry import CALL_ROWS, MAX_SHARED_QUERIES, Geometry, plan_calls

REQUESTS = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 9)), min_size=1, max_size=4)


def geometry(requests: list[tuple[int, int]], trees=None) -> Geometry:
    """`requests` are (queries, tokens before them)."""
    q_lens = [q for q, _ in requests]
    kv_lens = [q + before for q, before in requests]
    slots = torch.zeros(len(requests), max(kv_lens), dtype=torch.int64)
    return Geometry(q_lens, kv_lens, slots, trees)


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


SIZES = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 700)), min_size=1, max_size=12).filter(
    lambda requests: any(queries for queries, _ in requests)
)


@settings(deadline=None, max_examples=200)
@given(requests=SIZES)
def test_a_call_is_shared_where_that_is_cheaper(requests) -> None:
    q_lens, kv_lens = [q for q, _ in requests], [q + before for q, before in requests]
    calls = plan_calls(q_lens, kv_lens, torch.zeros(len(requests), max(kv_lens), dtype=torch.int64), None).calls
    asked = sorted((q, kv) for q, kv in zip(q_lens, kv_lens, strict=True) if q)
    planned = [list(zip(call.geometry.q_lens, call.geometry.kv_lens, strict=True)) for call in calls]
    assert sorted(pair for pairs in planned for pair in pairs if pair[0]) == asked
    for pairs in planned:
        assert len(pairs) == 1 or max(q for q, _ in pairs) <= MAX_SHARED_QUERIES
    few = [kv for q, kv in asked if q <= MAX_SHARED_QUERIES]
    shared = [pairs for pairs in planned if pairs[0][0] <= MAX_SHARED_QUERIES]
    price = sum(CALL_ROWS + len(pairs) * max(kv for _, kv in pairs) for pairs in shared)
    assert price <= sum(few) + len(few) * CALL_ROWS


@pytest.mark.parametrize("causal", [True, False])
def test_requests_of_any_lengths_attend_as_each_would_alone(causal: bool) -> None:
    """Three calls and one long prompt, in no order of length, against softmax(q k / sqrt(d)) v by definition."""
    torch.manual_seed(0)
    q_lens, kv_lens = [2, 40, 1, 3, 0, 2, 1], [400, 55, 30, 1300, 9, 31, 410]
    heads, kv_heads, d = 4, 2, 8
    keys, values = (torch.randn(2000, kv_heads, d) for _ in range(2))
    queries = torch.randn(sum(q_lens), heads, d)
    slots = torch.zeros(len(q_lens), max(kv_lens), dtype=torch.int64)
    for row, kv_len in zip(slots, kv_lens, strict=True):
        row[:kv_len] = torch.randperm(2000)[:kv_len]
    runner = SimpleNamespace(
        device="cpu", req_to_token_pool=None,
        token_to_kv_pool=SimpleNamespace(get_key_buffer=lambda _: keys, get_value_buffer=lambda _: values),
    )  # fmt: skip
    attention = TorchSpecAttention(runner)
    attention.calls = plan_calls(q_lens, kv_lens, slots, None)
    assert len(attention.calls.calls) == 4
    layer = SimpleNamespace(
        tp_q_head_num=heads, v_head_dim=d, layer_id=0, logit_cap=0, is_cross_attention=False, scaling=d**-0.5,
        sliding_window_size=-1, attn_type=AttentionType.DECODER if causal else AttentionType.ENCODER_ONLY,
    )  # fmt: skip
    found = attention.forward_extend(queries.flatten(1), None, None, layer, None).view(-1, heads, d)
    start = 0
    for q_len, kv_len, row in zip(q_lens, kv_lens, slots, strict=True):
        for at in range(q_len):
            seen = row[: kv_len - q_len + at + 1] if causal else row[:kv_len]
            for head in range(heads):
                k, v = keys[seen, head // 2], values[seen, head // 2]
                wanted = torch.softmax(k @ queries[start + at, head] * d**-0.5, 0) @ v
                torch.testing.assert_close(found[start + at, head], wanted, atol=1e-5, rtol=1e-5)
        start += q_len
