"""Counts of the PD record path, as plain numbers in one place.

Every stage adds to the PdCounters it was given; whoever exports metrics reads `rows()`. Nothing here knows
Prometheus. Seconds are sums of wall time; a rate is the reader's division.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

MAX_ACCEPT_LEN = 64  # accept lengths beyond it share the last bucket
LABEL = "label"  # metadata: what the keys of a labelled counter are


@dataclass
class PdCounters:
    """Counters of one scheduler process, prefill or decode. Labelled ones are Counters keyed by the label."""

    records_sent: int = 0
    records_received: int = 0
    # RecordError.field
    records_refused: Counter[str] = field(default_factory=Counter, metadata={LABEL: "field"})
    # absent (row never written), cold_peer, not_packed, lost (sidecar), rebootstrap, peer_rank
    records_missing: Counter[str] = field(default_factory=Counter, metadata={LABEL: "reason"})
    records_stale: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    pack_seconds: float = 0.0
    unpack_seconds: float = 0.0
    transfer_seconds: float = 0.0
    # one count for each prefill server seen: warm, cold, refused; and Mismatch.field
    peers: Counter[str] = field(default_factory=Counter, metadata={LABEL: "standing"})
    peer_mismatches: Counter[str] = field(default_factory=Counter, metadata={LABEL: "field"})
    requests_refused: int = 0
    # of a request's first decode step, warm and cold apart
    first_accept_len_with_bonus_warm: Counter[str] = field(default_factory=Counter, metadata={LABEL: "length"})
    first_accept_len_with_bonus_cold: Counter[str] = field(default_factory=Counter, metadata={LABEL: "length"})
    # late, duplicate, forged, oversized, malformed, dropped, unroutable
    sidecar_messages: Counter[str] = field(default_factory=Counter, metadata={LABEL: "kind"})

    def note_first_step(self, accept_len_with_bonus: int, *, warm: bool) -> None:
        """Record the accept length (bonus included) of a request's first decode step."""
        bucket = str(min(max(accept_len_with_bonus, 0), MAX_ACCEPT_LEN))
        counter = self.first_accept_len_with_bonus_warm if warm else self.first_accept_len_with_bonus_cold
        counter[bucket] += 1

    def rows(self) -> Iterator[tuple[str, str, float]]:
        """Yield (name, label value or "", value) for every counter; labels in sorted order."""
        for item in fields(self):
            value = getattr(self, item.name)
            if isinstance(value, Counter):
                for label in sorted(value):
                    yield item.name, label, value[label]
            else:
                yield item.name, "", value
