"""What a prefill and a decode server must agree on before a record is read, and what follows if they differ.

Each prefill rank publishes a Capability as strict JSON under ROUTE of SGLang's bootstrap server (a route of
our own: a stock decode server rejects unknown keys in `/route`). The decode side fetches it before its first
request and judges it. Pure: no I/O, no clock; msgspec and the standard library.
"""

import hashlib
import json
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

import msgspec
from sglang_spec_ext.disagg.schema import SCHEMA_VERSION, RecordShape, Schema

ROUTE = "/spec_ext/v1/capability"
MAX_PAYLOAD_BYTES = 16384
EAGLE_ALGORITHMS = ("EAGLE", "EAGLE3")
BLOCK_ALGORITHMS = ("DFLASH", "DSPARK")


class MismatchPolicy(StrEnum):
    """What to do with a peer that differs: serve it without records, or fail its requests at once."""

    DEGRADE = "degrade"
    REFUSE = "refuse"


class Standing(StrEnum):
    """How a peer is served: with records, without, or not at all."""

    WARM = "warm"
    COLD = "cold"
    REFUSED = "refused"


class HandshakeError(ValueError):
    """A capability payload was refused; names the field and both values."""

    def __init__(self, field: str, got: object, expected: object) -> None:
        self.field, self.got, self.expected = field, got, expected
        super().__init__(f"capability refused: {field} is {got!r}, expected {expected!r}")


class StockRows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Row lengths in bytes of SGLang's own metadata buffers, in order, and the place of the hidden row.

    SGLang never compares them: it writes with the sender's lengths, so a difference lands over other rows.
    """

    row_bytes: tuple[int, ...]
    hidden_index: int


class Capability(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server's side of the agreement.

    `num_draft_tokens` is K, the largest number of draft tokens verified per request; `topk_entries` counts
    the draft top-k values that a record carries (top-k, times the steps for multi-layer EAGLE).
    """

    algorithm: str
    draft_digest: str
    num_draft_tokens: int
    topk_entries: int
    hidden_width: int
    hidden_dtype: str
    tap_layers: tuple[int, ...]
    vocab_size: int
    transport: str
    sidecar_endpoint: str = ""

    def schema(self) -> Schema:
        """Return the record layout that follows; equal capabilities give equal fingerprints."""
        is_eagle = self.algorithm in EAGLE_ALGORITHMS
        shape = RecordShape(
            hidden_width=self.hidden_width if is_eagle else 0,
            hidden_dtype=self.hidden_dtype,
            max_hidden_rows=1 if is_eagle else 0,
            max_topk=self.topk_entries if is_eagle else 0,
            max_block=self.num_draft_tokens if self.algorithm in BLOCK_ALGORITHMS else 0,
            max_prior=self.num_draft_tokens,
        )
        return Schema(shape, self.identity())

    def identity(self) -> str:
        """Return the digest of everything that gives the record's values their meaning."""
        meaning = [self.algorithm, self.draft_digest, self.num_draft_tokens, self.topk_entries]
        meaning += [self.tap_layers, self.vocab_size]
        return hashlib.blake2b(json.dumps(meaning).encode(), digest_size=16).hexdigest()


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What every version of the extension can read of a peer's answer; the capability is read after it."""

    schema_version: int
    stock_rows: StockRows
    capability: msgspec.Raw

    def read_capability(self) -> Capability:
        """Return the capability; raises HandshakeError, on another schema version before anything else."""
        if self.schema_version != SCHEMA_VERSION:
            raise HandshakeError("schema_version", self.schema_version, SCHEMA_VERSION)
        try:
            capability = msgspec.json.decode(self.capability, type=Capability)
            capability.schema()
        except (msgspec.DecodeError, ValueError) as error:
            raise HandshakeError("capability", str(error), f"the fields of version {SCHEMA_VERSION}") from error
        return capability


def encode_answer(capability: Capability, stock_rows: StockRows, *, schema_version: int = SCHEMA_VERSION) -> bytes:
    """Return the JSON payload of ROUTE."""
    answer = {"schema_version": schema_version, "stock_rows": stock_rows, "capability": capability}
    return msgspec.json.encode(answer)


