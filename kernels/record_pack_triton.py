"""Triton kernels of `record_pack` and `record_unpack`: one launch each way, whatever the number of fields.

A program moves one block of words of one row. Fields are compared with the block at compile-time offsets, so
a block inside one field is a plain copy; the word is the widest that every offset, length and stride allows.
"""

import math
from collections.abc import Mapping, Sequence

import torch
import triton
import triton.language as tl
from sglang_spec_ext.kernels.row_layout import FieldLayout, RowLayout

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_BLOCK = 1024


@triton.jit
def _record_pack_kernel(
    rows_ptr,  # [S, row words] words (updated)
    slots_ptr,  # [R] int32 or int64
    sources,  # per field, [M, words] words
    source_rows,  # per field, [R] int32 or int64, or None: row r
    counts,  # per field, [R] int32 or int64, or None: all entries
    source_strides,  # per field, words
    rows_stride,  # words
    FIRST: tl.constexpr,  # words reserved at the start of a row
    END: tl.constexpr,  # words of a row
    OFFSETS: tl.constexpr,  # per field, words
    LENGTHS: tl.constexpr,  # per field, words in the source
    ENTRIES: tl.constexpr,  # per field, words of one entry
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    words = FIRST + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    value = tl.zeros([BLOCK], rows_ptr.dtype.element_ty)
    for i in tl.static_range(len(OFFSETS)):
        local = words - OFFSETS[i]
        inside = (local >= 0) & (local < LENGTHS[i])
        if counts[i] is not None:
            inside = inside & (local < tl.load(counts[i] + request) * ENTRIES[i])
        source_row = request
        if source_rows[i] is not None:
            source_row = tl.load(source_rows[i] + request).to(tl.int64)
        word = tl.load(
            sources[i] + source_row * source_strides[i] + local, mask=inside & (slot >= 0), other=0
        )
        value = tl.where(inside, word, value)
    tl.store(rows_ptr + slot * rows_stride + words, value, mask=(words < END) & (slot >= 0))


@triton.jit
def _record_unpack_kernel(
    rows_ptr,  # [S, row words] words
    slots_ptr,  # [R] int32 or int64
    outputs,  # per field, [R, words] words (output)
    rows_stride,  # words
    FIRST: tl.constexpr,  # first word of the fields asked for
    OFFSETS: tl.constexpr,  # per field, words
    LENGTHS: tl.constexpr,  # per field, words
    BLOCK: tl.constexpr,
):
    request = tl.program_id(0).to(tl.int64)
    words = FIRST + tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + request).to(tl.int64)
    for i in tl.static_range(len(OFFSETS)):
        local = words - OFFSETS[i]
        inside = (local >= 0) & (local < LENGTHS[i])
        word = tl.load(rows_ptr + slot * rows_stride + words, mask=inside & (slot >= 0), other=0)
        tl.store(outputs[i] + request * LENGTHS[i] + local, word, mask=inside)


def record_pack_triton(
    rows: torch.Tensor,
    layout: RowLayout,
    *,
    slots: torch.Tensor,
    sources: Mapping[str, torch.Tensor],
    source_rows: Mapping[str, torch.Tensor],
    counts: Mapping[str, torch.Tensor],
) -> None:
    """See `record_pack`; the arguments have been checked there, and R, S >= 1."""
    fields = [layout.field(name) for name in sources]
    word = layout.word_bytes
    for source in sources.values():
        itemsize = source.dtype.itemsize
        word = math.gcd(word, source.data_ptr(), source.stride(0) * itemsize, source.shape[1] * itemsize)
    views = [source.view(_WORDS[word]) for source in sources.values()]
    first, end = layout.reserved_bytes // word, layout.row_bytes // word
    packed = rows.view(_WORDS[word])
    _record_pack_kernel[(slots.shape[0], triton.cdiv(end - first, _BLOCK))](
        packed,
        slots,
        tuple(views),
        tuple(source_rows.get(field.name) for field in fields),
        tuple(counts.get(field.name) for field in fields),
        tuple(view.stride(0) for view in views),
        packed.stride(0),
        FIRST=first,
        END=end,
        OFFSETS=tuple(field.offset // word for field in fields),
        LENGTHS=tuple(view.shape[1] for view in views),
        ENTRIES=tuple(field.entry_width * field.dtype.itemsize // word for field in fields),
        BLOCK=_BLOCK,
        num_warps=4,
    )


def record_unpack_triton(
    rows: torch.Tensor, fields: Sequence[FieldLayout], *, slots: torch.Tensor, word_bytes: int
) -> dict[str, torch.Tensor]:
    """See `record_unpack`; the arguments have been checked there, and R, S >= 1."""
    taken = {
        field.name: torch.empty((slots.shape[0], field.width), dtype=field.dtype, device=rows.device)
        for field in fields
    }
    filled = [field for field in fields if field.width]
    if not filled:
        return taken
    packed = rows.view(_WORDS[word_bytes])
    first = min(field.offset for field in filled) // word_bytes
    end = max(field.offset + field.nbytes for field in filled) // word_bytes
    _record_unpack_kernel[(slots.shape[0], triton.cdiv(end - first, _BLOCK))](
        packed,
        slots,
        tuple(taken[field.name].view(_WORDS[word_bytes]) for field in filled),
        packed.stride(0),
        FIRST=first,
        OFFSETS=tuple(field.offset // word_bytes for field in filled),
        LENGTHS=tuple(field.nbytes // word_bytes for field in filled),
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return taken
