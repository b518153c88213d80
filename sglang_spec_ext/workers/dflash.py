"""DFLASH: the block is drafted whole, and a prefix of it is verified.

A step at K is SGLang's own step at a block size of K + 1, in which the draft pass is replaced by one over
the whole block. K = 0 leaves the draft pass out and still projects the target's hidden state into the draft's K/V,
several steps together where it can (backlog.py). A budget is shared out by margins (dflash_ragged.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from sglang.srt.speculative.dflash_worker_v2 import _commit_accept

from sglang_spec_ext import flags
from sglang_spec_ext.workers.backlog import Row, joined
from sglang_spec_ext.workers.dflash_draft import BlockDraftRunner, TimedRunner
from sglang_spec_ext.workers.dflash_ragged import MarginHead, RaggedBlockTarget, cut, unserved
from sglang_spec_ext.workers.extended import RECURRENT, SIMULATED, SpecExtWorker
from sglang_spec_ext.workers.step import Step
from sglang_spec_ext.workers.swap import Swap

# buffers that the built-in worker allocates at its block size when it first needs them
_BUFFERS = (
    "_draft_block_ids_buf",
    "_draft_block_positions_buf",
    "_draft_block_tokens_buf",
    "_draft_verify_out_cache_loc_buf",
    "_draft_block_end_buf",
    "_draft_seq_lens_cpu_buf",
    "_accept_len_buf",
)
_BUFFER_LISTS = ("_commit_lens_bufs", "_bonus_id_bufs", "_out_tokens_bufs", "_new_seq_lens_bufs")


class DFlashSteps(SpecExtWorker):
    """Mixed in before SGLang's DFlashWorkerV2."""

    spec_ext_by_margins = True
    _swaps: dict[int, Swap]
    _margins: MarginHead | None = None  # where budgets are verified
    _ragged: RaggedBlockTarget | None = None
    _budget: Swap  # of a step with one
    _first_blocks: Any = None  # FirstBlockRunner, on servers whose records travel
    draft_model_runner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = flags.active_config()
        assert chosen is not None
        loop = self.spec_ext_start(chosen)
        self._swaps = {}
        if loop.controller.estimator is not None:
            self._margins = MarginHead(loop.controller.estimator)
            self._ragged = RaggedBlockTarget(self._target_worker, self._margins, int(self.block_size))
            self._budget = Swap({"_target_worker": self._ragged})
        runner = self.draft_model_runner
        if chosen.pd_transport != "off":
            from sglang_spec_ext.workers.dflash_first_block import FirstBlockRunner

            runner = self._first_blocks = FirstBlockRunner(runner, self)
        self.draft_model_runner = TimedRunner(runner, loop)

    def spec_ext_max_k(self) -> int:
        """See SpecExtWorker."""
        return int(self.block_size) - 1

    def spec_ext_limits(self) -> Iterator[tuple[bool, str]]:
        """See SpecExtWorker."""
        from sglang.srt.speculative.spec_utils import SIMULATE_ACC_LEN

        yield (
            self.use_compact_draft_cache,
            "--speculative-draft-window-size: the draft's window is rebuilt for one block size",
        )
        yield (
            self.selector is not None or self.lilicorr is not None,
            "this draft chooses among candidates of the whole block",
        )
        yield SIMULATE_ACC_LEN > 0, SIMULATED
        yield self._need_mamba_verify_commit, RECURRENT
        yield (
            self.model_runner.decode_cuda_graph_runner is not None,
            "decode graphs hold one verify width, and SGLang captures no other for DFLASH",
        )

    def spec_ext_not_ragged(self) -> str | None:
        """See SpecExtWorker."""
        return unserved(self)

    def spec_ext_prepare(self, batch: Any, step: Step) -> None:
        """See SpecExtWorker."""
        super().spec_ext_prepare(batch, step)
        if self._ragged is not None:
            self._ragged.expect(step, batch)

    def spec_ext_shape(self, step: Step) -> AbstractContextManager[None]:
        """See SpecExtWorker."""
        k = step.decision.k
        if self._first_blocks is not None:
            self._first_blocks.expect(step.reqs, num_draft_tokens=self.spec_ext_max_k())
        if k == self.spec_ext_max_k():
            return nullcontext() if step.decision.budget is None else self._budget.on(self)
        if k not in self._swaps:
            self._swaps[k] = self._swap(k)
        return self._swaps[k].on(self)

    def _swap(self, k: int) -> Swap:
        from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets

        return Swap(
            {
                "block_size": k + 1,
                "_block_pos_offsets": build_block_pos_offsets(length=k + 1, device=self.device),
                "draft_model_runner": BlockDraftRunner(self.draft_model_runner, self, k),
                "_draft_sampler": None,
                "_accept_bonus_buffer_cap": 0,
                "_accept_bonus_buffer_slot": 0,
                **dict.fromkeys(_BUFFERS),
                **{name: [] for name in _BUFFER_LISTS},
            }
        )

    def _greedy_sample_from_vocab_parallel_head(self, **kwargs: Any) -> Any:
        """Choose the draft tokens; counted as drafting."""
        loop = self.spec_ext
        if loop is None:
            return super()._greedy_sample_from_vocab_parallel_head(**kwargs)  # type: ignore[misc]
        start, shipped = loop.clock.now(), self._first_blocks
        if shipped is not None and shipped.all_shipped:
            return shipped.replace(kwargs["hidden_states"].new_empty(len(kwargs["hidden_states"]), dtype=torch.int64))
        if self._margins is None:
            tokens = super()._greedy_sample_from_vocab_parallel_head(**kwargs)  # type: ignore[misc]
        else:
            tokens = self._choose(self._margins, kwargs["hidden_states"], kwargs["lm_head"])
        if shipped is not None:
            tokens = shipped.replace(tokens)
            if self._margins is not None and shipped.any_shipped:
                self._margins.margins = None
        loop.draft_watch.add(start)
        return tokens

    def _choose(self, head: MarginHead, hidden: torch.Tensor, lm_head: Any) -> torch.Tensor:
        """Return the tokens [R * k] of a step at k, chosen among whole blocks for their margins; hidden [R * k, H]."""
        runner = self.draft_model_runner
        if not isinstance(runner, BlockDraftRunner):
            return head.choose(hidden.unflatten(0, (-1, self.spec_ext_max_k())), lm_head).flatten()
        if runner.k == 0:
            return hidden.new_empty(0, dtype=torch.int64)
        assert runner.hidden is not None
        return head.choose(runner.hidden[:, 1:], lm_head)[:, : runner.k].flatten()

    def _accept_block(self, *, candidates: torch.Tensor, **kwargs: Any) -> Any:
        """Accept drafts of [R, width] candidates, at most as many as were verified."""
        found = super()._accept_block(candidates=candidates, **kwargs)  # type: ignore[misc]
        lengths = None if self._ragged is None else self._ragged.lengths
        if lengths is None:
            return found
        accepted, _, bonus, _, _ = found
        accepted, bonus = cut(candidates, accepted, bonus, lengths)
        tokens, commit_lens = _commit_accept(candidates, accepted, bonus)
        return accepted, commit_lens, bonus, tokens, None

    def spec_ext_settle(self, step: Step) -> None:
        """See SpecExtWorker."""
        if self._ragged is not None:
            self._ragged.settle(step)

    def _append_target_hidden_to_draft_kv_by_loc(self, **kwargs: Any) -> None:
        """Project the target's hidden states [N, H] into the draft's K/V; at K = 0 the backlog takes them."""
        if self.spec_ext_backlog is None or int(self.block_size) > 1:  # a step at K = 0 is one of block size 1
            super()._append_target_hidden_to_draft_kv_by_loc(**kwargs)  # type: ignore[misc]
            return
        hidden, locs, positions = (kwargs[name] for name in ("target_hidden", "cache_loc", "positions"))
        self.spec_ext_backlog.add(hidden[: len(locs)], locs, positions)  # padding may follow

    def spec_ext_write(self, reqs: Sequence[Any], rows: list[Row]) -> None:
        """See SpecExtWorker."""
        hidden, locs, positions = joined(rows)
        super()._append_target_hidden_to_draft_kv_by_loc(  # type: ignore[misc]
            target_hidden=hidden, cache_loc=locs, positions=positions
        )

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; on a prefill server, draft the block that decode verifies first."""
        result = super().forward_batch_generation(batch, *args, **kwargs)
        if self._first_blocks is not None and batch.forward_mode.is_extend():
            self._first_blocks.draft(batch, result.next_draft_input)
        return result
