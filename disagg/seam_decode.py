"""Seams on decode: read the record, let the ranks agree, and start the request warm or cold."""

import time
from typing import Any

from sglang_spec_ext.disagg import builders
from sglang_spec_ext.disagg.handshake import EAGLE_ALGORITHMS, Standing
from sglang_spec_ext.disagg.record import DraftRecord
from sglang_spec_ext.disagg.seam_peers import verdict_of
from sglang_spec_ext.disagg.session import PdSession, current_session, handed_request

NO_EXTENSION = "no_extension"
HANDOFF = "spec_ext_handoff"  # (record or None, whether a stock peer's draft state is kept)


def after_metadata_gate(_result: None, polls: list[int], decode_reqs: Any, _buffers: Any) -> None:
    """AFTER _apply_metadata_gate: let a finished transfer wait `late_grace_s` for its sidecar record.

    Runs before SGLang takes the minimum over the ranks, so all ranks wait together.
    """
    from sglang.srt.disaggregation.base import KVPoll

    session = current_session()
    if session is None or session.subscriber is None:
        return
    now = time.monotonic()
    for row, decode_req in enumerate(decode_reqs):
        verdict = verdict_of(getattr(decode_req.kv_receiver, "prefill_info", None))
        is_warm = verdict is not None and verdict.standing is Standing.WARM
        if polls[row] != int(KVPoll.Success) or not is_warm:
            continue
        if session.subscriber.has(decode_req.req.bootstrap_room):
            continue
        since = decode_req.__dict__.setdefault("spec_ext_done_at", now)
        if now - since < session.options.late_grace_s:
            polls[row] = int(KVPoll.Transferring)


def after_receiver_clear(_result: None, receiver: Any) -> None:
    """AFTER CommonKVReceiver.clear: the request is over, however it ended; its record is not waited for."""
    session = current_session()
    if session is not None and session.subscriber is not None:
        session.subscriber.forget(receiver.bootstrap_room)


def around_commit(original: Any, queue: Any, decode_req: Any) -> None:
    """AROUND DecodeTransferQueue._commit_transfer_to_req: read our row before SGLang takes over."""
    session, req = current_session(), decode_req.req
    info = getattr(decode_req.kv_receiver, "prefill_info", None)  # None: a warm-up request without a peer
    if session is None or info is None:
        original(queue, decode_req)
        return
    slot, verdict = decode_req.metadata_buffer_index, verdict_of(info)
    record = None
    if decode_req.is_rebootstrap:  # prefill recomputed another prompt, prefix and generated tokens together
        session.counters.records_missing["rebootstrap"] += 1
    else:
        anchor = int(queue.metadata_buffers.output_ids[slot][0])
        record = session.collect(slot, handed_request(req, anchor), verdict)
    told_at = decode_req.kv_receiver.init_time  # when prefill was told where to write, by time.time()
    if told_at is not None:
        session.counters.transfer_seconds += max(0.0, time.time() - told_at)
    original(queue, decode_req)
    keeps_stock = verdict is not None and NO_EXTENSION in verdict.reasons
    setattr(req, HANDOFF, (record, keeps_stock))


def around_pop_transferred(original: Any, queue: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """AROUND DecodeTransferQueue.pop_transferred: take in sidecar records, then agree on who starts warm.

    A record that one tensor-parallel rank refused is used by none: drafts must be equal on all ranks.
    """
    session = current_session()
    if session is not None and session.subscriber is not None:
        session.subscriber.pump()
    arrived: list[Any] = original(queue, *args, **kwargs)
    # a warm-up request without a peer has no handoff, on no rank
    reqs = [req for req in arrived if HANDOFF in req.__dict__]
    if session is None or not reqs:
        return arrived
    from sglang.srt.disaggregation.utils import all_reduce_flags
    from torch.distributed import ReduceOp

    handoffs = [req.__dict__.pop(HANDOFF) for req in reqs]
    usable = [int(_is_usable(session, record)) for record, _ in handoffs]
    agreed = all_reduce_flags(usable, queue.gloo_group, ReduceOp.MIN)
    for req, (record, keeps_stock), ours, warm in zip(reqs, handoffs, usable, agreed, strict=True):
        if warm:
            start_warm(session, req, record)
        else:
            if ours:
                session.counters.records_missing["peer_rank"] += 1
            start_cold(session, req, keeps_stock=keeps_stock)
    return arrived


def _is_usable(session: PdSession, record: DraftRecord | None) -> bool:
    if record is None:
        return False
    try:
        builders.check_values(record, vocab_size=session.capability.vocab_size)
        if session.capability.algorithm in EAGLE_ALGORITHMS:
            builders.check_eagle(record, num_topk=session.capability.topk_entries)
    except builders.UnusableValueError as error:
        session.refuse(error)
        return False
    return True


def start_warm(session: PdSession, req: Any, record: DraftRecord) -> None:
    """Hand the record's draft state to the request, and its prior to the controller."""
    req.spec_ext_warm = req.spec_ext_first_step = True
    if session.capability.algorithm in EAGLE_ALGORITHMS:
        builders.warm_eagle(req, record)
    elif record.block_ids.size:
        builders.FirstBlocks.put(req, record)
    session.absorb(record)


def start_cold(session: PdSession, req: Any, *, keeps_stock: bool) -> None:
    """Start without a record. Only what a stock peer sent is kept, and only where it has SGLang's width."""
    req.spec_ext_warm = req.spec_ext_first_step = False
    capability = session.capability
    if capability.algorithm not in EAGLE_ALGORITHMS:
        return
    num_topk = capability.topk_entries
    if not keeps_stock or num_topk > req.output_topk_p.size(0):
        builders.cold_eagle(req, num_topk=num_topk)


def after_resolve_tokens(_tokens: Any, _processor: Any, result: Any, batch: Any) -> None:
    """AFTER _resolve_spec_v2_tokens: count the accept length of each request's first decode step."""
    session = current_session()
    if session is None:
        return
    for row, req in enumerate(batch.reqs):
        warm = req.__dict__.pop("spec_ext_first_step", None)
        if warm is not None:
            session.counters.note_first_step(int(result.accept_lens[row]), warm=warm)
            session.counted()
