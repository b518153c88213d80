"""The torch forms of SGLang's slot and tree kernels against loops that follow the kernels' documentation."""

import itertools

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_spec_ext.cpu import cache_locs, trees


@settings(deadline=None, max_examples=60)
@given(lens=st.lists(st.integers(0, 4), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_slots_are_written_and_read_back(lens: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    table = torch.zeros(8, 12, dtype=torch.int32)
    rows = torch.randperm(8, generator=generator)[: len(lens)]
    start = torch.randint(0, 8, (len(lens),), generator=generator)
    end = start + torch.tensor(lens)
    slots = torch.arange(100, 100 + sum(lens))
    cache_locs.assign_req_to_token(rows, table, start, end, slots, len(lens))
    expected = torch.zeros_like(table)
    at = 0
    for row, first, n in zip(rows.tolist(), start.tolist(), lens, strict=True):
        expected[row, first : first + n] = slots[at : at + n]
        at += n
    assert torch.equal(table, expected)
    found = cache_locs.extend_cache_locs(
        req_pool_indices=rows, req_to_token=table, start_offset=start, end_offset=end, batch_size=len(lens),
        draft_token_num=max(lens), device="cpu",
    )  # fmt: skip
    assert torch.equal(found, slots)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), n=st.integers(1, 6), bs=st.integers(1, 3))
def test_links_rebuilt_from_ancestors(data: st.DataObject, n: int, bs: int) -> None:
    parents = [[-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, n))] for _ in range(bs)]
    mask = torch.zeros(bs, n, n, dtype=torch.bool)
    for b in range(bs):
        for i in range(n):
            node = i
            while node >= 0:
                mask[b, i, node] = True
                node = parents[b][node]
    seq_lens = torch.arange(10, 10 + bs)
    positions, index = torch.empty(bs * n, dtype=torch.int64), torch.empty(bs, n, dtype=torch.int64)
    child, sibling = torch.empty(bs, n, dtype=torch.int64), torch.empty(bs, n, dtype=torch.int64)
    trees.reconstruct_from_tree_mask(mask.view(-1), seq_lens, positions, index, child, sibling, bs, n)
    for b in range(bs):
        for i in range(n):
            depth = int(mask[b, i].sum()) - 1
            assert positions[b * n + i] == seq_lens[b] + depth
            children = [k for k in range(n) if parents[b][k] == i]
            assert child[b, i] == (children[0] if children else -1)
            later = [k for k in range(i + 1, n) if parents[b][k] == parents[b][i] and parents[b][i] >= 0]
            assert sibling[b, i] == (later[0] if later else -1)


@settings(deadline=None, max_examples=80)
@given(data=st.data(), n=st.integers(1, 6), bs=st.integers(1, 3))
def test_greedy_walk_of_a_tree(data: st.DataObject, n: int, bs: int) -> None:
    token = st.integers(0, 2)
    parents = [[-1, *(data.draw(st.integers(0, i - 1)) for i in range(1, n))] for _ in range(bs)]
    candidates = torch.tensor([[data.draw(token) for _ in range(n)] for _ in range(bs)])
    target = torch.tensor([[data.draw(token) for _ in range(n)] for _ in range(bs)])
    child, sibling = torch.full((bs, n), -1), torch.full((bs, n), -1)
    for b in range(bs):
        for i in range(n):
            children = [k for k in range(n) if parents[b][k] == i]
            if children:
                child[b, i] = children[0]
                for left, right in itertools.pairwise(children):
                    sibling[b, left] = right
    index = torch.arange(bs * n).view(bs, n)
    predicts = torch.zeros(bs * n, dtype=torch.int32)
    accept_index = torch.full((bs, n), -1, dtype=torch.int32)
    count = torch.empty(bs, dtype=torch.int32)
    trees.verify_tree_greedy(predicts, accept_index, count, candidates, index, child, sibling, target)
    for b in range(bs):
        node, path = 0, [0]
        while True:
            fits = [k for k in range(n) if parents[b][k] == node and candidates[b, k] == target[b, node]]
            if not fits or len(path) == n:
                break
            node = fits[0]
            path.append(node)
        assert count[b] == len(path) - 1
        assert accept_index[b, : len(path)].tolist() == [b * n + k for k in path]
        assert [int(predicts[b * n + k]) for k in path] == [int(target[b, k]) for k in path]
