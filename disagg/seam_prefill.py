"""Seams on prefill: what the worker drafted goes into the record that travels with the KV."""

import time
from typing import Any

from sglang_spec_ext.disagg import builders
from sglang_spec_ext.disagg.first_block import FIRST_BLOCK
from sglang_spec_ext.disagg.handshake import EAGLE_ALGORITHMS
from sglang_spec_ext.disagg.session import current_session, handed_request

BLOCK_ARRAYS = "spec_ext_block_arrays"


def before_prefill_result(_scheduler: Any, batch: Any, result: Any) -> None:
    """BEFORE process_batch_result_disagg_prefill: keep each finished request's first block on the request.

    The worker left them on the draft input as FIRST_BLOCK, a PackedBlocks of the whole batch;
    SGLang calls `set_buf` inside the function that this precedes, or later for an optimistic prefill.
    """
    packed = getattr(result.next_draft_input, FIRST_BLOCK, None)
    if current_session() is None or packed is None:
        return
    for req, arrays in zip(batch.reqs, packed.arrays(), strict=True):
        if req.inflight_middle_chunks <= 0:
            setattr(req, BLOCK_ARRAYS, arrays)


def after_requeue(_result: None, _scheduler: Any, req: Any) -> None:
    """AFTER optimistic_release_and_requeue: the prompt will be processed, and its block drafted, again."""
    req.__dict__.pop(BLOCK_ARRAYS, None)


def around_set_buf(original: Any, buffers: Any, req: Any) -> None:
    """AROUND MetadataBuffers.set_buf: write SGLang's row, then ours in the same slot.

    SGLang's top-k row has 16 entries and its copy of more raises inside the scheduler (bug class of
    sglang#10059); the record carries any number, so SGLang's draft state is left out in that case.
    """
    session = current_session()
    if session is None:
        original(buffers, req)
        return
    hidden = req.hidden_states_tensor
    too_long = hidden is not None and req.output_topk_p.size(0) > buffers.output_topk_p.shape[1]
    try:
        if too_long:
            req.hidden_states_tensor = None
        original(buffers, req)
    finally:
        req.hidden_states_tensor = hidden
    from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST

    if req.bootstrap_host == FAKE_BOOTSTRAP_HOST or req.bootstrap_room is None:
        return  # a warm-up request without a peer
    if session.capability.algorithm in EAGLE_ALGORITHMS:
        arrays = builders.eagle_arrays(req)
    else:
        arrays = req.__dict__.pop(BLOCK_ARRAYS, None)
    if arrays is None:
        session.counters.records_missing["not_packed"] += 1
    session.pack(req.metadata_buffer_index, handed_request(req, int(req.output_ids[0])), arrays or {})


def before_inflight_queue(_scheduler: Any, *_args: Any, **_kwargs: Any) -> None:
    """BEFORE process_disagg_prefill_inflight_queue: answer the decode servers that ask for records."""
    session = current_session()
    if session is not None and session.publisher is not None:
        session.publisher.pump(time.monotonic())
