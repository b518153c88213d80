"""What the controller needs to know of a batch of SGLang, as plain arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_spec_ext.records import BoolArray, IntArray, RequestClass

CONTEXT_STEPS = 32

# Above this temperature acceptance is far from that of greedy requests, so it is estimated apart.
HOT_TEMPERATURE = 0.5


def request_class(req: Any) -> RequestClass:
    """Return the class whose acceptance a request shares."""
    params = req.sampling_params
    if req.grammar is not None:
        return RequestClass.GRAMMAR
    if (
        params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.min_new_tokens
        or params.logit_bias
    ):
        return RequestClass.PENALISED
    # SGLang turns temperature 0 into top-k 1 at temperature 1
    if params.top_k != 1 and params.temperature > HOT_TEMPERATURE:
        return RequestClass.HOT
    return RequestClass.PLAIN


def alive(reqs: Sequence[Any]) -> BoolArray:
    """Return which requests [R] still decode: neither finished nor retracted."""
    return np.array([not (req.finished() or req.is_retracted) for req in reqs], np.bool_)


class BatchView:
    """Arrays of the batch of this step; they are kept while the same requests come back, as they mostly do."""

    def __init__(self) -> None:
        self.reqs: list[Any] = []
        self.classes: IntArray | None = None  # [R] RequestClass; None: all plain
        self.request_ids: IntArray = np.empty(0, np.int64)  # [R], only compared within this process
        self.context_len = 0  # mean tokens of context, renewed every CONTEXT_STEPS steps
        self._age = 0

    def look(self, batch: Any) -> None:
        """Take in the batch of a step."""
        if batch.reqs != self.reqs:
            self.reqs = list(batch.reqs)
            found = [request_class(req) for req in self.reqs]
            self.classes = np.array(found, np.int64) if any(found) else None
            self.request_ids = np.array([hash(req.rid) for req in self.reqs], np.int64)
            self._age = 0
        if not self._age % CONTEXT_STEPS:
            self.context_len = mean_context(batch)
        self._age += 1


def mean_context(batch: Any) -> int:
    """Return the mean number of tokens of context per request."""
    lengths = batch.seq_lens_cpu
    if lengths is None:  # not kept on the host by back ends that do not ask for it
        return int(sum(req.seqlen for req in batch.reqs)) // max(1, len(batch.reqs))
    return int(lengths.sum()) // max(1, len(lengths))
