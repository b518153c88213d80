"""Every symbol of SGLang's disaggregation that the record path touches, as a table.

The functions follow SGLang's hook forms: `before(*args)`, `after(result, *args)`, `around(original,
*args)`. Each does nothing in a process without a session, so a row may be installed wherever its module is
loaded. Pure: rows name their functions as "module:attribute". Read against 0.5.23.
"""

from typing import NamedTuple


class SeamRow(NamedTuple):
    """One touched symbol of SGLang; the fields are those of `hooks.Hook`."""

    target: str
    kind: str
    hook: str
    why: str
    remove_when: str
    params: tuple[str, ...] = ()
    upstream: str = ""


_DISAGG = "sglang.srt.disaggregation"
_COMMON = f"{_DISAGG}.common.conn"
_DSPARK = "sglang.srt.speculative.dspark_components"
_HERE = "sglang_spec_ext.disagg"
_ROWS_UPSTREAM = "https://github.com/sgl-project/sglang/pull/31466"
_PLUGIN_AUX = "SGLang lets a plugin register metadata buffers"
_HOST_MEMORY = "SGLang's transfer back ends ask where the pools are"
_CHECKED = "SGLang compares the metadata layout of both servers"

SEAMS = (
    SeamRow(
        "sglang.srt.managers.scheduler.Scheduler.init_disaggregation",
        "before",
        f"{_HERE}.seam_setup:before_init_disaggregation",
        "knows model, draft and algorithm of the buffers that are made next",
        _PLUGIN_AUX,
        ("self",),
    ),
    SeamRow(
        f"{_DISAGG}.utils.MetadataBuffers.__init__",
        "after",
        f"{_HERE}.seam_setup:after_buffers_init",
        "allocates one row per slot of SGLang's own",
        _PLUGIN_AUX,
        ("self", "size"),
        _ROWS_UPSTREAM,
    ),
    SeamRow(
        f"{_DISAGG}.utils.MetadataBuffers.get_buf_infos",
        "after",
        f"{_HERE}.seam_setup:after_buf_infos",
        "appends the row buffer last: peers pair buffers by position",
        _PLUGIN_AUX,
        ("self",),
        _ROWS_UPSTREAM,
    ),
    SeamRow(
        f"{_DISAGG}.utils.MetadataBuffers.set_buf",
        "around",
        f"{_HERE}.seam_prefill:around_set_buf",
        "writes the record; lifts the limit of 16 top-k entries",
        _PLUGIN_AUX,
        ("self", "req"),
        "https://github.com/sgl-project/sglang/issues/10059",
    ),
    SeamRow(
        f"{_DISAGG}.utils.MetadataBuffers.clear_slot",
        "after",
        f"{_HERE}.seam_setup:after_clear_slot",
        "SGLang clears only the room; a late reader must not find the last owner's draft state",
        "SGLang clears the whole row",
        ("self", "idx"),
        "https://github.com/sgl-project/sglang/pull/27374",
    ),
    SeamRow(
        f"{_DISAGG}.utils.ReqToMetadataIdxAllocator",
        "replace",
        f"{_HERE}.slots:CheckedIndexAllocator",
        "a slot freed twice has two owners",
        "SGLang's allocator checks what is freed",
        ("size",),
        "https://github.com/sgl-project/sglang/pull/18822",
    ),
    SeamRow(
        f"{_DISAGG}.utils._apply_metadata_gate",
        "after",
        f"{_HERE}.seam_decode:after_metadata_gate",
        "waits a moment for a sidecar record that is behind its KV",
        _PLUGIN_AUX,
        ("polls", "decode_reqs", "metadata_buffers"),
    ),
    SeamRow(
        f"{_DISAGG}.prefill.SchedulerDisaggregationPrefillMixin.process_batch_result_disagg_prefill",
        "before",
        f"{_HERE}.seam_prefill:before_prefill_result",
        "keeps the first block that the worker drafted; SGLang ships none for DFLASH and DSPARK",
        "SGLang ships block draft state",
        ("self", "batch", "result"),
        _ROWS_UPSTREAM,
    ),
    SeamRow(
        "sglang.srt.models.dspark.DSparkDraftModel.prune_to_ctx_kv_injection",
        "around",
        f"{_HERE}.first_block:around_prune",
        "keeps the draft whole on prefill, which needs it to draft the first block",
        "SGLang ships block draft state",
        ("self",),
        _ROWS_UPSTREAM,
    ),
    SeamRow(
        f"{_DSPARK}.dspark_worker_v2.DSparkWorkerV2._forward_prefill",
        "after",
        f"{_HERE}.first_block:after_forward_prefill",
        "drafts the first block on prefill",
        "SGLang ships block draft state",
        ("self", "batch"),
        _ROWS_UPSTREAM,
    ),
    SeamRow(
        f"{_DSPARK}.dspark_draft.DraftBlockProposer.propose",
        "around",
        f"{_HERE}.first_block:around_propose",
        "verifies the shipped block in decode's first step instead of drafting",
        "SGLang ships block draft state",
        ("self", "batch", "draft_input", "bs", "device", "sampling_info", "anchor_prepared"),
        _ROWS_UPSTREAM,
    ),
    SeamRow(
        f"{_DISAGG}.prefill.SchedulerDisaggregationPrefillMixin.optimistic_release_and_requeue",
        "after",
        f"{_HERE}.seam_prefill:after_requeue",
        "drops the first block of a prompt that will be processed again",
        "SGLang ships block draft state",
        ("self", "req"),
    ),
    SeamRow(
        f"{_DISAGG}.prefill.SchedulerDisaggregationPrefillMixin.process_disagg_prefill_inflight_queue",
        "before",
        f"{_HERE}.seam_prefill:before_inflight_queue",
        "answers decode servers over the sidecar",
        _PLUGIN_AUX,
        ("self",),
    ),
    SeamRow(
        f"{_DISAGG}.decode.DecodeTransferQueue._commit_transfer_to_req",
        "around",
        f"{_HERE}.seam_decode:around_commit",
        "reads and checks the record; SGLang's 14-tuple has no room for it",
        _PLUGIN_AUX,
        ("self", "decode_req"),
    ),
    SeamRow(
        f"{_DISAGG}.decode.DecodeTransferQueue.pop_transferred",
        "around",
        f"{_HERE}.seam_decode:around_pop_transferred",
        "lets all ranks agree on which requests start warm",
        _PLUGIN_AUX,
        ("self",),
        "https://github.com/sgl-project/sglang/issues/32527",
    ),
    SeamRow(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "after",
        f"{_HERE}.seam_decode:after_resolve_tokens",
        "counts the accept length of the first decode step, warm and cold apart",
        "SGLang reports it per step",
        ("self", "result", "batch"),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVBootstrapServer._setup_routes",
        "after",
        f"{_HERE}.seam_peers:after_setup_routes",
        "adds a route of our own; a new key in /route breaks stock decode servers",
        _CHECKED,
        ("self",),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVManager.register_to_bootstrap",
        "around",
        f"{_HERE}.seam_peers:around_register",
        "publishes what prefill runs",
        _CHECKED,
        ("self",),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVManager.try_ensure_parallel_info",
        "around",
        f"{_HERE}.seam_peers:around_ensure_info",
        "judges a prefill server when it is first met",
        _CHECKED,
        ("self", "bootstrap_addr"),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVManager.check_peer_aux_buffer_count",
        "around",
        f"{_HERE}.seam_peers:around_buffer_count",
        "logs an error for each peer from which the row buffer is hidden",
        _CHECKED,
        ("self", "peer", "num_remote"),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVReceiver.init",
        "around",
        f"{_HERE}.seam_peers:around_receiver_init",
        "fails a refused peer's request at once; raising in SGLang's own check would end the scheduler",
        _CHECKED,
        ("self", "prefill_dp_rank"),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVReceiver.clear",
        "after",
        f"{_HERE}.seam_decode:after_receiver_clear",
        "stops waiting for the sidecar record of a request that ended",
        _PLUGIN_AUX,
        ("self",),
    ),
    SeamRow(
        f"{_COMMON}.CommonKVReceiver._register_kv_args",
        "around",
        f"{_HERE}.seam_peers:around_register_kv_args",
        "hides the row buffer from a peer that differs, and moves its hidden row out of the way",
        _CHECKED,
        ("self",),
        "https://github.com/sgl-project/sglang/pull/33877",
    ),
)

# for servers on the CPU platform, with or without records
CPU_SEAMS = (
    SeamRow(
        f"{_DISAGG}.utils.get_kv_class",
        "after",
        f"{_HERE}.cpu_transport:after_get_kv_class",
        "NIXL registers KV as device memory, Mooncake's sender needs a CUDA event",
        _HOST_MEMORY,
        ("transfer_backend", "class_type"),
    ),
    SeamRow(
        f"{_DISAGG}.prefill.SchedulerDisaggregationPrefillMixin.maybe_send_cached_prefix_chunk",
        "around",
        f"{_HERE}.cpu_transport:around_early_send",
        "records a CUDA event",
        _HOST_MEMORY,
        ("self",),
    ),
)
