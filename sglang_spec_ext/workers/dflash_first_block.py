"""DFLASH's first block on separate servers: prefill drafts it after the last chunk, decode verifies it first.

SGLang's worker drafts and verifies inside one function, so prefill runs the draft pass of a step by itself
here, and on decode the draft's runner answers for blocks that were shipped. Read against 0.5.23:
speculative/dflash_worker_v2.py.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.dflash_worker_v2 import _resolve_dflash_embedding_module

from sglang_spec_ext.disagg.block_rows import pack_blocks
from sglang_spec_ext.disagg.builders import ShippedBlock
from sglang_spec_ext.disagg.first_block import FIRST_BLOCK, BorrowedSlots, due_blocks, unpacked
from sglang_spec_ext.disagg.session import current_session


def _draft(worker: Any, batch: Any, anchors: torch.Tensor) -> torch.Tensor:
    """Return the K tokens [R, K] that follow each anchor [R]."""
    from sglang.srt.lora.layers import unwrap_lora_layer
    from sglang.srt.speculative.spec_utils import draft_tp_context

    target = worker.target_worker.model_runner.model
    bs, width = len(batch.seq_lens), int(worker.block_size)
    with torch.inference_mode(), draft_tp_context(worker.draft_parallel_layout):
        out = worker.draft_model_runner.forward(_draft_batch(worker, batch, anchors))
        hidden = out.logits_output.hidden_states.view(bs, width, -1)[:, 1:]
        tokens = worker._greedy_sample_from_vocab_parallel_head(
            hidden_states=hidden.reshape(bs * (width - 1), -1), lm_head=unwrap_lora_layer(target.lm_head)
        )
    drafted: torch.Tensor = tokens.view(bs, width - 1)
    return drafted


def _draft_batch(worker: Any, batch: Any, anchors: torch.Tensor) -> Any:
    """Return the draft's batch: each anchor, then mask tokens, at the positions behind the prompt."""
    from sglang.srt.model_executor.forward_batch_info import (
        CaptureHiddenMode,
        ForwardBatch,
        ForwardMode,
        enable_num_token_non_padded,
    )
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    bs, width = len(batch.seq_lens), int(worker.block_size)
    ids = torch.full((bs, width), int(worker._mask_token_id), dtype=torch.long, device=anchors.device)
    ids[:, 0] = anchors
    plan = worker.target_worker.model_runner.kv_index_translator.plan_uniform_extend(
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        seq_lens_cpu=batch.seq_lens_cpu,
        width=width,
    )
    bound = batch.seq_lens_cpu + width
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=bs,
        input_ids=ids.flatten(),
        req_pool_indices=batch.req_pool_indices,
        seq_lens=batch.seq_lens,
        out_cache_loc=plan.write_virtual,
        seq_lens_sum=int(bound.sum()),
        seq_lens_cpu=bound,
        positions=(batch.seq_lens.unsqueeze(1) + worker._block_pos_offsets).flatten(),
        input_embeds=_embeddings(worker, ids),
        spec_algorithm=SpeculativeAlgorithm.DFLASH,
        spec_info=worker._draft_block_spec_info,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        num_token_non_padded=(
            torch.full((), bs * width, dtype=torch.int32, device=anchors.device)
            if enable_num_token_non_padded()
            else None
        ),
        global_num_token_non_padded_cpu=bs * width,
        can_run_decode_cuda_graph=False,
    )
    plan.bind(forward_batch, worker.draft_model_runner.kv_index_translator)
    return forward_batch


def _embeddings(worker: Any, ids: torch.Tensor) -> torch.Tensor:
    """Return the draft's inputs [R * width, H]."""
    from sglang.srt.lora.layers import unwrap_lora_layer

    if worker._full_embed_gpu is not None:
        found = torch.nn.functional.embedding(ids, worker._full_embed_gpu)
    else:
        target = worker.target_worker.model_runner.model
        found = unwrap_lora_layer(_resolve_dflash_embedding_module(worker.draft_model, target))(ids)
    return (found * worker._noise_embed_scale).view(-1, found.shape[-1])


class FirstBlockRunner:
    """SGLang's runner of the draft: `draft` serves prefill, `expect`, `forward` and `replace` decode.

    A step of which every block was shipped is not drafted. A shipped block counts as drafted with probability one,
    as DFLASH's own greedy drafts do.
    """

    def __init__(self, runner: Any, worker: Any) -> None:
        self._runner = runner
        self._worker = worker
        self._rows = 0
        self._blocks: dict[int, ShippedBlock] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def draft(self, batch: Any, draft_input: Any) -> None:
        """Leave the blocks of a batch of prompts on its draft input, packed, on a prefill server.

        Rows whose prompt is not complete yet are drafted too and not used. Without room for the slots, or with a
        draft that chooses among candidates or keeps a window of its own, there is no block and decode drafts.
        """
        session, worker = current_session(), self._worker
        if session is None or session.role != "prefill" or batch.forward_mode.is_idle() or batch.seq_lens_cpu is None:
            return
        chooses = worker.selector is not None or worker.lilicorr is not None or worker._is_domino
        if chooses or worker.use_compact_draft_cache:
            return
        slots = BorrowedSlots.take(batch, int(worker.block_size))
        if slots is None:
            return
        try:
            ids = _draft(worker, batch, draft_input.bonus_tokens)
            setattr(draft_input, FIRST_BLOCK, pack_blocks(session.codec.schema, ids, None))
        finally:
            slots.give_back()

    def expect(self, reqs: Sequence[Any], *, num_draft_tokens: int) -> None:
        """Take the blocks [K] that were shipped for the requests of the step about to run."""
        self._rows = len(reqs)
        self._blocks = due_blocks(reqs, num_draft_tokens=num_draft_tokens)

    @property
    def all_shipped(self) -> bool:
        """Whether nothing is left to draft in this step."""
        return bool(self._blocks) and len(self._blocks) == self._rows

    @property
    def any_shipped(self) -> bool:
        """Whether this step has drafts that were not drafted here."""
        return bool(self._blocks)

    def forward(self, forward_batch: Any) -> Any:
        """Run the draft, or return hidden states of the right shape that `replace` makes up for."""
        if self.all_shipped:
            hidden = forward_batch.input_embeds
            return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden), can_run_graph=False)
        out = self._runner.forward(forward_batch)
        sampler = self._worker._draft_sampler
        if self._blocks and sampler is not None and out.can_run_graph:  # the graph has chosen the tokens already
            width = int(self._worker.block_size) - 1
            self.replace(sampler.out[: self._rows * width])
        return out

    def replace(self, tokens: torch.Tensor) -> torch.Tensor:
        """Put the shipped blocks in their rows of the drafted tokens [R * n], n <= K, in place."""
        if self._blocks:
            width = len(tokens) // self._rows
            ids, _ = unpacked(self._blocks, width, tokens.device)
            tokens.view(self._rows, width)[sorted(self._blocks)] = ids.to(tokens.dtype)
        return tokens
