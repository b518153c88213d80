"""Records over ZeroMQ, keyed by bootstrap room, for KV transfer back ends that carry no metadata of ours.

The decode side asks (WANT, 64 bytes) as soon as it knows the prefill server; prefill answers (64 bytes and
the row) when the record exists, whichever comes first. Both ends are bounded, never block, have no thread and
no clock: the owner calls `pump(now)` from its loop. Every message has one fixed size per kind, nothing is
unpickled, and with a key each one carries an HMAC-SHA256 tag (integrity, not secrecy). A lost message costs
its request the warm start and nothing else.
"""

import hashlib
import hmac
import importlib
import secrets
import stat
import struct
from collections import OrderedDict
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sglang_spec_ext.disagg.counters import PdCounters
from sglang_spec_ext.disagg.schema import SCHEMA_VERSION

WANT_MAGIC, RECORD_MAGIC = b"SSXW", b"SSXM"
HEAD = struct.Struct("<4sHHQQII")  # magic, version, 0, room, nonce, row_bytes, 0
TAG_BYTES = 32
ENVELOPE_BYTES = HEAD.size + TAG_BYTES
MIN_KEY_BYTES = 16
MAX_MESSAGES_PER_PUMP = 1024
MAX_ENDPOINTS = 256
_NO_TAG = bytes(TAG_BYTES)
_WILDCARD_HOSTS = ("", "*", "0.0.0.0", "::", "[::]")  # noqa: S104 - refused, not bound


def _load_zmq() -> ModuleType:
    try:
        return importlib.import_module("zmq")
    except ImportError as error:
        raise RuntimeError(
            "pd-transport sidecar needs pyzmq, which comes with sglang: pip install pyzmq, or use "
            "--spec-ext-pd-transport aux"
        ) from error


def read_key_file(path: str | Path) -> bytes:
    """Return the shared key; raises ValueError if it is short or readable by others."""
    path = Path(path)
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode) or mode & 0o077:
        raise ValueError(f"pd-key-file must be a regular file of mode 0600, got {path} ({stat.filemode(mode)})")
    key = path.read_bytes().strip()
    if len(key) < MIN_KEY_BYTES:
        raise ValueError(f"pd-key-file must hold at least {MIN_KEY_BYTES} bytes, got {len(key)} in {path}")
    return key


class _Codec:
    """Frames of one row length and one key."""

    def __init__(self, row_bytes: int, key: bytes | None) -> None:
        self.row_bytes, self.key = row_bytes, key

    def seal(self, magic: bytes, room: int, nonce: int, row: bytes = b"") -> bytes:
        head = HEAD.pack(magic, SCHEMA_VERSION, 0, room, nonce, len(row), 0)
        return b"".join((head, self._tag(head, row), row))

    def open(self, magic: bytes, frame: bytes) -> tuple[int, int, bytes] | str:
        """Return (room, nonce, row), or the counter label that says what is wrong with the frame."""
        size = ENVELOPE_BYTES + (self.row_bytes if magic == RECORD_MAGIC else 0)
        if len(frame) != size:
            return "oversized" if len(frame) > size else "malformed"
        head, row = frame[: HEAD.size], frame[ENVELOPE_BYTES:]
        got_magic, version, _, room, nonce, row_bytes, _ = HEAD.unpack(head)
        if (got_magic, version, row_bytes) != (magic, SCHEMA_VERSION, len(row)):
            return "malformed"
        if not hmac.compare_digest(frame[HEAD.size : ENVELOPE_BYTES], self._tag(head, row)):
            return "forged"
        return room, nonce, row

    def _tag(self, head: bytes, row: bytes) -> bytes:
        if self.key is None:
            return _NO_TAG
        tag = hmac.new(self.key, head, hashlib.sha256)
        tag.update(row)
        return tag.digest()


class _Want(NamedTuple):
    identity: bytes
    nonce: int
    since: float


