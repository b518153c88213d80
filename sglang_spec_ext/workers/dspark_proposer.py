"""DSPARK's draft pass, timed, and cut to the K that a step verifies.

The width of the drafted block never changes: position j depends on the mask tokens behind it.
"""

from typing import Any

import torch
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockResult,
    DraftProposal,
    resolve_draft_params,
)
from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

from sglang_spec_ext.workers.loop import AdaptiveLoop


class TimedProposer:
    """SGLang's proposer, with a watch and the confidences of the last block."""

    def __init__(self, proposer: Any, loop: AdaptiveLoop) -> None:
        self._proposer = proposer
        self._loop = loop
        self.confidence: torch.Tensor | None = None  # [R, gamma] of the last propose

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, **kwargs: Any) -> DraftProposal:
        """Draft one block for every request."""
        start = self._loop.clock.now()
        proposal = self._proposer.propose(**kwargs)
        self._loop.draft_watch.add(start)
        self.confidence = proposal.confidence
        return proposal


class BlockProposer:
    """Drafts the whole block and hands on its first K tokens; at K = 0 it drafts nothing.

    With `keep_width` the proposal keeps the shape of the whole block, for steps whose layout does the cutting.
    """

    def __init__(self, proposer: TimedProposer, worker: Any, k: int, *, keep_width: bool) -> None:
        self._proposer = proposer
        self._worker = worker
        self._offsets = worker._block_pos_offsets  # of the whole block
        self._width = worker.verify_num_draft_tokens
        self._k = k
        self._tokens = worker.gamma if keep_width else k

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, *, batch: Any, draft_input: Any, bs: int, **kwargs: Any) -> DraftProposal:
        """Draft for every request of a batch."""
        if self._k == 0:
            return self._nothing(draft_input, bs, kwargs["sampling_info"])
        if self._k + 1 < self._proposer.query_token_num:
            kwargs["verify_window"] = self._whole_window(batch, draft_input, bs)
        found = self._proposer.propose(batch=batch, draft_input=draft_input, bs=bs, **kwargs)
        if self._tokens == found.draft_block.draft_tokens.shape[1]:
            return found
        block = found.draft_block
        logits = block.corrected_logits
        return DraftProposal(
            draft_block_ids=found.draft_block_ids,
            draft_block=DraftBlockResult(
                draft_tokens=block.draft_tokens[:, : self._tokens],
                corrected_logits=None if logits is None else logits[:, : self._tokens].contiguous(),
                greedy_mask=block.greedy_mask,
                temperatures=block.temperatures,
                greedy_draft=block.greedy_draft,
            ),
            confidence=found.confidence,
            confidence_raw=found.confidence_raw,
        )

    def _whole_window(self, batch: Any, draft_input: Any, bs: int) -> Any:
        worker = self._worker
        lengths = batch.seq_lens_cpu
        return alloc_verify_window(
            batch=batch,
            bs=bs,
            device=worker.device,
            verify_num_draft_tokens=self._width,
            block_pos_offsets=self._offsets,
            model_runner=worker.model_runner,
            seq_lens_cpu=draft_input.nxt_kv_lens_cpu if lengths is None else lengths,
        )

    def _nothing(self, draft_input: Any, bs: int, sampling_info: Any) -> DraftProposal:
        self._proposer.confidence = None
        anchors = draft_input.bonus_tokens.view(-1, 1).long()
        params = resolve_draft_params(sampling_info=sampling_info, bs=bs, device=anchors.device)
        # tokens that are never verified still need an id inside the vocabulary
        tokens = anchors.expand(bs, self._tokens).contiguous()
        return DraftProposal(
            draft_block_ids=anchors if self._tokens == 0 else anchors.expand(bs, self._tokens).contiguous(),
            draft_block=DraftBlockResult(
                draft_tokens=tokens,
                corrected_logits=None,
                greedy_mask=params.greedy_mask,
                temperatures=params.temperatures,
                greedy_draft=True,
            ),
        )
