"""The parts of EAGLE's ragged verification that need no engine."""

import pytest

pytest.importorskip("sglang")

from types import SimpleNamespace

import torch

from sglang_spec_ext.control.calibration import MarginEstimator
from sglang_spec_ext.workers.eagle_ragged import ChainMargins, cut

LOGITS = torch.tensor([[0.0, 3.0, 1.0], [5.0, 4.5, 0.0]])  # margins 2 and 0.5


class DraftWorker:
    """Each pass gives other logits; the extend after a verify step keeps two of its four rows, as SGLang's does."""

    def __init__(self) -> None:
        self.draft_runner = SimpleNamespace(forward=self._forward)
        self.passes = 0

    def _forward(self, rows: torch.Tensor) -> SimpleNamespace:
        self.passes += 1
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=rows * self.passes))

    def _draft_extend_for_prefill(self, batch: object) -> SimpleNamespace:
        self.draft_runner.forward(LOGITS)
        return SimpleNamespace(topk_p=torch.ones(2, 1))

    def _draft_extend_for_decode(self, batch: object, result: SimpleNamespace) -> None:
        output = self.draft_runner.forward(LOGITS.repeat_interleave(2, 0)).logits_output
        output.next_token_logits = output.next_token_logits[[0, 3]]
        result.next_draft_input.topk_p = torch.ones(2, 1)


def test_margins_of_a_chain_are_those_of_the_passes_that_chose_its_tokens() -> None:
    worker = DraftWorker()
    margins = ChainMargins(MarginEstimator(3), worker)
    seeds = worker._draft_extend_for_prefill(None)
    assert seeds.topk_p.tolist() == [[2.0], [0.5]], "the first draft's margin travels beside its token"
    margins.begin(seeds)
    for _ in range(2):
        worker.draft_runner.forward(LOGITS)
    margins.end()
    assert margins.margins.tolist() == [[2.0, 4.0, 6.0], [0.5, 1.0, 1.5]]
    result = SimpleNamespace(next_draft_input=SimpleNamespace())
    worker._draft_extend_for_decode(None, result)
    assert margins.margins.shape == (2, 3), "the extend after verification is no draft"
    assert result.next_draft_input.topk_p.tolist() == [[8.0], [2.0]]
    margins.begin(None)
    margins.end()
    assert margins.margins is None, "nothing was drafted"


def test_a_cut_chain_ends_with_its_last_verified_node() -> None:
    chain = torch.tensor([1, 2, 3, -1]).expand(4, -1)
    found = cut(chain, torch.tensor([1, 2, 3, 4], dtype=torch.int32))
    assert found.tolist() == [[-1, 2, 3, -1], [1, -1, 3, -1], [1, 2, -1, -1], [1, 2, 3, -1]]
    assert chain[0].tolist() == [1, 2, 3, -1], "SGLang keeps one chain for all steps"