def decode_answer(payload: bytes) -> Envelope:
    """Return the outer part of a peer's answer, or raise HandshakeError."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise HandshakeError("payload bytes", len(payload), f"at most {MAX_PAYLOAD_BYTES}")
    try:
        return msgspec.json.decode(payload, type=Envelope)
    except msgspec.DecodeError as error:
        raise HandshakeError("schema_version", f"unreadable ({error})", SCHEMA_VERSION) from error


class Mismatch(NamedTuple):
    """One field that differs. `unsafe`: no record may be skipped around it, the peer cannot be served."""

    field: str
    prefill: object
    decode: object
    cure: str
    unsafe: bool = False

    def __str__(self) -> str:
        return f"{self.field} is {self.prefill!r} on prefill and {self.decode!r} on decode ({self.cure})"


# field -> cure; the order in which a report names them
COMPARED_FIELDS = {
    "algorithm": "give both servers the same --speculative-algorithm",
    "draft_digest": "serve the same draft checkpoint on both",
    "num_draft_tokens": "give both servers the same --speculative-num-draft-tokens and --spec-ext-tiers",
    "topk_entries": "give both servers the same --speculative-eagle-topk",
    "hidden_width": "serve the same draft checkpoint on both",
    "hidden_dtype": "give both servers the same --dtype",
    "tap_layers": "serve the same draft checkpoint on both",
    "vocab_size": "serve the same target on both",
    "transport": "give both servers the same --spec-ext-pd-transport",
}
_SAME_BUFFERS = (
    "enable the optional metadata buffers on both servers or on none: --disaggregation-enable-kv-checksum, "
    "SGLANG_ENABLE_DISAGG_SAMPLING_MASK"
)


def compare(*, prefill: Capability, decode: Capability) -> tuple[Mismatch, ...]:
    """Return every difference that forbids reading the other side's records, in report order."""
    return tuple(
        Mismatch(name, getattr(prefill, name), getattr(decode, name), cure)
        for name, cure in COMPARED_FIELDS.items()
        if getattr(prefill, name) != getattr(decode, name)
    )


def compare_stock_rows(*, prefill: StockRows, decode: StockRows) -> tuple[Mismatch, ...]:
    """Return the differences between SGLang's own buffers; all but the hidden row's length are unsafe."""
    theirs, ours = prefill.row_bytes, decode.row_bytes
    if len(theirs) != len(ours) or prefill.hidden_index != decode.hidden_index:
        return (Mismatch("stock_rows", theirs, ours, _SAME_BUFFERS, unsafe=True),)
    found = []
    for index, (their_bytes, our_bytes) in enumerate(zip(theirs, ours, strict=True)):
        if their_bytes != our_bytes:
            unsafe = index != decode.hidden_index
            cure = _SAME_BUFFERS if unsafe else COMPARED_FIELDS["hidden_width"]
            found.append(Mismatch(f"stock_rows[{index}]", their_bytes, our_bytes, cure, unsafe=unsafe))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class PeerVerdict:
    """How the decode side treats one prefill server, and why.

    `reasons` are counter labels; `message` is the one line for the log, for /server_info and for the client
    of a refused request. `redirect_hidden_bytes` > 0: SGLang's own hidden row of this peer has that length,
    not ours, and must be sent elsewhere.
    """

    standing: Standing
    reasons: tuple[str, ...] = ()
    message: str = ""
    redirect_hidden_bytes: int = 0
    prefill: Capability | None = None

    def as_info(self) -> dict[str, object]:
        """Return what /server_info shows for this peer."""
        return {"standing": str(self.standing), "reasons": list(self.reasons), "message": self.message}


def judge(
    payload: bytes | None,
    *,
    decode: Capability,
    stock_rows: StockRows,
    policy: MismatchPolicy,
    peer: str,
    spare_row_bytes: int = 0,
) -> PeerVerdict:
    """Judge a prefill server by what it published; None: it has no such route, so it runs stock SGLang.

    A stock peer is served cold under both policies (a rolling upgrade must not fail requests), a peer that
    differs by `policy`, and a peer whose buffers would overwrite ours is refused under both: of these, only a
    hidden row of at most `spare_row_bytes` can be redirected.
    """
    if payload is None:
        message = f"PD peer {peer} does not run spec-ext: serving its requests without draft records"
        return PeerVerdict(standing=Standing.COLD, reasons=("no_extension",), message=message)
    found: tuple[Mismatch | HandshakeError, ...] = ()
    prefill, unsafe, redirect = None, False, 0
    try:
        envelope = decode_answer(payload)
        row_mismatches = compare_stock_rows(prefill=envelope.stock_rows, decode=stock_rows)
        unsafe = any(mismatch.unsafe for mismatch in row_mismatches)
        if row_mismatches and not unsafe:
            redirect = envelope.stock_rows.row_bytes[stock_rows.hidden_index]
            unsafe = redirect > spare_row_bytes
        found += row_mismatches
        prefill = envelope.read_capability()
        found = compare(prefill=prefill, decode=decode) + found
    except HandshakeError as error:
        found = (error, *found)
    if not found:
        return PeerVerdict(standing=Standing.WARM, reasons=("matched",), prefill=prefill)
    refused = unsafe or policy is MismatchPolicy.REFUSE
    consequence = "refusing its requests" if refused else "serving its requests without draft records"
    return PeerVerdict(
        standing=Standing.REFUSED if refused else Standing.COLD,
        reasons=tuple(difference.field for difference in found),
        message=f"PD peer {peer}: {'; '.join(map(str, found))}; {consequence}",
        redirect_hidden_bytes=0 if refused else redirect,
        prefill=prefill,
    )
