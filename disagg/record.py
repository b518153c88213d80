"""One request's draft state as a row of bytes: write it, and refuse it before reading a single value.

The row layout is `schema.Schema`'s. `decode` checks, in this order, length, magic, version, fingerprint,
shape, the CRC-32 of the whole row and counts, then that the row belongs to the request at hand; only then
does it read values. Each refusal is a RecordError that names the field and both values. Needs NumPy, never
torch: bfloat16 rows are held as their 16-bit patterns.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sglang_spec_ext.disagg.schema import (
    BODY_FIELDS,
    CRC_OFFSET,
    DTYPES,
    HEADER,
    HEADER_FIELDS,
    MAGIC,
    Schema,
)

NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),  # bit patterns: NumPy has no bfloat16
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
}
PROMPT_CRC_TOKENS = 64
_MAX_U32 = 0xFFFFFFFF


class RecordError(ValueError):
    """A row or a record was refused. `field`, `got` and `expected` say why, for messages and for counters."""

    reason: ClassVar[str] = "refused"

    def __init__(self, field: str, got: object, expected: object) -> None:
        self.field, self.got, self.expected = field, got, expected
        super().__init__(f"record {self.reason}: {field} is {got!r}, expected {expected!r}")


class TruncatedRecordError(RecordError):
    """The row is shorter or longer than the schema's row."""

    reason = "truncated"


class ForeignRecordError(RecordError):
    """The row does not begin with the magic: never written, or not a record."""

    reason = "foreign"


class VersionMismatchError(RecordError):
    """The writer used another layout version, or none."""

    reason = "of another version"


class SchemaMismatchError(RecordError):
    """The writer's fingerprint, dtype or width differs: another draft, algorithm or configuration."""

    reason = "of another schema"


class CorruptRecordError(RecordError):
    """Checksum or counts contradict the row: a flipped bit or a row written only in part."""

    reason = "corrupt"


class StaleRecordError(RecordError):
    """An intact row of another request, or of an earlier owner of the slot."""

    reason = "stale"


class UnencodableRecordError(RecordError):
    """The writer was given values that do not fit the schema; nothing was written."""

    reason = "not encodable"


class Header(NamedTuple):
    """The header fields, in HEADER_FIELDS order (tested)."""

    magic: bytes
    version: int
    dtype: int
    fingerprint: int
    bootstrap_room: int
    generation: int
    seq_len: int
    prompt_crc: int
    anchor_token: int
    hidden_width: int
    num_hidden_rows: int
    num_topk: int
    num_block: int
    num_confidence: int
    num_prior: int
    active_k: int
    row_bytes: int
    crc32: int


class _Place(NamedTuple):
    """A field's place, unpacked for the hot path."""

    name: str
    count_field: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int


def _empty(dtype: str, ndim: int = 1) -> NDArray[Any]:
    return np.zeros((0,) * ndim, NUMPY_DTYPES[dtype])


@dataclass(frozen=True, eq=False, kw_only=True)
class DraftRecord:
    """What prefill knows about a request's next draft. Arrays are detached from any buffer.

    `hidden` [rows, hidden_width] in the draft's dtype (bfloat16 as uint16 patterns); `topk_p` and
    `topk_index` [n] float32 and int64; `block_ids` [b] int32; `block_confidence` [b or 0] float32;
    `accept_prior` [p] float32. Without `active_k` (0) the decode side keeps its own K. `row` [row_bytes] uint8 is
    what the record was decoded from, of which its arrays are views; empty for one that was built here.
    """

    bootstrap_room: int
    generation: int
    seq_len: int
    prompt_crc: int
    anchor_token: int
    active_k: int = 0
    hidden: NDArray[Any] = field(default_factory=lambda: _empty("float32", 2))
    topk_p: NDArray[Any] = field(default_factory=lambda: _empty("float32"))
    topk_index: NDArray[Any] = field(default_factory=lambda: _empty("int64"))
    block_ids: NDArray[Any] = field(default_factory=lambda: _empty("int32"))
    block_confidence: NDArray[Any] = field(default_factory=lambda: _empty("float32"))
    accept_prior: NDArray[Any] = field(default_factory=lambda: _empty("float32"))
    row: NDArray[np.uint8] = field(default_factory=lambda: np.zeros(0, np.uint8), compare=False)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftRecord):
            return NotImplemented
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self) if f.compare)

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """What the reader knows about the request; a row that disagrees is stale.

    `prior_generation` is the generation of a row that this reader has already consumed for the same room;
    `generation` is the exact one where the writer announced it (0: not known). `anchor_token` None: not
    known.
    """

    bootstrap_room: int
    seq_len: int
    prompt_crc: int
    anchor_token: int | None = None
    generation: int = 0
    prior_generation: int = 0


