"""Attention of the CPU reference platform: every forward mode of SGLang in plain torch.

Serves decode, extend (chunked, with a cached prefix), target verify (uniform or ragged), the non-causal
draft block of DFlash and DSpark, draft extend, and the multi-step EAGLE draft. K and V are read from SGLang's
paged pool through `req_to_token`; attention_geometry.py says which requests share a call.
Interface: `sglang/srt/layers/attention/base_attn_backend.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.speculative.ragged_verify import resolve_ragged_verify_layout

from sglang_spec_ext.cpu.attention_geometry import Call, Calls, plan_calls


class TorchSpecAttention(AttentionBackend):
    """The attention back end named `torch_spec`.

    `draft_step` is None for the target and for draft extend; the EAGLE multi-step draft gives each of its
    steps a back end of its own, whose requests read `seq_len + draft_step + 1` rows.
    """

    def __init__(self, runner: Any, *, draft_step: int | None = None) -> None:
        super().__init__()
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.draft_step = draft_step
        self.calls: Calls | None = None

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Work out the calls of this forward; every layer reuses them."""
        self.calls = None
        if forward_batch.forward_mode.is_idle() or forward_batch.batch_size == 0:
            return
        q_lens, kv_lens = self._lengths(forward_batch)
        kv_max = max(kv_lens)
        rows = forward_batch.req_pool_indices[: len(q_lens)].long()
        slots = self.req_to_token_pool.req_to_token[rows, :kv_max].long()
        if min(kv_lens) != kv_max:
            slots *= torch.arange(kv_max) < torch.tensor(kv_lens)[:, None]
        self.calls = plan_calls(q_lens, kv_lens, slots, _trees(forward_batch, q_lens, kv_lens))

    def _lengths(self, forward_batch: ForwardBatch) -> tuple[list[int], list[int]]:
        mode = forward_batch.forward_mode
        seq_lens = forward_batch.seq_lens[: forward_batch.batch_size].tolist()
        if mode.is_decode():
            ahead = 0 if self.draft_step is None else self.draft_step + 1
            return [1] * len(seq_lens), [n + ahead for n in seq_lens]
        if mode.is_target_verify():
            layout = resolve_ragged_verify_layout(forward_batch)
            if layout is None:
                q_lens = [int(forward_batch.spec_info.draft_token_num)] * len(seq_lens)
            else:
                q_lens = layout.verify_lens[: len(seq_lens)].tolist()
            return q_lens, [n + q for n, q in zip(seq_lens, q_lens, strict=True)]
        q_lens = forward_batch.extend_seq_lens.tolist()
        prefix_lens = forward_batch.extend_prefix_lens.tolist()
        return q_lens, [p + q for p, q in zip(prefix_lens, q_lens, strict=True)]

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Attend [tokens, heads * head_dim] queries; write `k` and `v` to the pool first when given."""
        if layer.logit_cap > 0 or layer.is_cross_attention or kwargs:
            raise NotImplementedError(
                "the CPU reference platform serves plain decoder attention; this model asks for "
                f"logit_cap={layer.logit_cap}, cross_attention={layer.is_cross_attention}, {sorted(kwargs)}"
            )
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        if self.calls is None or not self.calls.live:
            return q.new_zeros(q.shape[0], layer.tp_q_head_num * layer.v_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        live, back = self.calls.live, self.calls.back
        queries = q[:live].view(live, layer.tp_q_head_num, -1)
        outs = [_attend(queries, keys, values, layer, call) for call in self.calls.calls]
        out = outs[0] if back is None else torch.cat(outs).index_select(0, back)
        if live == q.shape[0]:
            return out
        # rows beyond the live ones pad the batch to what another rank runs
        return F.pad(out, (0, 0, 0, q.shape[0] - live))

    forward_decode = forward_extend

    def support_triton(self) -> bool:
        """SGLang's helper kernels must take their torch form."""
        return False

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Sequence length of a padding request."""
        return 1

    get_cpu_graph_seq_len_fill_value = get_cuda_graph_seq_len_fill_value


class TorchSpecMultiStepDraft:
    """The EAGLE multi-step draft: one back end for each draft step after the first.

    Interface: `draft_utils.DraftBackendFactory.create_decode_backend`.
    """

    def __init__(self, runner: Any, topk: int, num_steps: int) -> None:
        self.topk = topk
        self.speculative_num_steps = num_steps
        self.attn_backends = [TorchSpecAttention(runner, draft_step=step) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare every step; they differ only in how many draft tokens they see."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: RadixAttention, call: Call
) -> torch.Tensor:
    """Attend the requests of one call; q [tokens, heads, d] holds the queries of the whole forward.

    Query heads that share a K/V head become extra query rows, so that K and V are read once per group:
    [bs, kv_heads, group * q_max, d].
    """
    geometry = call.geometry
    if call.rows is not None:
        q = q.index_select(0, call.rows)
    bs, kv_max = geometry.slots.shape
    q_max = max(geometry.q_lens)
    kv_heads, heads = keys.shape[1], q.shape[1]
    group = heads // kv_heads
    if geometry.gather_rows is not None:
        q = q[geometry.gather_rows.reshape(-1)]
    k = keys.view(keys.shape[0], -1).index_select(0, geometry.flat_slots).view(bs, kv_max, kv_heads, -1)
    v = values.view(values.shape[0], -1).index_select(0, geometry.flat_slots).view(bs, kv_max, kv_heads, -1)
    grouped = q.view(bs, q_max, kv_heads, group, -1).permute(0, 2, 3, 1, 4).reshape(bs, kv_heads, group * q_max, -1)
    out = F.scaled_dot_product_attention(
        grouped,
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=geometry.mask(_is_causal(layer), layer.sliding_window_size, group, q.dtype),
        scale=layer.scaling,
    )
    out = out.view(bs, kv_heads, group, q_max, -1).permute(0, 3, 1, 2, 4).reshape(bs * q_max, -1)
    return out if geometry.scatter_rows is None else out.index_select(0, geometry.scatter_rows)


def _trees(forward_batch: ForwardBatch, q_lens: Sequence[int], kv_lens: Sequence[int]) -> list[torch.Tensor] | None:
    """Cut the flat tree mask of a verify batch into one [q, kv] bool matrix a request; None for a chain.

    Layout: `spec_tree.TreeMaskMode.FULL_MASK`, for each request its n rows of seq_len + n entries.
    """
    spec_info = forward_batch.spec_info
    if not forward_batch.forward_mode.is_target_verify() or getattr(spec_info, "tree_topk", 1) == 1:
        return None
    sizes = [q * kv for q, kv in zip(q_lens, kv_lens, strict=True)]
    pieces = spec_info.custom_mask[: sum(sizes)].bool().split(sizes)
    return [piece.view(q, kv) for piece, q, kv in zip(pieces, q_lens, kv_lens, strict=True)]


def _is_causal(layer: RadixAttention) -> bool:
    # the draft block of DFlash and DSpark is encoder-only: every position of the block sees the others
    return layer.attn_type == AttentionType.DECODER
