"""DSPARK's Markov step on the CPU platform against SGLang's own, and against the distribution it says it draws from."""

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang.srt.models.dspark import VanillaMarkov  # noqa: E402
from sglang.srt.speculative.dspark_components import dspark_draft  # noqa: E402

from sglang_spec_ext.cpu.draft_noise import gumbel  # noqa: E402
from sglang_spec_ext.cpu.draft_step import draft_step  # noqa: E402

RANK = 28  # of the shipped draft


def head_of(vocab_size: int, dtype: torch.dtype) -> VanillaMarkov:
    """A head as SGLang loads it, with biases as large as the logits."""
    torch.manual_seed(2)
    head = VanillaMarkov(vocab_size=vocab_size, markov_rank=RANK).requires_grad_(False)
    torch.nn.init.normal_(head.markov_w1.weight)
    torch.nn.init.normal_(head.markov_w2.weight, std=0.5)
    return head.to(dtype)


def step_of(head, base, prev, *, temperature=None, offset=0, step=3, original=None):
    """Run one position; greedy without kept logits unless a temperature is given. Returns tokens and kept logits."""
    kept = None if temperature is None else torch.empty_like(base)
    prev = torch.stack([prev] * 3, dim=1)[:, 1]  # a column, as the first position's tokens are
    tokens, state = (draft_step if original is None else original)(
        *(() if original is not None else (refuse,)),
        head,
        prev,
        base,
        hidden_states=None,
        state="untouched",
        temperatures=torch.full((len(prev),), temperature or 0.0),
        noise=dspark_draft.DraftNoise(key=11, offset=torch.tensor([offset])),
        step=step,
        logits_out=kept,
    )
    assert state == "untouched"
    return tokens, kept


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("SGLang's own step was asked for")


@pytest.mark.parametrize("rows", [1, 5])
def test_greedy_tokens_and_kept_logits_are_those_of_sglang(rows: int) -> None:
    head, vocab_size = head_of(997, torch.float32), 997
    base, prev = torch.randn(rows, 7, vocab_size)[:, 3], torch.randint(0, vocab_size, (rows,))
    assert torch.equal(step_of(head, base, prev)[0], step_of(head, base, prev, original=dspark_draft._draft_step)[0])
    tokens, kept = step_of(head, base, prev, temperature=0.0)
    want, wanted = step_of(head, base, prev, temperature=0.0, original=dspark_draft._draft_step)
    assert torch.equal(tokens, want)
    torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_follow_the_logits_that_rejection_reads(dtype: torch.dtype) -> None:
    """20,000 draws, chi-square with 12 degrees of freedom at 6e-7; the key is fixed, so it is never flaky."""
    draws, vocab_size = 20_000, 13
    head = head_of(vocab_size, dtype)
    base = torch.randn(1, vocab_size).to(dtype).expand(draws, -1).contiguous()
    tokens, kept = step_of(head, base, torch.full((draws,), 4), temperature=0.8)
    q = (kept[0].float() / 0.8).softmax(0)
    counts = tokens.bincount(minlength=vocab_size)
    assert float(((counts - draws * q) ** 2 / (draws * q)).sum()) < 52.0


def test_noise_is_gumbel_noise_and_follows_from_its_arguments() -> None:
    noise = gumbel(5, 1, torch.tensor([2]), 200, 1000)
    assert torch.equal(noise, gumbel(5, 1, torch.tensor([2]), 200, 1000))
    for other in (gumbel(6, 1, torch.tensor([2]), 200, 1000), gumbel(5, 2, torch.tensor([2]), 200, 1000)):
        assert not (other == noise).any()
    assert not (gumbel(5, 1, torch.tensor([3]), 200, 1000) == noise).any()
    # the distribution function of -log(E), E exponential, at its own quantiles; 200,000 draws
    for chance in (0.01, 0.5, 0.99, 0.9999):
        quantile = -math.log(-math.log(chance))
        below = float((noise <= quantile).double().mean())
        assert abs(below - chance) < 5 * (chance * (1 - chance) / 200_000) ** 0.5


def test_a_head_that_was_written_to_is_read_again() -> None:
    """Weights loaded into a running server reach the float32 copies."""
    head = head_of(97, torch.bfloat16)
    base, prev = torch.zeros(1, 97, dtype=torch.bfloat16), torch.tensor([3])
    before = int(step_of(head, base, prev)[0])
    head.markov_w2.weight.neg_()
    assert int(step_of(head, base, prev)[0]) == int(
        (head.markov_w2.weight.float() @ head.markov_w1.weight[3].float()).argmax()
    )
    assert int(step_of(head, base, prev)[0]) != before


def test_other_heads_keep_their_own_step() -> None:
    """One that splits the vocabulary over ranks, and one whose bias is not W2 times an embedding."""
    head = head_of(97, torch.float32)
    head._w2_rows = slice(0, 48)

    class Other(VanillaMarkov):
        def project_bias(self, latent_states: torch.Tensor) -> torch.Tensor:
            return -super().project_bias(latent_states)

    for kept_apart in (head, Other(vocab_size=97, markov_rank=RANK).requires_grad_(False)):
        with pytest.raises(AssertionError, match="own step was asked for"):
            step_of(kept_apart, torch.zeros(2, 97), torch.tensor([1, 2]))
