"""The published tables, recomputed by this library's planner, and torch's draws without torch."""

import numpy as np
import pytest

from sglang_spec_ext.control.chapter import adaptive_verification_rows, best_k_rows, markov_acceptance
from sglang_spec_ext.control.lossless import enumerate_case
from sglang_spec_ext.control.torch_cpu import TorchRandom, vecmat

FOUR_DIGITS = 5e-5


def _assert_rows(got, wanted):
    for row, reference in zip(got, wanted, strict=True):
        for key, value in row.items():
            assert value == pytest.approx(reference[key], rel=FOUR_DIGITS), (key, row, reference)


def test_best_k_equals_the_table(vector):
    _assert_rows(best_k_rows(), vector("chapter_tables.json")["best_k"])


def test_markov_equals_the_table(vector):
    table = vector("chapter_tables.json")["markov"]
    got = markov_acceptance()
    assert got == pytest.approx({key: table[key] for key in got}, rel=FOUR_DIGITS)


def test_adaptive_verification_equals_the_table(vector):
    _assert_rows(adaptive_verification_rows(), vector("chapter_tables.json")["adaptive_verification"]["rows"])


def test_enumeration_equals_appendix_a(vector):
    case = vector("appendix_a.json")
    got = enumerate_case(case)
    for planner, distribution in case["first_token_distribution"].items():
        assert got[planner] == pytest.approx(distribution, abs=1e-12), planner


def test_draws_are_torch_s():
    """Values printed by `torch.manual_seed(0)`, then `randperm(8)` and `rand(4)`."""
    random = TorchRandom(0)
    assert random.randperm(8).tolist() == [4, 0, 7, 3, 2, 5, 1, 6]
    wanted = [0.8964447379112244, 0.455627977848053, 0.6323062777519226, 0.3488934636116028]
    assert random.rand(4).tolist() == wanted


def test_draws_and_sums_equal_torch_bit_by_bit():
    torch = pytest.importorskip("torch")
    torch.manual_seed(3)
    random = TorchRandom(3)
    for n in (1, 2, 64, 1000):
        assert random.randperm(n).tolist() == torch.randperm(n).tolist()
    for shape in ((1,), (3, 7), (128, 7)):
        assert np.array_equal(random.rand(*shape), torch.rand(*shape).numpy())
    # sums of few terms have one order only; longer ones follow the BLAS that torch was built with
    vector, matrix = random.rand(8), random.rand(8, 5)
    assert np.allclose(
        vecmat(vector, matrix), (torch.tensor(vector) @ torch.tensor(matrix)).numpy(), rtol=1e-6
    )
