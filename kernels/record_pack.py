"""Gather a request's scattered draft state into one contiguous row of a transfer buffer, and take it out
again.

Hidden rows lie in the verify batch, top-k and block ids in draft buffers, each in its own order.
`record_pack` writes the rows of R requests in one launch, `record_unpack` reads them in one; what is between
the fields and behind their valid entries is written as zero, so that a checksum over the row is well defined.
The bytes and their order come from the `RowLayout` alone.

Twin: `record_pack_ref`. Kernel: `record_pack_triton`.
"""

from collections.abc import Mapping, Sequence

import torch
from sglang_spec_ext.kernels.contracts import INDEX_DTYPES, check_tensor
from sglang_spec_ext.kernels.dispatch import runs_on_triton
from sglang_spec_ext.kernels.row_layout import RowLayout


def record_pack(
    rows: torch.Tensor,
    layout: RowLayout,
    *,
    slots: torch.Tensor,
    sources: Mapping[str, torch.Tensor],
    source_rows: Mapping[str, torch.Tensor] | None = None,
    counts: Mapping[str, torch.Tensor] | None = None,
) -> None:
    """Overwrite the rows of R requests, behind the layout's reserved bytes. Nothing is read on the host.

    Args:
        rows: [S, row_bytes] uint8, updated in place; rows of other slots are untouched. Row stride free.
        layout: where the fields lie.
        slots: [R] int32 or int64, distinct row numbers; a negative one skips its request.
        sources: for each field to fill, [M, w] of the field's dtype with w at most its width. Row stride
            free. A field without a source, and the entries behind w, are written as zero.
        source_rows: for each field, [R] int32 or int64: the row of its source that belongs to request r. A
            field missing here takes row r.
        counts: for each field, [R] int32 or int64: how many entries of it are valid. A field missing here has
            all.

    Raises: ValueError or TypeError on an unknown field, a wrong shape, dtype, device or stride.
    """
    _check_rows(rows, layout, slots)
    source_rows, counts = source_rows or {}, counts or {}
    (num_requests,), device = slots.shape, rows.device
    for name, source in sources.items():
        field = layout.field(name)
        check_tensor(f"sources[{name!r}]", source, shape=(None, None), dtypes=(field.dtype,), device=device)
        if source.shape[1] > field.width or source.shape[1] % field.entry_width:
            raise ValueError(
                f"sources[{name!r}] must have at most {field.width} columns in whole entries of "
                f"{field.entry_width}, got {source.shape[1]}"
            )
        if name not in source_rows and source.shape[0] < num_requests:
            raise ValueError(
                f"sources[{name!r}] must have {num_requests} rows, got {source.shape[0]}; pass source_rows"
            )
    for label, given in (("source_rows", source_rows), ("counts", counts)):
        for name, value in given.items():
            if name not in sources:
                raise ValueError(f"{label} must name fields of sources, got {name!r}")
            check_tensor(
                f"{label}[{name!r}]", value, shape=(num_requests,), dtypes=INDEX_DTYPES, device=device
            )
    if num_requests == 0 or rows.shape[0] == 0:
        return
    if runs_on_triton(rows):
        from sglang_spec_ext.kernels.record_pack_triton import record_pack_triton as implementation
    else:
        from sglang_spec_ext.kernels.record_pack_ref import record_pack_ref as implementation
    implementation(rows, layout, slots=slots, sources=sources, source_rows=source_rows, counts=counts)


def record_unpack(
    rows: torch.Tensor, layout: RowLayout, *, slots: torch.Tensor, names: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Read fields of R rows. Nothing is read on the host, nothing is changed.

    Args:
        rows: [S, row_bytes] uint8. Row stride free.
        layout: where the fields lie.
        slots: [R] int32 or int64; a negative one gives zeros.
        names: the fields to read.

    Returns: for each name, a new contiguous tensor [R, width] of the field's dtype: every entry, valid or
        not. For R = 0 they are empty and nothing is launched.
    Raises: ValueError or TypeError on an unknown field, a wrong shape, dtype, device or stride.
    """
    _check_rows(rows, layout, slots)
    fields = [layout.field(name) for name in names]
    if slots.shape[0] == 0 or rows.shape[0] == 0:
        return {
            f.name: torch.zeros((slots.shape[0], f.width), dtype=f.dtype, device=rows.device) for f in fields
        }
    if runs_on_triton(rows):
        from sglang_spec_ext.kernels.record_pack_triton import record_unpack_triton as implementation
    else:
        from sglang_spec_ext.kernels.record_pack_ref import record_unpack_ref as implementation
    return implementation(rows, fields, slots=slots, word_bytes=layout.word_bytes)


def _check_rows(rows: torch.Tensor, layout: RowLayout, slots: torch.Tensor) -> None:
    check_tensor("rows", rows, shape=(None, layout.row_bytes), dtypes=(torch.uint8,))
    # Fields are read as words of up to 8 bytes.
    if rows.data_ptr() % 8 or (rows.shape[0] > 1 and rows.stride(0) % 8):
        raise ValueError(
            f"rows must begin on 8-byte boundaries, got a row stride of {rows.stride(0)} bytes; "
            "make row_bytes a multiple of 8"
        )
    check_tensor("slots", slots, shape=(None,), dtypes=INDEX_DTYPES, device=rows.device)
