"""DSPARK's draft pass, timed, and cut to the K that a step verifies.

The width of the drafted block never changes: position j depends on the mask tokens behind it. The head and the
Markov steps run for the K positions that are verified alone, unless a captured graph holds them or a ragged step
wants the confidences of the whole block.
"""

import copy
from functools import partial
from typing import Any

import torch
from sglang.srt.speculative.dspark_components.dspark_draft import (
    DraftBlockResult,
    DraftForwardResult,
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
        self.confidence: torch.Tensor | None = None  # [R, tokens] of the last propose
        self._heads: dict[int, Any] = {}  # SGLang's proposer by the number of tokens it chooses

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, tokens: int | None = None, **kwargs: Any) -> DraftProposal:
        """Draft one block for every request, or the first `tokens` of it."""
        start = self._loop.clock.now()
        proposal = self._choosing(tokens).propose(**kwargs)
        self._loop.draft_watch.add(start)
        self.confidence = proposal.confidence
        return proposal

    @property
    def _graphed(self) -> bool:
        """Whether SGLang's draft graph holds the head of the whole block; a platform without graphs holds none."""
        graphs = self._proposer.draft_model_runner.decode_cuda_graph_runner
        return graphs is not None and self._proposer._draft_sampler is not None

    def _choosing(self, tokens: int | None) -> Any:
        """Return a proposer that chooses `tokens` of a block."""
        if tokens is None or self._graphed:
            return self._proposer
        if tokens not in self._heads:
            head = copy.copy(self._proposer)
            head.gamma = tokens  # read after the draft pass, which is the original's
            head._run_forward = partial(_run_whole_block, self._proposer, tokens)
            self._heads[tokens] = head
        return self._heads[tokens]


def _run_whole_block(proposer: Any, tokens: int, **kwargs: Any) -> DraftForwardResult:
    """Run the draft pass over the block and keep the hidden states of its first `tokens` positions."""
    whole = proposer._run_forward(**kwargs)
    hidden = whole.draft_hidden_3d[:, :tokens]
    raw = whole.raw_hidden.view(len(hidden), -1, *whole.raw_hidden.shape[1:])[:, :tokens]
    return DraftForwardResult(
        draft_block_ids=whole.draft_block_ids,
        raw_hidden=raw.flatten(0, 1),
        draft_hidden_3d=hidden,
        can_run_graph=whole.can_run_graph,
    )


class BlockProposer:
    """Drafts the whole block and hands on its first K tokens; at K = 0 it drafts nothing.

    With `keep_width` the proposal keeps the shape of the whole block, for steps whose layout does the cutting; with
    `whole` all of it is chosen all the same, for its confidences.
    """

    def __init__(self, proposer: TimedProposer, worker: Any, k: int, *, keep_width: bool, whole: bool) -> None:
        self._proposer = proposer
        self._worker = worker
        self._offsets = worker._block_pos_offsets  # of the whole block
        self._width = worker.verify_num_draft_tokens
        self._k = k
        self._tokens = worker.gamma if keep_width else k
        self._chosen = None if keep_width or whole else k

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, *, batch: Any, draft_input: Any, bs: int, **kwargs: Any) -> DraftProposal:
        """Draft for every request of a batch."""
        if self._k == 0:
            return self._nothing(draft_input, bs, kwargs["sampling_info"])
        if self._k + 1 < self._proposer.query_token_num:
            kwargs["verify_window"] = self._whole_window(batch, draft_input, bs)
        found = self._proposer.propose(self._chosen, batch=batch, draft_input=draft_input, bs=bs, **kwargs)
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
