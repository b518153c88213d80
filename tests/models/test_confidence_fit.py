"""A confidence head fitted on held-back text: it finds the truth, and changes nothing else of a draft."""

import pytest

torch = pytest.importorskip("torch")

from safetensors.torch import load_file  # noqa: E402

from sglang_spec_ext.models import tiny  # noqa: E402
from sglang_spec_ext.models.check import check_draft  # noqa: E402
from sglang_spec_ext.models.confidence_fit import HEAD, fit_head, write_head  # noqa: E402
from sglang_spec_ext.models.train_record import Validation  # noqa: E402


def case(blocks: int, seed: int) -> "tuple[torch.Tensor, torch.Tensor]":
    """Features, one of them loud and one constant, and chances that hang on two of them."""
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(blocks, 4, 12, generator=generator)
    features[..., 3] *= 300.0
    features[..., 5] = 2.0
    return features, torch.sigmoid(0.5 * features[..., 0] - 0.4 * features[..., 1] + 0.3)


def test_a_head_finds_the_chances_behind_its_features():
    weight, bias = fit_head(*case(3000, 0))
    features, chances = case(500, 1)
    assert (torch.sigmoid(features @ weight + bias) - chances).abs().mean() < 0.03


def test_drafts_that_are_not_reached_do_not_count():
    features, chances = case(3000, 0)
    features[:, 1:, 7] = 1.0  # a mark of later drafts ...
    never = torch.cat([torch.zeros(3000, 1), chances[:, 1:] * 0 + 1.0], -1)  # ... which no block reaches
    weight, bias = fit_head(features, never)
    assert torch.sigmoid(features @ weight + bias).mean() < 0.05


def test_a_written_head_is_the_only_change(tmp_path):
    folder = tmp_path
    next(entry for entry in tiny.entries() if entry.name == "random-dspark-vanilla").build(folder)
    before = load_file(folder / "model.safetensors")
    wide = before[f"{HEAD}.weight"].numel()
    weight, bias = write_head(folder, torch.linspace(-1, 1, wide), torch.tensor(0.25))
    after = load_file(folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"{HEAD}.weight", f"{HEAD}.bias"}
    assert after.keys() == before.keys()
    for name in changed:
        assert after[name].dtype is before[name].dtype
        assert after[name].shape == before[name].shape
    assert torch.equal(after[f"{HEAD}.weight"].flatten().float(), weight)
    assert float(bias) == 0.25
    assert not check_draft(folder)


def test_a_record_is_rescored_by_another_head():
    record = Validation.empty(2)
    record.features = [torch.ones(3, 2, 4), torch.zeros(1, 2, 4)]
    record.overlap = [torch.full((3, 2), 0.5), torch.full((1, 2), 1.0001)]
    record.greedy = [torch.zeros(3, dtype=torch.bool), torch.zeros(1, dtype=torch.bool)]
    record.rescore(torch.tensor([1.0, 2.0, 0.0, 0.0]), torch.tensor(-1.0))
    assert [part.tolist() for part in record.confidence] == [[[2.0, 2.0]] * 3, [[-1.0, -1.0]]]
    features, accepted = record.fitted(half=1)
    assert features.shape == (1, 2, 4)
    assert accepted.tolist() == [[1.0, 1.0]]


def test_no_text_is_both_fitted_and_judged():
    """Greedy and sampled texts in an order that halves of all texts would not keep apart."""
    record = Validation.empty(1)
    for number, greedy in enumerate((True, False, False, True, True, False, True, False)):
        record.greedy.append(torch.tensor([greedy]))
        for part in (record.features, record.confidence):
            part.append(torch.full((1, 1, 1), float(number)))
        record.overlap.append(torch.ones(1, 1))
        record.agrees.append(torch.ones(1, 1))
    fitted = set(record.fitted(half=0)[0].flatten().tolist())
    judged = {x for greedy in (True, False) for x in record.survival(greedy=greedy, half=1)[0].flatten().tolist()}
    assert not fitted & judged
    assert len(fitted | judged) == 8
