"""`markov_step` on the CPU: a direct softmax, Philox's known answers, and the distribution drawn."""

import math

import pytest
import torch
from sglang_spec_ext.kernels.cases import markov_case
from sglang_spec_ext.kernels.gumbel import _philox, gumbel_noise
from sglang_spec_ext.kernels.markov_step import GumbelKey, markov_step


@pytest.mark.parametrize("rank", [1, 28, 32])
@pytest.mark.parametrize("noise", ["greedy", "given"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_equals_the_full_softmax_row_by_row(dtype, noise, rank):
    """Token, log-probability, margin and log-sum-exp from explicit biased logits."""
    case = markov_case(9, 301, rank, dtype=dtype, noise=noise, seed=1)
    got = markov_step(**case)
    for row in range(9):
        prev = int(case["prev_tokens"][row])
        logits = case["base_logits"][row].double()
        if 0 <= prev < 11:
            logits = logits + case["w2"].double() @ case["w1"][prev].double()
        temperature = 0.0 if case["temperatures"] is None else float(case["temperatures"][row])
        scaled = logits / (temperature or 1.0)
        keys = scaled + case["gumbel"][row] if temperature else scaled
        if logits.isnan().any():
            assert int(got.tokens[row]) == int(logits.isnan().nonzero()[0])
            assert got.log_probs[row].isnan()
            assert got.margins[row].isnan()
            continue
        token = int(keys.max(dim=0).indices)
        assert int(got.tokens[row]) == token
        if logits.max() == -math.inf:
            continue
        top = logits.topk(2).values
        assert float(got.margins[row]) == float(top[0] - top[1])
        assert float(got.log_probs[row]) == pytest.approx(float(scaled.log_softmax(0)[token]), abs=2e-5)
        assert float(got.log_sum_exps[row]) == pytest.approx(float(scaled.logsumexp(0)), abs=2e-5)
        if case["logits_out"] is not None:
            assert torch.equal(case["logits_out"][row], logits.float())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_draws_from_what_it_writes_down(temperature):
    """Logits kept in bfloat16 are what rejection takes q from, so the draw is from them as they were rounded."""
    generator = torch.Generator().manual_seed(3)
    base, kept = torch.randn(64, 997, generator=generator), torch.empty(64, 997, dtype=torch.bfloat16)
    noise = -torch.empty(64, 997).exponential_(generator=generator).log()
    got = markov_step(
        base,
        torch.full((64,), -1),
        w1=torch.zeros(1, 4),
        w2=torch.zeros(997, 4),
        temperatures=torch.full((64,), temperature),
        gumbel=noise,
        logits_out=kept,
    )
    assert torch.equal(kept, base.bfloat16())
    scaled = kept.float() / (temperature or 1.0)
    assert torch.equal(got.tokens, (scaled + noise if temperature else scaled).argmax(1))
    assert not torch.equal(kept.float().argmax(1), base.argmax(1))  # else rounding could be left out unnoticed
    torch.testing.assert_close(got.log_probs, scaled.log_softmax(1).gather(1, got.tokens[:, None]).squeeze(1))


@pytest.mark.parametrize("noise", ["greedy", "given"])
def test_without_statistics_the_tokens_are_the_same(noise):
    """Only what is asked for is made."""
    case = markov_case(9, 301, 28, dtype=torch.float32, noise=noise, seed=1)
    got = markov_step(**case, statistics=False)
    assert torch.equal(got.tokens, markov_step(**case).tokens)
    assert (got.log_probs, got.margins, got.log_sum_exps) == (None, None, None)


def test_philox_known_answers():
    """Random123's published vectors for Philox4x32-10."""
    ones = (1 << 32) - 1
    vectors = {
        (0, (0, 0, 0, 0)): (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
        ((1 << 64) - 1, (ones,) * 4): (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
        (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)): (
            0xD16CFE09,
            0x94FDCCEB,
            0x5001E420,
            0x24126EA1,
        ),
    }
    for (key, counter), want in vectors.items():
        got = _philox(key, tuple(torch.tensor([word]) for word in counter))
        assert tuple(int(word) for word in got) == want


def test_philox_draws_follow_the_distribution():
    """20,000 draws at two temperatures pass a chi-square test at 1e-6 (fixed key, so never flaky)."""
    draws, vocab_size = 20_000, 13
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(5))
    for temperature in (0.6, 1.5):
        got = markov_step(
            logits.expand(draws, -1).contiguous(),
            torch.full((draws,), -1),
            w1=torch.zeros(1, 16),
            w2=torch.zeros(vocab_size, 16),
            temperatures=torch.full((draws,), temperature),
            gumbel=GumbelKey(key=77, offset=torch.tensor([1]), step=0),
        )
        q = (logits / temperature).softmax(0)
        torch.testing.assert_close(got.log_probs, q.log()[got.tokens], rtol=0, atol=1e-5)
        counts = got.tokens.bincount(minlength=vocab_size)
        chi_square = float(((counts - draws * q) ** 2 / (draws * q)).sum())
        assert chi_square < 52.0  # 12 degrees of freedom, chance 6e-7


def test_noise_depends_on_every_part_of_its_counter():
    """Another key, offset, step or row is another stream; the same ones repeat it."""

    def noise(key=1, offset=2, step=3):
        return gumbel_noise(3, 41, key=key, offset=torch.tensor([offset]), step=step)

    base = noise()
    assert torch.equal(base, noise())
    assert not torch.equal(base[0], base[1])
    for other in (noise(key=2), noise(offset=3), noise(step=4)):
        assert not (other == base).any()


def test_empty_batches_and_refusals():
    """R = 0 is empty; each wrong argument is named."""
    case = markov_case(4, 33, 16, dtype=torch.float32, noise="given", seed=0)
    none = case | {
        name: case[name][:0] for name in ("base_logits", "prev_tokens", "temperatures", "gumbel", "logits_out")
    }
    assert markov_step(**none).tokens.shape == (0,)
    wrong = {
        "w1 must have at least one column": {"w1": torch.zeros(11, 0), "w2": torch.zeros(33, 0)},
        r"w2 must have shape \[33, 16\]": {"w2": torch.zeros(32, 16)},
        "gumbel must be given": {"gumbel": None},
        "gumbel must be None without temperatures": {"temperatures": None},
        r"logits_out must have shape \[4, 33\]": {"logits_out": torch.zeros(4, 32)},
    }
    for message, change in wrong.items():
        with pytest.raises(ValueError, match=message):
            markov_step(**(case | change))