class SidecarPublisher:
    """Prefill's end: keeps up to `capacity` records for `ttl_s` seconds, sends each to who asks for its room.

    Binds to `host` at `port` (0: any free one) and nowhere else; a wildcard host needs a key. The oldest
    record or request gives way when full. Raises ValueError on a bad argument, zmq.ZMQError if it cannot
    bind.
    """

    def __init__(
        self,
        host: str,
        *,
        row_bytes: int,
        counters: PdCounters,
        port: int = 0,
        key: bytes | None = None,
        capacity: int = 1024,
        ttl_s: float = 60.0,
    ) -> None:
        if host in _WILDCARD_HOSTS and key is None:
            raise ValueError(
                f"the sidecar host must be one address of this server unless pd-key-file is set, got {host!r}"
            )
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._zmq = _load_zmq()
        self._codec = _Codec(row_bytes, key)
        self._counts = counters.sidecar_messages
        self._capacity, self._ttl_s = capacity, ttl_s
        self._records: OrderedDict[int, tuple[bytes, float]] = OrderedDict()
        self._wants: OrderedDict[int, _Want] = OrderedDict()
        self._context = self._zmq.Context()
        self._socket = _open_socket(self._zmq, self._context, self._zmq.ROUTER, ENVELOPE_BYTES, capacity)
        self._socket.setsockopt(self._zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(self._zmq.IPV6, int(":" in host))
        address = f"[{host}]" if ":" in host and not host.startswith("[") else host
        self._socket.bind(f"tcp://{address}:{port or '*'}")
        self.endpoint: str = self._socket.getsockopt_string(self._zmq.LAST_ENDPOINT)

    def __len__(self) -> int:
        return len(self._records)

    def publish(self, room: int, row: NDArray[np.uint8], *, now: float) -> bool:
        """Offer the record of `room`; False if the room has one already (the first stays)."""
        if row.nbytes != self._codec.row_bytes:
            raise ValueError(f"row must have {self._codec.row_bytes} bytes, got {row.nbytes}")
        if room in self._records:
            self._counts["duplicate"] += 1
            return False
        if len(self._records) == self._capacity:
            self._records.popitem(last=False)
            self._counts["dropped"] += 1
        self._records[room] = (row.tobytes(), now)
        want = self._wants.pop(room, None)
        if want is not None:
            self._send(room, want.identity, want.nonce)
        return True

    def withdraw(self, room: int) -> None:
        """Forget the room: its request was aborted, or its record was certainly received."""
        self._records.pop(room, None)
        self._wants.pop(room, None)

    def pump(self, now: float) -> None:
        """Answer what was asked and let go of what is older than `ttl_s`; call it once per loop."""
        for _ in range(MAX_MESSAGES_PER_PUMP):
            parts = _receive(self._zmq, self._socket, max_parts=2)
            if parts is None:
                break
            self._on_message(parts, now)
        while self._records and next(iter(self._records.values()))[1] < now - self._ttl_s:
            self._records.popitem(last=False)
        while self._wants and next(iter(self._wants.values())).since < now - self._ttl_s:
            self._wants.popitem(last=False)

    def close(self) -> None:
        """Release the socket and its threads."""
        self._context.destroy(linger=0)

    def _on_message(self, parts: list[bytes], now: float) -> None:
        opened = self._codec.open(WANT_MAGIC, parts[1]) if len(parts) == 2 else "malformed"
        if isinstance(opened, str):
            self._counts[opened] += 1
            return
        room, nonce, _ = opened
        if room in self._records:
            self._send(room, parts[0], nonce)
            return
        if room not in self._wants and len(self._wants) == self._capacity:
            self._wants.popitem(last=False)
            self._counts["dropped"] += 1
        self._wants[room] = _Want(parts[0], nonce, now)
        self._wants.move_to_end(room)

    def _send(self, room: int, identity: bytes, nonce: int) -> None:
        frame = self._codec.seal(RECORD_MAGIC, room, nonce, self._records[room][0])
        try:
            self._socket.send_multipart((identity, frame), self._zmq.NOBLOCK)
        except self._zmq.Again:
            self._counts["dropped"] += 1
        except self._zmq.ZMQError as error:
            if error.errno != self._zmq.EHOSTUNREACH:
                raise
            self._counts["unroutable"] += 1


class SidecarSubscriber:
    """Decode's end: asks prefill servers for rooms and keeps what arrives until the request takes it.

    At most `capacity` rooms are open at a time; beyond it `want` says no and the request starts cold.
    """

    def __init__(self, *, row_bytes: int, counters: PdCounters, key: bytes | None = None, capacity: int = 4096) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        self._zmq = _load_zmq()
        self._codec = _Codec(row_bytes, key)
        self._counts = counters.sidecar_messages
        self._capacity = capacity
        self._context = self._zmq.Context()
        self._sockets: OrderedDict[str, Any] = OrderedDict()
        self._wanted: dict[int, tuple[str, int]] = {}
        self._arrived: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._wanted)

    def want(self, endpoint: str, room: int) -> bool:
        """Ask `endpoint` for the record of `room`; asking again repeats the question (a lost message)."""
        if room not in self._wanted and len(self._wanted) == self._capacity:
            self._counts["dropped"] += 1
            return False
        if room in self._arrived:
            return True
        known = self._wanted.get(room)
        nonce = known[1] if known is not None and known[0] == endpoint else secrets.randbits(64)
        self._wanted[room] = (endpoint, nonce)
        try:
            self._socket_of(endpoint).send(self._codec.seal(WANT_MAGIC, room, nonce), self._zmq.NOBLOCK)
        except self._zmq.Again:
            self._counts["dropped"] += 1
            return False
        return True

    def pump(self) -> None:
        """Take in what has arrived; call it once per loop."""
        for endpoint, socket in list(self._sockets.items()):
            for _ in range(MAX_MESSAGES_PER_PUMP):
                parts = _receive(self._zmq, socket, max_parts=1)
                if parts is None:
                    break
                self._on_message(endpoint, parts)

    def has(self, room: int) -> bool:
        """Say whether the record of `room` has arrived."""
        return room in self._arrived

    def take(self, room: int) -> NDArray[np.uint8] | None:
        """Return the row of `room` and close the room; None when it has not arrived: a later one is late."""
        self._wanted.pop(room, None)
        row = self._arrived.pop(room, None)
        return None if row is None else np.frombuffer(row, np.uint8)

    def forget(self, room: int) -> None:
        """Close the room without reading it: its request ended."""
        self.take(room)

    def disconnect(self, endpoint: str) -> None:
        """Drop the connection to a prefill server that went away; its open rooms stay unanswered."""
        socket = self._sockets.pop(endpoint, None)
        if socket is not None:
            socket.close(linger=0)

    def close(self) -> None:
        """Release all sockets and their threads."""
        self._context.destroy(linger=0)
        self._sockets.clear()

    def _socket_of(self, endpoint: str) -> Any:
        if endpoint not in self._sockets:
            if len(self._sockets) == MAX_ENDPOINTS:
                self.disconnect(next(iter(self._sockets)))
            size = ENVELOPE_BYTES + self._codec.row_bytes
            socket = _open_socket(self._zmq, self._context, self._zmq.DEALER, size, self._capacity)
            socket.setsockopt(self._zmq.IPV6, int("[" in endpoint))
            socket.connect(endpoint)
            self._sockets[endpoint] = socket
        self._sockets.move_to_end(endpoint)
        return self._sockets[endpoint]

    def _on_message(self, endpoint: str, parts: list[bytes]) -> None:
        opened = self._codec.open(RECORD_MAGIC, parts[0]) if len(parts) == 1 else "malformed"
        if isinstance(opened, str):
            self._counts[opened] += 1
            return
        room, nonce, row = opened
        if self._wanted.get(room) != (endpoint, nonce):
            self._counts["late"] += 1
        elif room in self._arrived:
            self._counts["duplicate"] += 1
        else:
            self._arrived[room] = row


def _open_socket(zmq: ModuleType, context: Any, kind: int, frame_bytes: int, capacity: int) -> Any:
    """Return a socket with bounded queues. A frame far above its size drops the connection inside libzmq."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, capacity)
    socket.setsockopt(zmq.RCVHWM, capacity)
    socket.setsockopt(zmq.MAXMSGSIZE, 2 * frame_bytes + 1024)
    return socket


def _receive(zmq: ModuleType, socket: Any, *, max_parts: int) -> list[bytes] | None:
    """Return one message, None when there is none; parts beyond `max_parts` collapse into one empty part."""
    try:
        parts = [socket.recv(zmq.NOBLOCK)]
    except zmq.Again:
        return None
    while socket.getsockopt(zmq.RCVMORE):
        part = socket.recv(zmq.NOBLOCK)
        if len(parts) <= max_parts:
            parts.append(part if len(parts) < max_parts else b"")
    return parts
