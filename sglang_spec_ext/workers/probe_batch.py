"""A decode batch of synthetic requests on SGLang's real path, for measuring a step again and again.

The batch stands before its first decode step; a step runs inside the scheduler's own isolation, which undoes
what it changed, so every repetition is the same step at the same context length.
"""

import random
from array import array
from typing import Any

from sglang_spec_ext.workers.extended import SpecExtWorker

PREFILL_TOKENS = 2048  # of prompts that are prefilled together
FIRST_TOKEN = 3  # below lie the special tokens of most vocabularies


class ProbeBatch:
    """`size` requests with `context_len` tokens each; at most one exists at a time."""

    def __init__(self, scheduler: Any, *, size: int, context_len: int) -> None:
        self._scheduler = scheduler
        self._worker: SpecExtWorker = scheduler.draft_worker
        rng = random.Random(size)  # noqa: S311 - filler, nothing secret
        group = max(1, PREFILL_TOKENS // context_len)
        reqs = [self._request(index, rng, context_len) for index in range(size)]
        self._batch = self._prefill(reqs[:group])
        for start in range(group, size, group):
            self._batch.merge_batch(self._prefill(reqs[start : start + group]))
        self._batch.prepare_for_decode()

    def _request(self, index: int, rng: random.Random, context_len: int) -> Any:
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        vocabulary = self._scheduler.model_config.vocab_size
        ids = array(
            "q", (rng.randrange(min(FIRST_TOKEN, vocabulary - 1), vocabulary) for _ in range(context_len))
        )
        params = SamplingParams(temperature=0.0, max_new_tokens=1 << 20, ignore_eos=True)
        params.normalize(None)
        req = Req(
            rid=f"spec-ext-profile-{index}",
            origin_input_text="",
            origin_input_ids=ids,
            sampling_params=params,
            vocab_size=vocabulary,
        )
        req.full_untruncated_fill_ids = ids
        req.extend_end = len(ids)
        req.logprob_start_len = -1
        return req

    def _prefill(self, reqs: list[Any]) -> Any:
        from sglang.srt.managers.overlap_utils import resolve_forward_inputs
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        scheduler = self._scheduler
        batch = ScheduleBatch.init_new(
            reqs,
            scheduler.req_to_token_pool,
            scheduler.token_to_kv_pool_allocator,
            scheduler.tree_cache,
            scheduler.model_config,
            False,  # without overlap the draft input is handed on directly
            scheduler.spec_algorithm,
        )
        batch.forward_iter = scheduler.forward_ct
        batch.prepare_for_extend()
        self._meet(batch)
        resolve_forward_inputs(batch, scheduler.future_map)
        with scheduler._forward_isolation(batch, overlap=False):
            result = self._worker.forward_batch_generation(batch)
        batch.spec_info = result.next_draft_input
        batch.input_ids = None
        for req, token in zip(reqs, result.next_token_ids.tolist(), strict=True):
            req.output_ids.append(token)
        return batch

    def _meet(self, batch: Any) -> None:
        """Tell the other ranks the size of this one's batch, where attention data parallelism needs it."""
        met = self._scheduler.dp_attn_adapter.maybe_prepare_mlp_sync_batch(batch)
        assert met is batch, "every rank measures the same batch"

    def run(self) -> Any:
        """Run the step once, as the worker's loop decides, and return its result."""
        self._meet(self._batch)
        with self._scheduler._forward_isolation(self._batch, overlap=False):
            return self._worker.forward_batch_generation(self._batch)

    def release(self) -> None:
        """Give every slot back; nothing else runs yet, so the pools are emptied."""
        scheduler = self._scheduler
        scheduler.tree_cache.reset()
        scheduler.req_to_token_pool.clear()
        scheduler.token_to_kv_pool_allocator.clear()
        scheduler.req_to_token_pool.reset_aux_cache_allocator()
