"""Noise of sampled drafts: words that are uniform, follow from the key alone, and agree between shards."""

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.cpu.draft_noise import only_where_sampled, random_words  # noqa: E402


def words(quads, *, rows: int = 3, step: int = 2, offset: int = 5, key: int = 11):
    return random_words(
        key, torch.tensor(quads)[None], torch.arange(rows)[:, None], torch.tensor([[step]]), torch.tensor([[offset]])
    )


def test_words_are_uniform_and_differ_between_rows() -> None:
    found = torch.stack(words(list(range(4096)))).double() / 2**32
    assert found.shape == (4, 3, 4096)
    assert 0.0 <= found.min() < 0.001
    assert 0.999 < found.max() < 1.0
    counts = torch.histc(found.flatten(), 16, 0.0, 1.0)
    expected = found.numel() / 16
    assert ((counts - expected) ** 2 / expected).sum() < 44.26  # 99.99 % of chi-square, 15 degrees of freedom
    assert torch.corrcoef(found.permute(1, 0, 2).flatten(1)).fill_diagonal_(0.0).abs().max() < 0.05


def test_words_follow_from_their_arguments() -> None:
    same = torch.stack(words([0, 1, 2]))
    assert torch.equal(same, torch.stack(words([0, 1, 2])))
    for other in ({"step": 3}, {"offset": 6}, {"key": 12}):
        assert not torch.equal(same, torch.stack(words([0, 1, 2], **other)))


def test_a_shard_draws_what_the_whole_vocabulary_would() -> None:
    whole = torch.stack(words(list(range(64))))
    assert torch.equal(torch.stack(words(list(range(32, 64)))), whole[:, :, 32:])
    assert torch.equal(torch.stack(words(list(range(32)))), whole[:, :, :32])


@pytest.mark.parametrize(("temperatures", "needed"), [([0.0, 0.0], False), ([0.0, 0.7], True)])
def test_noise_only_where_a_row_samples(temperatures, needed: bool) -> None:
    def original(cls, *, temperatures, has_sampled_rows):
        return has_sampled_rows

    asked = only_where_sampled(original, object, temperatures=torch.tensor(temperatures), has_sampled_rows=None)
    assert asked is needed
    assert only_where_sampled(original, object, temperatures=torch.tensor(temperatures), has_sampled_rows=True) is True
