"""Reads what a safetensors file says it holds, without loading it and without torch.

Source: the format page of the safetensors library: 8 bytes little-endian header length, a JSON object
{name: {dtype, shape, data_offsets}}, then the data; offsets count from the end of the header.
"""

import json
import math
import pathlib
import struct
from dataclasses import dataclass

import numpy as np

from sglang_spec_ext.errors import SpecExtError

ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
INTEGER_FORMATS = {"I64": "<i8", "I32": "<i4"}
MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself


class CheckpointError(SpecExtError):
    """A checkpoint file that cannot be read; the message names the file, the fault and the cure."""


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a file: its dtype in safetensors' words, its shape and where its bytes stand."""

    path: pathlib.Path
    dtype: str
    shape: tuple[int, ...]
    first_byte: int
    num_bytes: int


def read_tensor_entries(folder: pathlib.Path) -> dict[str, TensorEntry]:
    """Return name -> entry over all `*.safetensors` of a folder; CheckpointError on the first fault."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise CheckpointError(f"{folder}: holds no *.safetensors file; save the weights in that format")
    entries: dict[str, TensorEntry] = {}
    for path in paths:
        for name, entry in _read_file(path).items():
            if name in entries:
                raise CheckpointError(
                    f"{path}: tensor {name!r} stands in {entries[name].path.name} too; keep one"
                )
            entries[name] = entry
    return entries


def read_integers(entry: TensorEntry) -> np.ndarray:
    """Return an integer tensor's values as int64; CheckpointError for a floating dtype."""
    if entry.dtype not in INTEGER_FORMATS:
        wanted = " or ".join(INTEGER_FORMATS)
        raise CheckpointError(f"{entry.path}: expected dtype {wanted}, got {entry.dtype}; save it as int64")
    with entry.path.open("rb") as stored:
        stored.seek(entry.first_byte)
        raw = stored.read(entry.num_bytes)
    return np.frombuffer(raw, INTEGER_FORMATS[entry.dtype]).astype(np.int64).reshape(entry.shape)


def _read_file(path: pathlib.Path) -> dict[str, TensorEntry]:
    cure = "copy or save the file again"
    size = path.stat().st_size
    if size < 8:
        raise CheckpointError(f"{path}: truncated, {size} bytes are no safetensors file; {cure}")
    with path.open("rb") as stored:
        (header_bytes,) = struct.unpack("<Q", stored.read(8))
        if header_bytes > min(size - 8, MAX_HEADER_BYTES):
            found = f"header of {header_bytes} bytes announced, file has {size}"
            raise CheckpointError(f"{path}: truncated or no safetensors file ({found}); {cure}")
        raw = stored.read(header_bytes)
    try:
        header = json.loads(raw)
        facts = {
            name: (str(value["dtype"]), tuple(map(int, value["shape"])), *map(int, value["data_offsets"]))
            for name, value in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: broken safetensors header ({error}); {cure}") from error
    entries, data_start = {}, 8 + header_bytes
    for name, (dtype, shape, start, end) in facts.items():
        if dtype in ITEM_BYTES and end - start != math.prod(shape) * ITEM_BYTES[dtype]:
            found = f"{end - start} bytes for {dtype} {list(shape)}"
            raise CheckpointError(f"{path}: broken safetensors header, tensor {name!r} has {found}; {cure}")
        if data_start + end > size:
            found = f"tensor {name!r} ends at byte {data_start + end}, file has {size}"
            raise CheckpointError(f"{path}: truncated, {found}; {cure}")
        entries[name] = TensorEntry(path, dtype, shape, data_start + start, end - start)
    return entries
