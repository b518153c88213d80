"""Products with weights in oneDNN's own layout: sums rounded once, and no stale weight."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.cpu import packed  # noqa: E402

pytestmark = pytest.mark.skipif(not packed.multiplies(), reason="this CPU does not multiply bfloat16 with oneDNN")

HALF_ULP = 2.0**-8  # of bfloat16, relative: what one rounding to nearest may move a number by
EPS = torch.finfo(torch.float32).eps
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(autouse=True)
def laid_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lay weights out on a CPU without bfloat16 units too, where it would not pay."""
    torch.manual_seed(0)
    monkeypatch.setattr(packed, "served", lambda: True)


def weight_of(rows: int, columns: int, dtype: "torch.dtype" = torch.bfloat16) -> "torch.nn.Parameter":
    return torch.nn.Parameter(torch.randn(rows, columns).to(dtype), requires_grad=False)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33, 200])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (64, 64), (961, 576), (4099, 64)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_product_is_a_float32_sum_rounded_once(
    tokens: int, rows: int, columns: int, biased: bool, dtype: "torch.dtype"
) -> None:
    """Whatever the order of the sum: torch's own product is held to the same bound."""
    x, weight = torch.randn(tokens, columns).to(dtype), weight_of(rows, columns, dtype)
    bias = torch.randn(rows).to(dtype) if biased else None
    terms = x.abs().double() @ weight.abs().double().T
    exact = x.double() @ weight.double().T
    if bias is not None:
        terms, exact = terms + bias.abs().double(), exact + bias.double()
    summed = (columns + 1) * EPS * terms
    rounded = HALF_ULP if dtype is torch.bfloat16 else 0.0  # float32 sums are stored as they are
    ours = packed.product(x, weight, bias)
    assert (ours is None) == (dtype is torch.float32 and tokens < packed.FLOAT32_ROWS)
    for found in (ours, torch.nn.functional.linear(x, weight, bias)):
        if found is not None:
            assert found.dtype is dtype
            error = (found.double() - exact).abs()
            assert (error <= summed + rounded * (exact.abs() + summed)).all(), (error - summed).max()


def close(x: "torch.Tensor", weight: "torch.Tensor") -> bool:
    """Return whether product is x @ weight.T, and not what another weight would give."""
    found = packed.product(x, weight)
    assert found is not None
    return torch.allclose(found.float(), x.float() @ weight.float().T, rtol=2 * HALF_ULP, atol=1e-4)


def test_three_dimensions_stay() -> None:
    assert close(torch.randn(2, 3, 16).bfloat16(), weight_of(5, 16))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_weight_that_was_written_to_is_laid_out_again(dtype: "torch.dtype") -> None:
    x, weight = torch.randn(4, 16).to(dtype), weight_of(32, 16, dtype)
    assert close(x, weight)
    weight.copy_(torch.randn(32, 16))
    assert close(x, weight)
    weight.data = torch.randn(32, 16).to(dtype)
    assert close(x, weight)


@pytest.mark.parametrize("case", ["float32 weight", "float32 rows", "no rows", "inference", "autograd"])
def test_what_is_torchs_own_to_do(case: str) -> None:
    x, weight = torch.randn(0 if case == "no rows" else 4, 16).bfloat16(), weight_of(32, 16)
    if case == "float32 weight":
        weight = torch.nn.Parameter(weight.float(), requires_grad=False)
    elif case == "float32 rows":
        x = x.float()
    elif case == "autograd":
        weight.requires_grad = True
    elif case == "inference":
        with torch.inference_mode():
            weight = torch.randn(32, 16).bfloat16()
    assert packed.product(x, weight) is None


@pytest.mark.parametrize("rows", [32, 40])
def test_greedy_tokens_are_of_a_whole_head_alone(rows: int) -> None:
    """A head that is padded, or one rank's part of it, is upstream's to reduce."""
    pytest.importorskip("sglang")
    hidden, weight = torch.randn(6, 16).bfloat16(), weight_of(rows, 16)
    head = SimpleNamespace(weight=weight, shard_indices=SimpleNamespace(num_org_elements=32), org_vocab_size=32)
    found = packed.greedy_tokens(lambda worker, **_: "upstream", None, hidden_states=hidden, lm_head=head)
    if rows == 32:
        product = hidden.float() @ weight.float().T
        assert (product.gather(1, found[:, None])[:, 0] >= product.amax(-1) * (1 - 2 * HALF_ULP)).all()
    else:
        assert found == "upstream"
