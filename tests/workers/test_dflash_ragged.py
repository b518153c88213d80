"""The parts of DFLASH's ragged verification that need no engine, each against its definition."""

import pytest

pytest.importorskip("sglang")

from types import SimpleNamespace

import numpy as np
import torch

from sglang_spec_ext.control.calibration import MarginEstimator
from sglang_spec_ext.workers.dflash_ragged import MarginHead, cut
from sglang_spec_ext.workers.margin_budget import RaggedTarget


def test_a_cut_request_ends_with_what_its_last_verified_row_drew() -> None:
    """Every draw of every row, over two tokens: the anchor and three drafts, of which a prefix was verified."""
    drafts = torch.tensor([0, 1, 0, 1])[None]
    for lengths in range(1, 5):
        for bits in range(16):
            draws = [bits >> row & 1 for row in range(4)]  # rows behind `lengths` hold anything
            accepted = next((n for n in range(3) if draws[n] != drafts[0, n + 1]), 3)
            bonus = draws[accepted]
            kept, last = cut(drafts, torch.tensor([accepted]), torch.tensor([bonus]), torch.tensor([lengths]))
            wanted = min(accepted, lengths - 1)
            assert (int(kept), int(last)) == (wanted, draws[wanted]), (lengths, draws)


def test_the_head_chooses_the_likeliest_token_and_keeps_its_margin() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(12, 6, generator=generator)
    weight[10:] = 100.0  # padding behind a vocabulary of 10
    hidden = torch.randn(3, 4, 6, generator=generator)
    lm_head = SimpleNamespace(weight=weight, shard_indices=SimpleNamespace(num_org_elements=10))
    head = MarginHead(MarginEstimator(4))
    tokens = head.choose(hidden, lm_head)
    logits = hidden @ weight[:10].T
    largest = logits.topk(2).values
    assert torch.equal(tokens, logits.argmax(-1))
    torch.testing.assert_close(head.margins, largest[..., 0] - largest[..., 1])


def test_a_budget_goes_to_the_drafts_with_wide_margins_once_the_estimator_is_warm() -> None:
    estimator = MarginEstimator(2, refit_steps=1, warmup_refits=1)
    head = MarginHead(estimator)
    head.margins = torch.tensor([[9.0, 9.0], [0.1, 9.0], [0.1, 0.1]])
    assert head.lengths(2) is None, "it is cold"
    estimator.refits, estimator.coefficients = 1, np.array([[1.0, -2.0], [1.0, -2.0]])
    lengths = head.lengths(2)
    assert lengths.tolist() == [3, 1, 1]
    target, margins, step = RaggedTarget(None, head, 3), head.margins.tolist(), SimpleNamespace()
    target.lengths = lengths
    target.settle(step)
    assert step.verified.tolist() == [2, 0, 0]
    assert step.margins.tolist() == margins
    target.lengths = None
    target.settle(step)
    assert step.verified is None
    assert step.margins is None, "they were of the step before"
    assert head.lengths(2) is None, "nothing was drafted here"
