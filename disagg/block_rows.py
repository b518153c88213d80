"""First blocks packed where they were drafted, and unpacked where they are verified: one launch and one copy each way.

Prefill's draft leaves token ids and confidences on the device. `pack_blocks` lays them into rows of the record's own
schema there, without waiting; `PackedBlocks.arrays` brings the rows to the host when SGLang reads the step's other
results, and the host coder adds what only the host knows: room, generation, prompt and checksum. Decode checks rows on
the host; `unpack_blocks` brings those of a step to the device whole and takes the blocks out there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sglang_spec_ext.disagg.record import NUMPY_DTYPES
from sglang_spec_ext.disagg.schema import Schema

if TYPE_CHECKING:
    import torch
    from sglang_spec_ext.kernels.row_layout import RowLayout


@cache
def row_layout(schema: Schema) -> "RowLayout":
    """Return a schema's row as the kernels know it; its header is reserved."""
    import torch
    from sglang_spec_ext.kernels.row_layout import FieldLayout, RowLayout

    fields = []
    for placed in schema.placed_fields:
        dtype = getattr(torch, placed.dtype)
        width, entry = placed.nbytes // dtype.itemsize, placed.shape[1] if len(placed.shape) > 1 else 1
        fields.append(FieldLayout(placed.spec.name, placed.offset, width, dtype, max(entry, 1)))
    return RowLayout(schema.row_bytes, tuple(fields), reserved_bytes=schema.placed_fields[0].offset)


@dataclass(frozen=True)
class PackedBlocks:
    """The blocks of R requests: `rows` [R, row_bytes] uint8, each field with `counts[name]` valid entries."""

    schema: Schema
    rows: "torch.Tensor"
    counts: Mapping[str, int]

    def arrays(self) -> list[dict[str, NDArray[Any]]]:
        """Return for each request the array fields of its record; the one copy to the host is here."""
        host = self.rows.to("cpu").numpy()
        places = [
            (placed.spec.name, placed.offset, NUMPY_DTYPES[placed.dtype])
            for placed in self.schema.placed_fields
            if placed.spec.name in self.counts
        ]
        return [
            {
                name: row[offset : offset + self.counts[name] * dtype.itemsize].view(dtype)
                for name, offset, dtype in places
            }
            for row in host
        ]


def pack_blocks(schema: Schema, ids: "torch.Tensor", confidence: "torch.Tensor | None") -> PackedBlocks:
    """Pack first blocks `ids` [R, K] (anchors left out) and `confidence` [R, K]; nothing is read on the host.

    Raises ValueError where K exceeds the schema's `max_block`.
    """
    import torch
    from sglang_spec_ext.kernels.record_pack import record_pack

    sources = {"block_ids": ids.to(torch.int32)}
    if confidence is not None:
        sources["block_confidence"] = confidence.to(torch.float32)
    rows = torch.empty((len(ids), schema.row_bytes), dtype=torch.uint8, device=ids.device)
    slots = torch.arange(len(ids), device=ids.device)
    record_pack(rows, row_layout(schema), slots=slots, sources=sources)
    return PackedBlocks(schema, rows, {name: source.shape[1] for name, source in sources.items()})


def unpack_blocks(
    schema: Schema, rows: Sequence[NDArray[np.uint8]], *, tokens: int, device: Any
) -> tuple["torch.Tensor", "torch.Tensor"]:
    """Return ids [R, tokens] int32 and confidences [R, tokens] float32 of R rows, on the device.

    The caller knows how many tokens each block has, and whether it has confidences: without them these are zero.
    """
    import torch
    from sglang_spec_ext.kernels.record_pack import record_unpack

    shipped = torch.from_numpy(np.stack(rows)).to(device)
    slots = torch.arange(len(rows), device=shipped.device)
    found = record_unpack(shipped, row_layout(schema), slots=slots, names=("block_ids", "block_confidence"))
    return found["block_ids"][:, :tokens], found["block_confidence"][:, :tokens]
