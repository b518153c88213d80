"""Products with weights in oneDNN's own layout: the bits of torch's product, and no stale weight."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.cpu import packed  # noqa: E402

pytestmark = pytest.mark.skipif(not packed.served(), reason="this CPU does not multiply bfloat16 with oneDNN")


def weight_of(rows: int, columns: int) -> "torch.nn.Parameter":
    return torch.nn.Parameter(torch.randn(rows, columns).bfloat16(), requires_grad=False)


@pytest.mark.parametrize("tokens", [1, 2, 7, 8, 33, 200])
@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (64, 64), (961, 576), (4099, 64)])
@pytest.mark.parametrize("biased", [False, True])
def test_the_product_has_the_bits_of_torchs_own(tokens: int, rows: int, columns: int, biased: bool) -> None:
    x, weight = torch.randn(tokens, columns).bfloat16(), weight_of(rows, columns)
    bias = torch.randn(rows).bfloat16() if biased else None
    assert torch.equal(packed.product(x, weight, bias), torch.nn.functional.linear(x, weight, bias))


def test_three_dimensions_stay() -> None:
    x, weight = torch.randn(2, 3, 16).bfloat16(), weight_of(5, 16)
    assert torch.equal(packed.product(x, weight), torch.nn.functional.linear(x, weight))


def test_a_weight_that_was_written_to_is_laid_out_again() -> None:
    x, weight = torch.randn(4, 16).bfloat16(), weight_of(32, 16)
    packed.product(x, weight)
    weight.copy_(torch.randn(32, 16))
    assert torch.equal(packed.product(x, weight), torch.nn.functional.linear(x, weight))
    weight.data = torch.randn(32, 16).bfloat16()
    assert torch.equal(packed.product(x, weight), torch.nn.functional.linear(x, weight))


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
        assert torch.equal(found, torch.nn.functional.linear(hidden, weight).argmax(-1))
    else:
        assert found == "upstream"
