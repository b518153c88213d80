"""What the extension tells Prometheus, in the scheduler process, where SGLang's own metrics are on.

The accept rate of a step divides by the K that the step was drafted at, never by the K in use when it is
reported: accepted and drafted tokens are counters with that K as a label.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from sglang_spec_ext.records import Decision, StepObservation

NAME = "sglang:spec_ext_"
REFRESH_STEPS = 32  # how often the gauges of the accounting are set
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
LENGTHS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16)


class Accounted(Protocol):
    """A controller, as far as metrics need it."""

    def snapshot(self) -> dict[str, Any]:
        """Return its accounting and estimates."""


class Metrics(Protocol):
    """Takes in finished steps."""

    def observe(self, observation: StepObservation, decision: Decision) -> None:
        """Count one finished step."""

    def account(self, controller: Accounted) -> None:
        """Take in the controller's accounting; called every REFRESH_STEPS steps."""


class NoMetrics:
    """The server runs without metrics."""

    def observe(self, observation: StepObservation, decision: Decision) -> None:
        """See Metrics."""

    def account(self, controller: Accounted) -> None:
        """See Metrics."""


class PrometheusMetrics:
    """Metrics in SGLang's registry, with SGLang's labels."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        # SGLang sets the multi-process folder before any metric is made
        from prometheus_client import Counter, Gauge, Histogram

        names, self._labels = tuple(labels), dict(labels)

        def counter(name: str, text: str, *more: str) -> Any:
            return Counter(NAME + name, text, (*names, *more))

        def gauge(name: str, text: str) -> Any:
            return Gauge(NAME + name, text, names, multiprocess_mode="mostrecent").labels(**labels)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(NAME + name, text, names, buckets=buckets).labels(**labels)

        self._steps = counter("steps", "Decode steps by K and reason of the decision.", "k", "reason")
        self._switches = counter("switches", "Steps at another K than the step before.", "reason")
        self._drafted = counter("draft_tokens", "Draft tokens verified, by the K of their step.", "k")
        self._accepted = counter("accepted_tokens", "Draft tokens accepted, by the K of their step.", "k")
        self._wasted = counter("wasted_draft_tokens", "Draft tokens verified and not accepted.")
        self._probes = counter("probe_steps", "Steps that probed another K.")
        self._k = gauge("k", "Number of draft tokens verified per request in the last step.")
        self._width = gauge("verify_width", "Tokens verified per request in the last step.")
        self._accept_length = histogram("accept_length", "Tokens per step, bonus included.", LENGTHS)
        self._draft_s = histogram("draft_seconds", "Seconds of drafting in a step.", SECONDS)
        self._verify_s = histogram("verify_seconds", "Seconds of a step's worker without drafting.", SECONDS)
        self._step_s = histogram("step_seconds", "Seconds from a step to the next.", SECONDS)
        self._predicted = gauge("predicted_tokens_per_second", "Predicted rate of what was chosen.")
        self._measured = gauge("measured_tokens_per_second", "Measured rate of decode steps.")
        self._regret = gauge("regret_tokens_per_second", "Predicted rate of the best fixed K, less that.")
        self._dropped = gauge("dropped_samples", "Rows that could not be used as acceptance samples.")
        self._last_k: int | None = None

    def observe(self, observation: StepObservation, decision: Decision) -> None:
        """See Metrics."""
        labels, k = self._labels, decision.k
        rows = len(observation.accepted)
        valid = np.ones(rows, np.bool_) if observation.valid is None else observation.valid
        accepted = observation.accepted[valid]
        verified = np.full(rows, k) if observation.verified is None else observation.verified
        drafted, taken = int(verified[valid].sum()), int(accepted.sum())
        self._steps.labels(**labels, k=k, reason=decision.reason).inc()
        if self._last_k is not None and self._last_k != k:
            self._switches.labels(**labels, reason=decision.reason).inc()
        self._last_k = k
        self._drafted.labels(**labels, k=k).inc(drafted)
        self._accepted.labels(**labels, k=k).inc(taken)
        self._wasted.labels(**labels).inc(max(0, drafted - taken))
        if decision.probe:
            self._probes.labels(**labels).inc()
        self._k.set(k)
        self._width.set(1.0 + float(verified.mean()) if rows else 0.0)
        for length in (accepted + 1).tolist():
            self._accept_length.observe(length)
        for metric, seconds in (
            (self._draft_s, observation.draft_s),
            (self._verify_s, observation.verify_s),
            (self._step_s, observation.step_s),
        ):
            if seconds is not None:
                metric.observe(seconds)

    def account(self, controller: Accounted) -> None:
        """See Metrics."""
        snapshot = controller.snapshot()
        ledger = snapshot["ledger"]
        for metric, value in (
            (self._predicted, ledger["chosen_tok_s"]),
            (self._measured, ledger["measured_tok_s"]),
            (self._regret, ledger["regret_tok_s"]),
            (self._dropped, snapshot["acceptance"]["dropped"]),
        ):
            if value is not None:
                metric.set(value)
