"""The training loop: resumption is exact, and a failed write or a bad loss keeps the last checkpoint."""

import json
import resource
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.models import train as loop  # noqa: E402
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Draft, Eagle3Shape  # noqa: E402
from sglang_spec_ext.models.target import TargetConfig  # noqa: E402
from sglang_spec_ext.models.train import TrainingError, TrainSettings, train  # noqa: E402
from sglang_spec_ext.models.train_recipes import Trainee  # noqa: E402
from sglang_spec_ext.models.train_record import Progress, Validation  # noqa: E402

TARGET = TargetConfig(8, 12, 4, 2, 1, 4, 20, 1e-5, 10000.0)


def make_trainee(*, bad_from=10**9) -> Trainee:
    torch.manual_seed(3)
    shape = Eagle3Shape(taps=(1,), intermediate_size=8, draft_vocab_size=10)
    draft = Eagle3Draft(shape, TARGET, embedding=torch.randn(20, 8), common=torch.arange(10))
    calls = []

    def loss(rng, progress):
        calls.append(progress.done)
        noise = torch.from_numpy(rng.normal(size=(10, 8))).float()
        value = (draft.lm_head.weight - noise).pow(2).mean() + draft.fc.weight.pow(2).mean()
        return value * (float("nan") if len(calls) > bad_from else 1.0), {"calls": len(calls)}

    def validate():
        record = Validation.empty(1)
        record.agrees, record.overlap = [torch.ones(2, 1).bool()], [torch.ones(2, 1)]
        record.greedy = [torch.tensor([True, False])]
        return record

    return Trainee(draft=draft, prepare=lambda: None, loss=loss, validate=validate, num_train_tokens=1)


def settings(folder, *, steps=8, every=0.0) -> TrainSettings:
    return TrainSettings("eagle3", folder / "draft", steps=steps, max_minutes=1e6, seed=1, checkpoint_every_s=every)


def weights(trainee: Trainee) -> torch.Tensor:
    return torch.cat([value.flatten() for value in trainee.draft.parameters()]).detach()


def test_an_interrupted_training_ends_with_the_same_weights(tmp_path):
    whole = make_trainee()
    list(train(whole, settings(tmp_path / "whole")))
    first = make_trainee()
    for report in train(first, settings(tmp_path / "parts")):
        if report.step == 3:
            break
    second = make_trainee()
    reports = list(train(second, settings(tmp_path / "parts")))
    assert reports[0].step == 4
    assert torch.equal(weights(whole), weights(second))
    facts = json.loads((tmp_path / "parts" / "draft" / "training.json").read_text())
    assert facts["steps"] == 8


def test_the_record_says_what_a_draft_was_trained_on_before(tmp_path):
    further = replace(settings(tmp_path, steps=2), started_from={"steps": 7}, learning_rate=1e-4)
    list(train(make_trainee(), further))
    facts = json.loads((tmp_path / "draft" / "training.json").read_text())
    assert facts["started_from"] == {"steps": 7}
    assert facts["peak_learning_rate"] == 1e-4


def test_a_full_disk_keeps_the_last_checkpoint(tmp_path, monkeypatch):
    run = train(make_trainee(), settings(tmp_path))
    next(run)
    state, exported = tmp_path / "draft.state.pt", tmp_path / "draft" / "model.safetensors"
    before = state.read_bytes(), exported.read_bytes()

    def full(_state, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(loop.torch, "save", full)
    with pytest.raises(TrainingError, match=r"No space left.*checkpoint before it is kept"):
        next(run)
    assert (state.read_bytes(), exported.read_bytes()) == before
    assert {path.name for path in tmp_path.iterdir()} == {"draft", "draft.state.pt"}


def test_a_disk_that_fills_up_while_the_draft_is_written_is_a_clear_error(tmp_path, monkeypatch):
    """The limit on file size makes the real writer of safetensors fail, as a full disk does."""
    written = loop.save_draft

    def with_limit(draft, folder):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        try:
            written(draft, folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    run = train(make_trainee(), settings(tmp_path))
    next(run)
    exported = tmp_path / "draft" / "model.safetensors"
    before = exported.read_bytes()
    assert len(before) > 1000
    monkeypatch.setattr(loop, "save_draft", with_limit)
    with pytest.raises(TrainingError, match=r"model\.safetensors.*checkpoint before it is kept"):
        next(run)
    assert exported.read_bytes() == before
    assert {path.name for path in exported.parent.iterdir()} == {"config.json", "model.safetensors", "training.json"}


def test_a_loss_that_is_not_finite_stops_before_the_weights_move(tmp_path):
    trainee = make_trainee(bad_from=2)
    run = train(trainee, settings(tmp_path))
    next(run)
    next(run)
    before = weights(trainee)
    with pytest.raises(TrainingError, match=r"finite.*draft\.state\.pt"):
        next(run)
    assert torch.equal(before, weights(trainee))


def test_a_state_of_another_run_is_not_taken_over(tmp_path):
    list(train(make_trainee(), settings(tmp_path, steps=2)))
    other = TrainSettings("eagle3", tmp_path / "draft", steps=4, max_minutes=1e6, seed=2)
    with pytest.raises(TrainingError, match="cannot resume"):
        next(train(make_trainee(), other))


def test_the_schedule_ends_at_the_time_limit(tmp_path):
    ticks = iter(range(0, 10**6, 30))
    limit = TrainSettings("eagle3", tmp_path / "draft", steps=10**6, max_minutes=4.0, seed=1)
    reports = list(train(make_trainee(), limit, clock=lambda: next(ticks)))
    assert reports[-1].done == 1.0
    assert len(reports) < 10


def test_the_learning_rate_warms_up_and_falls_and_cross_entropy_gives_way():
    rates = [Progress(done / 100, step=done * 3).lr_factor for done in range(101)]
    peak = rates.index(max(rates))
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert Progress(0.0).ce == 1.0
    assert 0 < Progress(1.0).ce < 0.2


def test_no_text_is_in_both_halves_of_a_calibration():
    record = Validation.empty(2)
    for text, greedy in enumerate((True, False, True, True, False)):
        record.confidence.append(torch.full((3, 2), float(text)))
        record.agrees.append(torch.tensor([[True, False]] * 3))
        record.overlap.append(torch.tensor([[0.5, 0.5]] * 3))
        record.greedy.append(torch.full((3,), greedy))
    halves = [record.survival(greedy=True, half=half) for half in (0, 1)]
    assert [sorted(set(logits.flatten().tolist())) for logits, _ in halves] == [[0.0, 3.0], [2.0]]
    assert halves[0][1][0].tolist() == [1.0, 0.0]
    logits, survived = record.survival(greedy=False, half=1)
    assert set(logits.flatten().tolist()) == {4.0}
    assert survived[0].tolist() == [0.5, 0.25]
