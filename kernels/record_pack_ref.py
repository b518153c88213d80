"""Torch twins of `record_pack` and `record_unpack`: an indexed copy per field; the CPU's implementation."""

from collections.abc import Mapping, Sequence

import torch
from sglang_spec_ext.kernels.row_layout import FieldLayout, RowLayout


def record_pack_ref(
    rows: torch.Tensor,
    layout: RowLayout,
    *,
    slots: torch.Tensor,
    sources: Mapping[str, torch.Tensor],
    source_rows: Mapping[str, torch.Tensor],
    counts: Mapping[str, torch.Tensor],
) -> None:
    """See `record_pack`; the arguments have been checked there, and R, S >= 1."""
    used = slots >= 0
    slots = slots[used].long()
    packed = torch.zeros((len(slots), layout.row_bytes), dtype=torch.uint8, device=rows.device)
    for name, source in sources.items():
        field = layout.field(name)
        picked = source_rows[name][used].long() if name in source_rows else used.nonzero().squeeze(1)
        values = source[picked]
        if name in counts:
            valid = counts[name][used] * field.entry_width
            values = torch.where(
                torch.arange(source.shape[1], device=rows.device) < valid[:, None], values, 0
            )
        place = packed[:, field.offset : field.offset + source.shape[1] * field.dtype.itemsize]
        place.copy_(values.contiguous().view(torch.uint8))
    rows[slots, layout.reserved_bytes :] = packed[:, layout.reserved_bytes :]


def record_unpack_ref(
    rows: torch.Tensor, fields: Sequence[FieldLayout], *, slots: torch.Tensor, word_bytes: int
) -> dict[str, torch.Tensor]:
    """See `record_unpack`; the arguments have been checked there, and R, S >= 1."""
    del word_bytes  # the kernel's copy unit
    used = (slots >= 0)[:, None]
    picked = slots.clamp(min=0).long()
    taken: dict[str, torch.Tensor] = {}
    for field in fields:
        raw = rows[picked, field.offset : field.offset + field.nbytes]
        values = torch.empty((len(slots), field.width), dtype=field.dtype, device=rows.device)
        values.view(torch.uint8).copy_(torch.where(used, raw, 0))
        taken[field.name] = values
    return taken
