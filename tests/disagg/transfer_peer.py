"""One side of SGLang's real transfer path without a model, driven by JSON lines; run by test_transfer.py.

    python transfer_peer.py prefill|decode   (commands on stdin, answers on
    stdout)

Real: KVManager, KVSender, KVReceiver, bootstrap server, MetadataBuffers, DecodeTransferQueue and the seams of
`disagg.seams`, installed by SGLang's HookRegistry. Stand-ins: the scheduler's attributes and the requests.
"""

import json
import os
import sys
import time
import traceback
import zlib
from types import SimpleNamespace
from unittest.mock import MagicMock

ROLE = sys.argv[1]
SLOTS, HIDDEN, TOPK, VOCAB, KV_SLOTS = 6, 96, 20, 1000, 64
OPTIONS = {}  # of the scenario at hand: stock, transport, policy, key, late_grace_s, capability, stock_hidden, topk
DEADLINE_S = 20.0


def capability(**changes):
    from sglang_spec_ext.disagg.handshake import Capability

    values = {
        "algorithm": "EAGLE3",
        "draft_digest": "draft",
        "num_draft_tokens": 4,
        "topk_entries": TOPK,
        "hidden_width": HIDDEN,
        "hidden_dtype": "bfloat16",
        "tap_layers": (1, 2, 3),
        "vocab_size": VOCAB,
        "transport": OPTIONS.get("transport", "aux"),
    }
    return Capability(**(values | changes))


def install_seams():
    import pkgutil

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang_spec_ext.disagg.seams import CPU_SEAMS, SEAMS

    rows = (*SEAMS, *CPU_SEAMS)
    for row in rows:
        HookRegistry.register(row.target, pkgutil.resolve_name(row.hook), HookType(row.kind))
    HookRegistry.apply_hooks()
    missing = {row.target for row in rows} - HookRegistry._patched
    assert not missing, missing


def make_session():
    from sglang_spec_ext.disagg.counters import PdCounters
    from sglang_spec_ext.disagg.handshake import MismatchPolicy
    from sglang_spec_ext.disagg.session import PdOptions, PdSession

    options = PdOptions(
        transport=OPTIONS.get("transport", "aux"),
        policy=MismatchPolicy(OPTIONS.get("policy", "degrade")),
        key=OPTIONS["key"].encode() if "key" in OPTIONS else None,
        late_grace_s=OPTIONS.get("late_grace_s", PdOptions().late_grace_s),
    )
    ours = capability(**OPTIONS.get("capability", {}))
    return PdSession(ours, role=ROLE, num_slots=SLOTS, options=options, counters=PdCounters())


