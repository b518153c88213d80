"""DFLASH's draft pass, timed, and run over the whole block for a step that verifies a prefix of it."""

import copy
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.speculative.dflash_worker_v2 import assign_extend_cache_locs_func

from sglang_spec_ext.workers.loop import AdaptiveLoop


class TimedRunner:
    """SGLang's model runner of the draft, with a watch."""

    def __init__(self, runner: Any, loop: AdaptiveLoop) -> None:
        self._runner = runner
        self._loop = loop

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, forward_batch: Any) -> Any:
        """Run the draft model."""
        start = self._loop.clock.now()
        out = self._runner.forward(forward_batch)
        self._loop.draft_watch.add(start)
        return out


class BlockDraftRunner:
    """Given the draft batch of a step at K, runs the whole block and returns the first K + 1 hidden states.

    The width of the drafted block never changes: position j depends on the mask tokens behind it.
    """

    def __init__(self, runner: TimedRunner, worker: Any, k: int) -> None:
        self._runner = runner
        self._worker = worker
        self.k = k
        self.hidden: torch.Tensor | None = None  # [R, block, H] of the whole block drafted last
        self._block = int(worker.block_size)
        self._offsets = worker._block_pos_offsets

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, forward_batch: Any) -> Any:
        """Return the hidden states [R * (K + 1), H] in the form of a model runner's output."""
        bs, width = forward_batch.batch_size, self.k + 1
        if self.k == 0:
            hidden = forward_batch.input_embeds  # one row a request, of which no token is drafted
        else:
            out = self._runner.forward(self._whole_block(forward_batch, bs, width))
            found = out.logits_output.hidden_states
            self.hidden = found.view(bs, self._block, -1)
            hidden = self.hidden[:, :width].reshape(bs * width, -1)
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states=hidden), can_run_graph=False)

    def _whole_block(self, narrow: Any, bs: int, width: int) -> Any:
        """Return the draft batch with the rest of the mask tokens."""
        worker, block = self._worker, self._block
        translator = worker.target_worker.model_runner.kv_index_translator
        lengths = narrow.seq_lens
        ids = narrow.input_ids.view(bs, width)
        embeds = narrow.input_embeds.view(bs, width, -1)
        batch = copy.copy(narrow)
        batch.input_ids = _repeat_last(ids, block).reshape(-1)
        batch.input_embeds = _repeat_last(embeds, block).reshape(bs * block, -1)
        batch.positions = (lengths.unsqueeze(1) + self._offsets).reshape(-1)
        batch.seq_lens_cpu = narrow.seq_lens_cpu + (block - width)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        batch.global_num_token_non_padded_cpu = bs * block
        if narrow.num_token_non_padded is not None:
            batch.num_token_non_padded = torch.full_like(narrow.num_token_non_padded, bs * block)
        batch.out_cache_loc = assign_extend_cache_locs_func(
            req_pool_indices=narrow.req_pool_indices,
            req_to_token=worker.model_runner.req_to_token_pool.req_to_token,
            start_offset=lengths,
            end_offset=lengths + block,
            batch_size=bs,
            draft_token_num=block,
            device=worker.device,
        )
        plan = translator.plan(
            req_pool_indices=narrow.req_pool_indices,
            seq_lens=lengths,
            seq_lens_cpu=batch.seq_lens_cpu,
            write_virtual=batch.out_cache_loc,
            read_extent=block,
        )
        plan.bind(batch, self._runner.kv_index_translator)
        return batch


def _repeat_last(rows: torch.Tensor, length: int) -> torch.Tensor:
    """Return [R, length, ...] from [R, n, ...] by repeating the last column: a mask token's."""
    rest = rows[:, -1:].expand(-1, length - rows.shape[1], *rows.shape[2:])
    return torch.cat([rows, rest], dim=1)
