"""What drafts start from: heads aimed at distances and at like places, values, and least squares."""

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.models.draft_modules import Projections  # noqa: E402
from sglang_spec_ext.models.draft_regression import regress_projection  # noqa: E402
from sglang_spec_ext.models.draft_start import (  # noqa: E402
    ContentPairs,
    aim_by_content,
    aim_heads,
    telling_directions,
)

HEADS, WIDTH, THETA = 3, 96, 100000.0


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(4)


def make_attention() -> Projections:
    return Projections(input_width=WIDTH, hidden=WIDTH, heads=HEADS, kv_heads=HEADS, head_dim=64, eps=1e-5, norms=False)


def attention_of(attention: Projections, query: torch.Tensor, keys: torch.Tensor, position: int) -> torch.Tensor:
    """Weights [heads, n] of one query [width] at `position` over keys [n, width] at positions 0 to n - 1."""
    q = attention.query(query, torch.tensor(position), THETA)
    k, _ = attention.key_value(keys)
    k = attention.rotate(k, torch.arange(len(keys)), THETA)
    return (torch.einsum("hd,nhd->hn", q, k) / 8).softmax(-1)


@torch.no_grad()
def test_aimed_heads_look_their_distance_back():
    attention, rows = make_attention(), torch.randn(400, WIDTH) + 0.5
    aim_heads(attention, query_rows=rows, key_rows=rows, distances=(1, 4, 9), theta=THETA)
    found = torch.stack([attention_of(attention, row, rows[:60], 60) for row in rows[100:150]]).mean(0)
    for head, distance in enumerate((1, 4, 9)):
        place = 60 - distance
        assert float(found[head, place - 1 : place + 2].sum()) > 0.8
        assert float(found[head, place]) > 0.3


@torch.no_grad()
def mass_on_the_same_token() -> tuple[torch.Tensor, float]:
    """Return the attention of each head [heads] to places with the last token, and the share of such places."""
    tokens, texts = 40, 30
    means = torch.randn(tokens, WIDTH)
    token = torch.randint(tokens, (texts, 80))
    mixing = torch.randn(WIDTH, WIDTH) / WIDTH**0.5
    # a key is the token in other coordinates, beside noise and what its text has in common
    key = means[token] @ mixing + 0.1 * torch.randn(texts, 80, WIDTH) + 3 * torch.randn(texts, 1, WIDTH)
    sequence = torch.arange(texts)[:, None].expand(texts, 80)
    pairs = ContentPairs(means[token].flatten(0, 1), key.flatten(0, 1), sequence.flatten(), token.flatten())
    attention = make_attention()
    aim_by_content(attention, (0, 2), pairs)
    same, chance = [], []
    for row in range(texts):
        found = attention_of(attention, means[token[row, -1]], key[row, :-1], 79)
        alike = token[row, :-1] == token[row, -1]
        same.append(found[:, alike].sum(-1))
        chance.append(alike.float().mean())
    return torch.stack(same).mean(0), float(torch.stack(chance).mean())


def test_content_heads_find_the_place_with_the_same_token_at_any_distance():
    draws = [mass_on_the_same_token() for _ in range(10)]  # one draw's mass varies by 0.1
    mass = torch.stack([found for found, _ in draws]).mean(0)
    assert float(mass[0]) > 0.6
    assert float(mass[2]) > 0.6
    assert max(chance for _, chance in draws) < 0.1


def test_telling_directions_come_in_the_order_of_what_they_explain():
    rows = torch.randn(2000, 12) * torch.linspace(1, 5, 12)
    loud, quiet = torch.randn(12), torch.randn(12)
    target = torch.stack([10 * (rows @ loud), rows @ quiet], 1)
    found = telling_directions(rows, target, 2) @ rows.T
    correlation = torch.corrcoef(torch.cat([found, target.T]))
    assert abs(float(correlation[0, 2])) > 0.99
    assert found.var(1).tolist() == pytest.approx([1.0, 1.0], abs=0.05)


@torch.no_grad()
def test_regression_recovers_the_projection_that_made_the_target():
    projection, reader = torch.nn.Linear(10, 6, bias=False), torch.nn.Identity()
    final_norm, wanted = torch.rand(6) + 0.5, torch.randn(6, 10)

    def runs():
        for _ in range(6):
            a, residual = torch.randn(4, 25, 10), torch.randn(4, 25, 6)
            reader(residual + projection(a))
            valid = torch.rand(4, 25) < 0.8
            yield valid, ((residual + a @ wanted.T) * final_norm)[valid]

    found = regress_projection(runs(), projection=projection, reader=reader, final_norm=final_norm)
    torch.testing.assert_close(projection.weight, wanted, rtol=0.02, atol=0.02)
    assert found.explained > 0.99
