"""The first largest entry of each row is torch's argmax, ties, NaN and odd widths included."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sglang_spec_ext.kernels.first_largest import first_largest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 9, 64, 320, 4096, 49152])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_random_rows(rows: int, columns: int, dtype: torch.dtype) -> None:
    values = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(first_largest(values), values.argmax(dim=1))


@given(columns=st.sampled_from([7, 128, 1024]), seed=st.integers(0, 2**31))
def test_first_among_equals_and_among_nan(columns: int, seed: int) -> None:
    """Few values, so that most rows hold their largest many times, infinities and NaN included."""
    generator = torch.Generator().manual_seed(seed)
    pool = torch.tensor([-torch.inf, 0.0, 1.0, torch.inf, torch.nan])
    kinds = torch.randint(1, 6, (8, 1), generator=generator)
    values = pool[torch.randint(0, 1 << 20, (8, columns), generator=generator) % kinds]
    largest = [next((i for i, v in enumerate(row) if math.isnan(v)), None) for row in values.tolist()]
    expected = [row.index(max(row)) if nan is None else nan for row, nan in zip(values.tolist(), largest, strict=True)]
    assert first_largest(values).tolist() == expected


def test_rows_that_are_not_contiguous() -> None:
    values = torch.randn(6, 256, generator=torch.Generator().manual_seed(5))
    assert torch.equal(first_largest(values[::2]), values[::2].argmax(dim=1))
    assert torch.equal(first_largest(values.t()), values.t().argmax(dim=1))
    columns_first = torch.randn(256, 6, generator=torch.Generator().manual_seed(5)).t()  # six rows, in groups
    assert torch.equal(first_largest(columns_first), columns_first.argmax(dim=1))
