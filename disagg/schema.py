"""The layout of one metadata record: a table of fields from which sizes, offsets and coding follow.

A record is one fixed-size row: a header of 64 bytes, then the body fields in table order, each on a 64-byte
boundary (the smallest RDMA write), little-endian, unused entries zero. The same row is a slot of the aux
buffer and the payload of a sidecar message. Nothing here knows how a row travels; stdlib only.
"""

import hashlib
import json
import struct
from dataclasses import dataclass, fields
from functools import cached_property

ALIGN_BYTES = 64
MAGIC = b"SSXR"

# What each layout version holds. Any change to HEADER_FIELDS, BODY_FIELDS, ALIGN_BYTES or the meaning of a
# field takes the next number: peers of different versions never read each other's rows.
VERSION_HISTORY = {
    1: "hidden rows, draft top-k, first block with confidences, acceptance prior, active K",
}
SCHEMA_VERSION = max(VERSION_HISTORY)

# name -> (code in the header, bytes per item)
DTYPES = {"float32": (1, 4), "float16": (2, 2), "bfloat16": (3, 2), "int32": (4, 4), "int64": (5, 8)}
HIDDEN_DTYPES = ("float32", "float16", "bfloat16")
DTYPE_OF_DRAFT = "hidden_dtype"  # stands in BODY_FIELDS for the dtype that the draft model decides


@dataclass(frozen=True)
class HeaderField:
    """One header field: its `struct` format character(s) and what it says."""

    name: str
    fmt: str
    meaning: str


HEADER_FIELDS = (
    HeaderField("magic", "4s", "MAGIC; four zero bytes say that the row was never written"),
    HeaderField("version", "H", "SCHEMA_VERSION of the writer; 0 is no version"),
    HeaderField("dtype", "H", "code in DTYPES of the hidden rows"),
    HeaderField("fingerprint", "Q", "Schema.fingerprint of the writer"),
    HeaderField("bootstrap_room", "Q", "the request, as both servers know it"),
    HeaderField("generation", "I", "of the writer's slot; never 0, so a reused slot or room is told apart"),
    HeaderField("seq_len", "I", "prompt tokens that the target has processed"),
    HeaderField("prompt_crc", "I", "CRC-32 of the last prompt tokens: tells apart two requests of one room"),
    HeaderField("anchor_token", "i", "the token sampled by prefill, which the draft follows"),
    HeaderField("hidden_width", "I", "elements of one hidden row"),
    HeaderField("num_hidden_rows", "H", "valid rows of `hidden`"),
    HeaderField("num_topk", "H", "valid entries of `topk_p` and `topk_index`"),
    HeaderField("num_block", "H", "valid entries of `block_ids`"),
    HeaderField("num_confidence", "H", "valid entries of `block_confidence`; 0 without a confidence head"),
    HeaderField("num_prior", "H", "valid entries of `accept_prior`"),
    HeaderField("active_k", "H", "draft tokens per request that prefill's controller would verify"),
    HeaderField("row_bytes", "I", "length of the whole row"),
    HeaderField("crc32", "I", "CRC-32 of the row without this field; always the last header field"),
)
HEADER = struct.Struct("<" + "".join(field.fmt for field in HEADER_FIELDS))
CRC_OFFSET = HEADER.size - 4


