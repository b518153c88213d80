"""EAGLE verifying a budget: of each request's chain the prefix that its drafts' margins make likely.

SGLang's draft loop keeps the likeliest token of each pass and not its logits, and the first draft of a step is chosen
at the end of the step before. With top-k 1 the probability that travels beside that token (`topk_p`) decides nothing,
so the margin travels in its place: through the scheduler's relay between steps, and with what a backlog hands on.

A chain is cut in SGLang's verify tree: the last node that is verified gets no child, so acceptance ends there, and its
row draws the bonus. Drafts are the likeliest tokens, a function of the text before them, so what their margins cut off
changes no distribution.
"""

import copy
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_spec_ext.control.calibration import MarginEstimator
from sglang_spec_ext.kernels.margin_features import margin_features
from sglang_spec_ext.workers.margin_budget import Margins, RaggedTarget, refused
from sglang_spec_ext.workers.swap import Swap


class ChainMargins(Margins):
    """Keeps the margins [R, K] of the chains that a draft worker makes, one pass at a time."""

    def __init__(self, estimator: MarginEstimator, draft_worker: Any) -> None:
        super().__init__(estimator)
        self._columns: list[torch.Tensor] | None = None  # [R, 1] each, while a chain is being drafted
        self._output: Any = None  # of the draft's last pass; SGLang picks rows of it in place
        runner = draft_worker.draft_runner
        self._forward = runner.forward
        self._after_prefill = draft_worker._draft_extend_for_prefill
        self._after_verify = draft_worker._draft_extend_for_decode
        runner.forward = self._watched
        draft_worker._draft_extend_for_prefill = self._prefilled
        draft_worker._draft_extend_for_decode = self._verified

    def begin(self, draft_input: Any | None) -> None:
        """Say that chains are drafted next, from the seeds of SGLang's EagleDraftInput; None: nothing is."""
        self.margins = None
        self._columns = None if draft_input is None else [draft_input.topk_p.float()]

    def end(self) -> None:
        """Say that the chains are drafted."""
        if self._columns is not None:
            self.margins, self._columns = torch.cat(self._columns, dim=1), None

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        found = self._forward(*args, **kwargs)
        self._output = found.logits_output
        if self._columns is not None:
            self._columns.append(self._last())
        return found

    def _last(self) -> torch.Tensor:
        """Return the margins [R, 1] of the draft's last pass."""
        return margin_features(self._output.next_token_logits).margins[:, None]

    def _prefilled(self, *args: Any, **kwargs: Any) -> Any:
        found = self._after_prefill(*args, **kwargs)
        found.topk_p = self._last()
        return found

    def _verified(self, batch: Any, result: Any, **kwargs: Any) -> None:
        self._after_verify(batch, result, **kwargs)
        result.next_draft_input.topk_p = self._last()


class RaggedChainTarget(RaggedTarget):
    """The target pass over prefixes of chains."""

    def packed(self, whole: Any, layout: RaggedVerifyLayout, kept: torch.Tensor) -> Any:
        """See RaggedTarget; cuts the chains, too."""
        batch, verify = self._batch, whole.spec_info
        packed = copy.copy(verify)
        packed.draft_token, packed.positions = verify.draft_token[kept], verify.positions[kept]
        packed.ragged_verify_layout = layout
        verify.retrieve_next_token = cut(verify.retrieve_next_token, layout.verify_lens)
        lent = Swap(
            {"spec_info": packed, "input_ids": packed.draft_token, "out_cache_loc": batch.out_cache_loc[kept]}
        )
        with lent.on(batch):
            return ForwardBatch.init_new(
                batch,
                self._target.model_runner,
                capture_hidden_mode=CaptureHiddenMode.FULL,
                return_hidden_states_before_norm=False,
            )


def cut(next_token: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """Return the first children [R, width] of chains whose first `lengths` [R] nodes are verified."""
    column = torch.arange(next_token.shape[1], device=next_token.device)
    return torch.where(column == lengths[:, None] - 1, -1, next_token)


def unserved() -> str | None:
    """Return why an EAGLE worker whose K can move cannot verify a budget, or None."""
    from sglang.srt.runtime_context import get_disagg, get_spec

    if (reason := refused("EAGLE")) is not None:
        return reason
    if get_spec().speculative_use_rejection_sampling:
        return "--speculative-use-rejection-sampling draws the drafts, and their margins would tell which"
    if get_disagg().disaggregation_mode != "null":
        return "under PD disaggregation the first draft comes without its margin"
    return None
