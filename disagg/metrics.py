"""The counters of the record path in SGLang's Prometheus registry.

Prometheus runs in SGLang's multi-process mode, so a value is added where it is counted: `update` adds what the
counters have gained since the last call.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from sglang_spec_ext.disagg.counters import LABEL, PdCounters

NAME = "sglang:spec_ext_pd_"


class PdMetrics:
    """One Prometheus counter for each field of PdCounters, with SGLang's labels and the field's own."""

    def __init__(self, labels: Mapping[str, str], counters: PdCounters) -> None:
        from prometheus_client import Counter

        self._counters, self._labels = counters, dict(labels)
        self._own = {item.name: item.metadata.get(LABEL, "") for item in fields(counters)}
        self._metrics: dict[str, Any] = {}
        for name, own in self._own.items():
            text = f"PD records: {name.replace('_', ' ')}."
            self._metrics[name] = Counter(NAME + name, text, (*labels, own) if own else tuple(labels))
        self._seen: dict[tuple[str, str], float] = {}

    def update(self) -> None:
        """Add the gains."""
        for name, label, value in self._counters.rows():
            gained = value - self._seen.get((name, label), 0)
            if gained > 0:
                own = {self._own[name]: label} if label else {}
                self._metrics[name].labels(**self._labels, **own).inc(gained)
                self._seen[name, label] = value