@dataclass(frozen=True)
class FieldSpec:
    """One body field.

    `dims` names attributes of RecordShape; `count` names the header field that says how many entries of the
    first dimension are valid.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]
    count: str
    meaning: str


BODY_FIELDS = (
    FieldSpec(
        "hidden",
        DTYPE_OF_DRAFT,
        ("max_hidden_rows", "hidden_width"),
        "num_hidden_rows",
        "EAGLE: the hidden row(s) that the first draft step reads",
    ),
    FieldSpec("topk_p", "float32", ("max_topk",), "num_topk", "EAGLE: draft probabilities of the first tree level"),
    FieldSpec("topk_index", "int64", ("max_topk",), "num_topk", "EAGLE: draft token ids of topk_p"),
    FieldSpec(
        "block_ids",
        "int32",
        ("max_block",),
        "num_block",
        "DFlash, DSpark: the first draft block, without its anchor",
    ),
    FieldSpec(
        "block_confidence",
        "float32",
        ("max_block",),
        "num_confidence",
        "DSpark: acceptance probability of each block position",
    ),
    FieldSpec(
        "accept_prior",
        "float32",
        ("max_prior",),
        "num_prior",
        "acceptance probability per draft position in prefill's controller",
    ),
)


@dataclass(frozen=True)
class RecordShape:
    """Capacities of a row. They come from the speculative configuration and are equal on both servers.

    Raises ValueError naming the field, the rule and the value.
    """

    hidden_width: int = 0
    hidden_dtype: str = "float32"
    max_hidden_rows: int = 0
    max_topk: int = 0
    max_block: int = 0
    max_prior: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "hidden_dtype":
                if value not in HIDDEN_DTYPES:
                    raise ValueError(f"hidden_dtype must be one of {', '.join(HIDDEN_DTYPES)}, got {value!r}")
                continue
            limit = 1 << 20 if field.name == "hidden_width" else 0xFFFF
            if type(value) is not int or not 0 <= value <= limit:
                raise ValueError(f"{field.name} must be an integer from 0 to {limit}, got {value!r}")
        if (self.max_hidden_rows == 0) != (self.hidden_width == 0):
            raise ValueError(
                "hidden_width and max_hidden_rows must both be 0 or both be positive, "
                f"got {self.hidden_width} and {self.max_hidden_rows}"
            )


@dataclass(frozen=True)
class PlacedField:
    """A body field with its place in the row: `offset` and `nbytes` in bytes, `shape` at full capacity."""

    spec: FieldSpec
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Schema:
    """The layout for one RecordShape, and what its values mean.

    `identity` is a digest of the configuration that gives the values their meaning (algorithm, draft
    checkpoint, tap layers); it enters the fingerprint, so a row drafted by another model is refused even when
    its shape fits. `version` differs from SCHEMA_VERSION only in tests of version skew.
    """

    shape: RecordShape
    identity: str = ""
    version: int = SCHEMA_VERSION

    @cached_property
    def placed_fields(self) -> tuple[PlacedField, ...]:
        """The body fields in row order."""
        placed, offset = [], HEADER.size
        for spec in BODY_FIELDS:
            dtype = self.shape.hidden_dtype if spec.dtype == DTYPE_OF_DRAFT else spec.dtype
            shape = tuple(getattr(self.shape, name) for name in spec.dims)
            nbytes = DTYPES[dtype][1]
            for extent in shape:
                nbytes *= extent
            placed.append(PlacedField(spec, dtype, shape, offset, nbytes))
            offset += -(-nbytes // ALIGN_BYTES) * ALIGN_BYTES
        return tuple(placed)

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one row, a multiple of ALIGN_BYTES."""
        last = self.placed_fields[-1]
        return last.offset + -(-last.nbytes // ALIGN_BYTES) * ALIGN_BYTES

    @cached_property
    def fingerprint(self) -> int:
        """64 bits over everything that both sides must agree on to read a row; never 0."""
        layout = {
            "version": self.version,
            "header": [(field.name, field.fmt) for field in HEADER_FIELDS],
            "body": [(f.spec.name, f.dtype, f.shape, f.offset, f.spec.count) for f in self.placed_fields],
            "identity": self.identity,
        }
        canonical = json.dumps(layout, separators=(",", ":"), sort_keys=True).encode()
        return int.from_bytes(hashlib.blake2b(canonical, digest_size=8).digest(), "little") or 1

    def describe(self) -> list[dict[str, object]]:
        """Return the layout as rows: name, dtype, shape, offset, bytes, meaning (documents, `doctor`)."""
        header = {
            "name": "header",
            "dtype": "-",
            "shape": [],
            "offset": 0,
            "nbytes": HEADER.size,
            "meaning": "identity of the row, counts and checksum",
        }
        body = [
            {
                "name": f.spec.name,
                "dtype": f.dtype,
                "shape": list(f.shape),
                "offset": f.offset,
                "nbytes": f.nbytes,
                "meaning": f.spec.meaning,
            }
            for f in self.placed_fields
        ]
        return [header, *body]