def prompt_crc(token_ids: Sequence[int]) -> int:
    """Return the CRC-32 of the last PROMPT_CRC_TOKENS prompt tokens, as little-endian int32."""
    tail = np.asarray(token_ids[-PROMPT_CRC_TOKENS:], dtype="<i8").astype("<i4")
    return zlib.crc32(tail.tobytes())


def is_blank(row: NDArray[np.uint8]) -> bool:
    """Say whether the row was never written since it was cleared."""
    return not row[: len(MAGIC)].any()


class RecordCodec:
    """Reads and writes the rows of one schema. Stateless, so both directions may share one."""

    def __init__(self, schema: Schema) -> None:
        self.schema = schema
        self.row_bytes = schema.row_bytes
        self._dtype_code = DTYPES[schema.shape.hidden_dtype][0]
        self._places = tuple(
            _Place(f.spec.name, f.spec.count, NUMPY_DTYPES[f.dtype], f.shape, f.offset) for f in schema.placed_fields
        )
        self._capacity: dict[str, int] = {}
        for f in schema.placed_fields:
            self._capacity[f.spec.count] = f.shape[0]

    def encode(self, record: DraftRecord) -> NDArray[np.uint8]:
        """Return the record as a new row of `row_bytes` bytes; raises UnencodableRecordError."""
        row = np.zeros(self.row_bytes, np.uint8)
        self.encode_into(record, row)
        return row

    def encode_into(self, record: DraftRecord, row: NDArray[np.uint8]) -> None:
        """Write the record over `row` ([row_bytes] uint8, contiguous), unused bytes zero.

        Raises UnencodableRecordError before the first byte is written.
        """
        if row.nbytes != self.row_bytes:
            raise UnencodableRecordError("row length", row.nbytes, self.row_bytes)
        counts = self._checked_counts(record)
        header = self._header(record, counts)
        row.fill(0)
        for name, _, dtype, shape, offset in self._places:
            values = getattr(record, name)
            if values.size:
                stop = offset + values.size * dtype.itemsize
                row[offset:stop].view(dtype).reshape(-1, *shape[1:])[:] = values
        HEADER.pack_into(row.data, 0, *header)
        HEADER.pack_into(row.data, 0, *header[:-1], self._crc(row))

    def decode(self, row: NDArray[np.uint8], expected: Expectation) -> DraftRecord:
        """Return the record of `row`, or raise the RecordError that says why it must not be used."""
        header = self.checked_header(row)
        for name in ("bootstrap_room", "seq_len", "prompt_crc"):
            if getattr(header, name) != getattr(expected, name):
                raise StaleRecordError(name, getattr(header, name), getattr(expected, name))
        if expected.anchor_token is not None and header.anchor_token != expected.anchor_token:
            raise StaleRecordError("anchor_token", header.anchor_token, expected.anchor_token)
        if expected.generation and header.generation != expected.generation:
            raise StaleRecordError("generation", header.generation, expected.generation)
        if header.generation == expected.prior_generation:
            raise StaleRecordError("generation", header.generation, f"not {expected.prior_generation}")
        arrays, kept = {}, row.copy()
        for name, count, dtype, shape, offset in self._places:
            extent = (getattr(header, count), *shape[1:])
            size = extent[0] * (shape[1] if len(shape) > 1 else 1)
            stop = offset + size * dtype.itemsize
            arrays[name] = kept[offset:stop].view(dtype).reshape(extent)
        return DraftRecord(
            bootstrap_room=header.bootstrap_room,
            generation=header.generation,
            seq_len=header.seq_len,
            prompt_crc=header.prompt_crc,
            anchor_token=header.anchor_token,
            active_k=header.active_k,
            row=kept,
            **arrays,
        )

    def checked_header(self, row: NDArray[np.uint8]) -> Header:
        """Return the header of an intact row of this schema, or raise a RecordError."""
        if row.nbytes != self.row_bytes:
            raise TruncatedRecordError("row length", row.nbytes, self.row_bytes)
        header = Header(*HEADER.unpack_from(row.data))
        schema = self.schema
        if header.magic != MAGIC:
            raise ForeignRecordError("magic", header.magic, MAGIC)
        if header.version != schema.version:
            raise VersionMismatchError("version", header.version or "missing", schema.version)
        if header.fingerprint != schema.fingerprint:
            ours = f"{schema.fingerprint:#018x}"
            raise SchemaMismatchError("fingerprint", f"{header.fingerprint:#018x}", ours)
        if header.dtype != self._dtype_code:
            raise SchemaMismatchError("dtype", header.dtype, self._dtype_code)
        if header.hidden_width != schema.shape.hidden_width:
            raise SchemaMismatchError("hidden_width", header.hidden_width, schema.shape.hidden_width)
        if header.row_bytes != self.row_bytes:
            raise SchemaMismatchError("row_bytes", header.row_bytes, self.row_bytes)
        crc = self._crc(row)
        if header.crc32 != crc:
            raise CorruptRecordError("crc32", f"{header.crc32:#010x}", f"{crc:#010x}")
        for count, capacity in self._capacity.items():
            if getattr(header, count) > capacity:
                raise CorruptRecordError(count, getattr(header, count), f"at most {capacity}")
        if header.generation == 0:
            raise CorruptRecordError("generation", 0, "at least 1")
        return header

    def _header(self, record: DraftRecord, counts: dict[str, int]) -> Header:
        for name, limit in (
            ("bootstrap_room", 2**64 - 1),
            ("seq_len", _MAX_U32),
            ("prompt_crc", _MAX_U32),
            ("active_k", 0xFFFF),
        ):
            if not 0 <= getattr(record, name) <= limit:
                raise UnencodableRecordError(name, getattr(record, name), f"0 to {limit}")
        if not 1 <= record.generation <= _MAX_U32:
            raise UnencodableRecordError("generation", record.generation, f"1 to {_MAX_U32}")
        if not -(2**31) <= record.anchor_token < 2**31:
            raise UnencodableRecordError("anchor_token", record.anchor_token, "a 32-bit integer")
        schema = self.schema
        return Header(
            magic=MAGIC,
            version=schema.version,
            dtype=self._dtype_code,
            fingerprint=schema.fingerprint,
            bootstrap_room=record.bootstrap_room,
            generation=record.generation,
            seq_len=record.seq_len,
            prompt_crc=record.prompt_crc,
            anchor_token=record.anchor_token,
            hidden_width=schema.shape.hidden_width,
            active_k=record.active_k,
            row_bytes=self.row_bytes,
            crc32=0,
            **counts,
        )

    def _checked_counts(self, record: DraftRecord) -> dict[str, int]:
        """Return the header counts after checking dtype, rank, width and capacity of each array."""
        counts: dict[str, int] = {}
        for name, count, dtype, shape, _ in self._places:
            values = getattr(record, name)
            if values.size == 0:
                length = 0
            elif values.dtype != dtype:
                raise UnencodableRecordError(f"{name}.dtype", str(values.dtype), str(dtype))
            elif values.ndim != len(shape) or values.shape[1:] != shape[1:] or values.shape[0] > shape[0]:
                raise UnencodableRecordError(f"{name}.shape", values.shape, f"at most {shape}")
            else:
                length = values.shape[0]
            if counts.setdefault(count, length) != length:
                raise UnencodableRecordError(f"len({name})", length, counts[count])
        return counts

    @staticmethod
    def _crc(row: NDArray[np.uint8]) -> int:
        view = row.data
        return zlib.crc32(view[HEADER.size :], zlib.crc32(view[:CRC_OFFSET]))


assert Header._fields == tuple(f.name for f in HEADER_FIELDS), "Header and HEADER_FIELDS name the same fields"
assert {f.name for f in BODY_FIELDS} <= {f.name for f in fields(DraftRecord)}