class Peer:
    """What a scheduler holds, without the scheduler."""

    def __init__(self):
        import torch
        from sglang.srt.runtime_context import get_context, get_parallel

        install_seams()
        os.environ["MC_FORCE_TCP"] = "1"  # what SGLang's mooncake_tcp sets
        self.server_args = (
            get_context()
            .override_server_args(
                host="127.0.0.1",
                port=39999,
                device="cpu",
                disaggregation_mode=ROLE,
            )
            .install()
        )
        names = ("tp_rank", "pp_rank", "attn_tp_rank", "attn_cp_rank", "attn_dp_rank", "attn_dcp_rank")
        get_parallel().override_permanently(**dict.fromkeys(names, 0), dp_rank=None, pp_group=None)
        get_context().config_bag("device")._set("gpu_id", 0)
        from sglang.srt.disaggregation import utils

        self.utils = utils
        self.registered = []  # Mooncake's engine is one per process and never forgets: keep what it knows
        if ROLE == "decode":
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)

    def do_start(self, backend, port, options):
        """Become a new server: buffers, session, manager, and prefill's bootstrap server on `port`.

        With the option `stock` there is no session, and every seam leaves SGLang as it is.
        """
        import torch
        from sglang.srt.runtime_context import get_context
        from sglang_spec_ext.disagg.session import install_session

        OPTIONS.clear()
        OPTIONS.update(options)
        self.port, self.backend = port, self.utils.TransferBackend(backend)
        if backend == "mooncake":
            from sglang.srt.distributed.device_communicators.mooncake_transfer_engine import (
                get_mooncake_transfer_engine,
                init_mooncake_transfer_engine,
            )

            if get_mooncake_transfer_engine() is None:
                init_mooncake_transfer_engine(hostname="127.0.0.1", gpu_id=0)
        disagg = get_context().config_bag("disagg")
        disagg._set("disaggregation_bootstrap_port", port)
        disagg._set("disaggregation_transfer_backend", backend)
        if ROLE == "prefill":
            self.kv_class("BOOTSTRAP_SERVER")(host="127.0.0.1", port=port)
        self.kv = [torch.zeros((KV_SLOTS, 128)) for _ in range(4)]
        self.allocator = self.utils.ReqToMetadataIdxAllocator(SLOTS)
        self.buffers = self.utils.MetadataBuffers(
            SLOTS,
            hidden_size=OPTIONS.get("stock_hidden", HIDDEN),
            hidden_states_dtype=torch.bfloat16,
            max_sampling_mask_tokens=16,
        )
        self.session = None if OPTIONS.get("stock") else make_session()
        install_session(self.session)
        self.registered.append((self.kv, self.buffers, self.session))
        self.manager = self.kv_class("MANAGER")(
            self.kv_args(), self.utils.DisaggregationMode(ROLE), self.server_args, False
        )
        self.requests = {}
        if ROLE == "decode":
            self.open_queue()

    def kv_class(self, name):
        return self.utils.get_kv_class(self.backend, self.utils.KVClassType[name])

    def kv_args(self):
        from sglang.srt.disaggregation.base import KVArgs

        args = KVArgs()
        args.engine_rank = args.pp_rank = args.system_dp_rank = args.gpu_id = 0
        args.kv_cache_dtype_str, args.page_size, args.ib_device, args.kv_layout = "auto", 1, None, None
        args.kv_data_ptrs = [tensor.data_ptr() for tensor in self.kv]
        args.kv_data_lens = [tensor.nbytes for tensor in self.kv]
        args.kv_item_lens = [tensor[0].nbytes for tensor in self.kv]
        args.kv_layer_ids, args.num_draft_entries, args.kv_head_num, args.total_kv_head_num = [], 0, 2, 2
        args.prefill_start_layer, args.prefill_end_layer, args.rust_http_port = 0, 2, None
        args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = self.buffers.get_buf_infos()
        for name in (
            "types",
            "data_ptrs",
            "data_lens",
            "item_lens",
            "layer_ids",
            "dim_per_tensor",
            "slice_outer_counts",
            "conv_shard_groups",
        ):
            setattr(args, f"state_{name}", [])
        args.is_hybrid_mla_backend, args.swa_kv_cache_layout, args.mla_compression_ratios = False, None, None
        return args

    def open_queue(self):
        import torch
        from sglang.srt.disaggregation.decode import DecodeTransferQueue

        self.queue = DecodeTransferQueue.__new__(DecodeTransferQueue)
        scheduler = MagicMock(kv_checksum_computer=None, enable_decode_hicache=False, enable_hisparse=False)
        self.queue.__dict__.update(
            queue=[],
            gloo_group=torch.distributed.group.WORLD,
            metadata_buffers=self.buffers,
            tp_rank=0,
            req_to_metadata_buffer_idx_allocator=self.allocator,
            scheduler=scheduler,
            tree_cache=MagicMock(),
            spec_algorithm=SimpleNamespace(is_none=lambda: False),
            enable_staging=False,
            _deferred_releases=[],
            enable_deferred_kv_release=False,
            enable_host_receive=False,
        )
        self.queue._release_request = lambda _decode_req: None  # there is no KV pool to give back to
        self.queue._clean_hicache_prefetch_resources = lambda _decode_req: None

    def command(self, name, **arguments):
        return getattr(self, f"do_{name}")(**arguments)

    def do_republish(self, schema_version=None, **changes):
        """Let prefill publish another capability, and write rows of it."""
        from sglang_spec_ext.disagg import handshake, peers
        from sglang_spec_ext.disagg.record import RecordCodec

        self.session.capability = capability(**changes)
        body = handshake.encode_answer(
            self.session.capability, self.session.stock_rows, schema_version=schema_version or 1
        )
        peers.publish_answer(f"http://127.0.0.1:{self.port}", "0.0.0.0", body)
        if self.session.codec.row_bytes == self.session.capability.schema().row_bytes:
            self.session.codec = RecordCodec(self.session.capability.schema())

    def do_meet_again(self):
        """Let decode forget the prefill server, as after a lost heartbeat."""
        self.manager.prefill_info_table.clear()
        self.manager.connection_pool.clear()

    def do_open(self, room, ids):
        """Open the room on this side; on decode with the handshake, as DecodePreallocQueue does."""
        address = f"127.0.0.1:{self.port}"
        if ROLE == "prefill":
            sender = self.kv_class("SENDER")(self.manager, address, room)
            self.requests[room] = (make_request(room, ids), sender)
            return
        end = time.monotonic() + DEADLINE_S
        while not self.manager.try_ensure_parallel_info(address):
            assert time.monotonic() < end, "no handshake"
            time.sleep(0.05)
        receiver = self.kv_class("RECEIVER")(self.manager, address, room)
        receiver.init(0)
        req = make_request(room, ids)
        req.output_ids = []
        self.requests[room] = (req, receiver)
        return

    def do_accept(self, room):
        """Decode: give the room a slot and tell prefill where to write. False: no slot, ask again later."""
        from sglang.srt.disaggregation.decode import DecodeRequest

        req, receiver = self.requests[room]
        failure = self.wait(receiver, "WaitingForInput")
        if failure is not None:
            return failure
        slot = self.allocator.alloc()
        if slot is None:
            return False
        decode_req = DecodeRequest(req=req, kv_receiver=receiver, metadata_buffer_index=slot)
        import numpy as np

        pages = np.arange(10 * (slot % 5), 10 * (slot % 5) + 10, dtype=np.int32)
        receiver.send_metadata(pages, slot, [], decode_prefix_len=0)
        self.queue.queue.append(decode_req)
        return True

    def do_send(self, room, damage=None):
        """Prefill: wait for decode, write both rows of a slot, send. False: no slot."""
        import numpy as np

        req, sender = self.requests[room]
        failure = self.wait(sender, "WaitingForInput")
        if failure is not None:
            return self.end(room, failure)
        req.metadata_buffer_index = self.allocator.alloc()
        if req.metadata_buffer_index is None:
            return False
        for index, tensor in enumerate(self.kv):
            tensor.fill_(room % 1000 + index)
        sender.init(10, req.metadata_buffer_index)
        self.buffers.set_buf(req)
        if damage is not None:
            self.damage(req.metadata_buffer_index, damage)
        sender.send(np.arange(5, 15, dtype=np.int32))
        failure = self.wait(sender, "Success")
        return self.end(room, failure or "sent")

    def damage(self, slot, kind):
        import numpy as np

        row = self.session.rows.row(slot)
        if kind == "flip":
            row[100] ^= 4
        elif kind == "truncate":
            row[row.size // 2 :] = 0
        elif kind == "blank":
            row[:] = 0
        elif kind == "keep":
            self.kept = row.copy()
        elif kind == "stale":
            row[:] = self.kept
        elif kind in ("bad_token", "bad_hidden"):  # sealed as a buggy writer would
            field = "topk_index" if kind == "bad_token" else "hidden"
            place = next(f for f in self.session.codec.schema.placed_fields if f.spec.name == field)
            row[place.offset : place.offset + 8] = np.frombuffer(b"\xff" * 7 + b"\x7f", np.uint8)
            crc = zlib.crc32(row[64:], zlib.crc32(row[:60]))
            row[60:64] = np.frombuffer(crc.to_bytes(4, "little"), np.uint8)
        else:
            raise ValueError(kind)

    def do_receive(self, room):
        """Decode: poll the transfer queue until the room is over; say how the request starts."""
        req, _ = self.requests[room]
        end = time.monotonic() + DEADLINE_S
        while any(entry.req is req for entry in self.queue.queue):
            assert time.monotonic() < end, f"room {room} never ended"
            self.queue.pop_transferred()
            time.sleep(0.0005)
        del self.requests[room]
        if req.finished_reason is not None:
            return {"failed": str(req.finished_reason.message)}
        right = draft_of(req)
        return {
            "tokens": list(req.output_ids),
            "warm": getattr(req, "spec_ext_warm", None),
            "draft_right": same_draft(req, right),
            "draft_zero": not req.hidden_states_tensor.any().item(),
            "num_topk": req.output_topk_p.numel(),
        }

    def do_end_refused(self, room):
        """Either side: report how a room ended that never got a slot."""
        _, poller = self.requests[room]
        return self.end(room, self.wait(poller, "Success"))

    def do_abort(self, room):
        _, poller = self.requests[room]
        poller.abort()

    def do_state(self):
        session = self.session
        if session is None:
            return {"free": self.allocator.available_size(), "counters": {}, "waiting": 0, "peers": {}}
        counters = {f"{name}.{label}" if label else name: value for name, label, value in session.counters.rows()}
        waiting = len(session.subscriber) if session.subscriber is not None else 0
        free = self.allocator.available_size()
        return {"free": free, "counters": counters, "waiting": waiting, "peers": dict(session.peers)}

    def wait(self, poller, wanted):
        """Poll until `wanted`; return None, or the failure's text."""
        from sglang.srt.disaggregation.base import KVPoll

        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            if self.session is not None and self.session.publisher is not None:
                self.session.publisher.pump(time.monotonic())
            state = poller.poll()
            if state == getattr(KVPoll, wanted):
                return None
            if state == KVPoll.Failed:
                try:
                    poller.failure_exception()
                except Exception as error:  # noqa: BLE001 - SGLang raises what it recorded
                    return str(error)
            time.sleep(0.0005)
        return f"timeout: {poller.poll()}"

    def end(self, room, outcome):
        req, poller = self.requests.pop(room)
        poller.clear()
        if ROLE == "prefill" and req.metadata_buffer_index is not None and req.metadata_buffer_index >= 0:
            self.allocator.free(req.metadata_buffer_index)
        return outcome


def draft_of(req):
    """The draft state that both sides derive from the prompt."""
    import torch

    generator = torch.Generator().manual_seed(sum((i + 1) * token for i, token in enumerate(req.origin_input_ids)))
    hidden = torch.randn(OPTIONS.get("stock_hidden", HIDDEN), generator=generator).to(torch.bfloat16)
    probs, ids = torch.softmax(torch.randn(VOCAB, generator=generator), 0).topk(OPTIONS.get("topk", TOPK))
    return hidden, probs, ids


def same_draft(req, right):
    import torch

    ours = (req.hidden_states_tensor, req.output_topk_p, req.output_topk_index)
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, right, strict=True))


def make_request(room, ids):
    req = SimpleNamespace(
        rid=f"r{room}",
        bootstrap_room=room,
        origin_input_ids=ids,
        output_ids=[ids[-1] + 1],
        bootstrap_host="h",
        metadata_buffer_index=-1,
        cached_tokens=0,
        cached_tokens_device=0,
        cached_tokens_host=0,
        cached_tokens_storage=0,
        return_logprob=False,
        return_sampling_mask=False,
        output_dsa_topk_indices=None,
        finished_reason=None,
        time_stats=MagicMock(),
        get_mm_token_counts=lambda: (0, 0, 0),
    )
    req.hidden_states_tensor, req.output_topk_p, req.output_topk_index = draft_of(req)
    return req


def serve(answers):
    peer = Peer()
    print(json.dumps("up"), file=answers, flush=True)
    for line in sys.stdin:
        try:
            answer = {"ok": peer.command(**json.loads(line))}
        except Exception:  # noqa: BLE001 - told to the test, which fails
            answer = {"error": traceback.format_exc()}
        print(json.dumps(answer), file=answers, flush=True)


def main():
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    try:
        serve(answers)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        os._exit(0)  # the transfer engines' threads never end by themselves


if __name__ == "__main__":
    main()
