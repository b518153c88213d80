"""The target's greedy choice, handed to SGLang's DFLASH and DSPARK verification."""

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.cpu import greedy  # noqa: E402

LOGITS = torch.tensor([[0.0, 2.0, 2.0], [3.0, 1.0, 3.0]])


def asked(worker: Any, **given: Any) -> dict[str, Any]:
    return given


def chosen(*, all_greedy: bool = True, sample: object = None, given: Any = None) -> Any:
    info = SimpleNamespace(is_all_greedy=all_greedy)
    worker = SimpleNamespace(_selector_sample=sample)
    found = greedy.accept_block(asked, worker, next_token_logits=LOGITS, sampling_info=info, target_predict=given, bs=2)
    assert found["bs"] == 2
    assert found["next_token_logits"] is LOGITS
    assert found["sampling_info"] is info
    return found["target_predict"]


def test_greedy_batches_bring_their_choice() -> None:
    assert chosen().tolist() == [1, 0]


def test_sampled_batches_and_choices_made_elsewhere_are_left_alone() -> None:
    assert chosen(all_greedy=False) is None
    assert chosen(sample=object()) is None
    assert chosen(given=LOGITS) is LOGITS


def test_row_argmax_takes_any_leading_shape() -> None:
    logits = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(1))
    assert torch.equal(greedy.row_argmax(logits), logits.argmax(-1))
    assert torch.equal(greedy.row_argmax(logits[0], fused=True), logits[0].argmax(-1))
