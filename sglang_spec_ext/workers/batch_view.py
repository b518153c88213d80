"""What the controller needs to know of a batch of SGLang, as plain arrays."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sglang_spec_ext.records import BoolArray, IntArray, RequestClass

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


def classes_of(reqs: Sequence[Any]) -> IntArray | None:
    """Return the classes [R] of requests; None when all are plain."""
    found = [request_class(req) for req in reqs]
    return np.array(found, np.int64) if any(found) else None


def ids_of(reqs: Sequence[Any]) -> IntArray:
    """Return numbers [R] that stay with a request; only compared within this process."""
    return np.array([hash(req.rid) for req in reqs], np.int64)


def alive(reqs: Sequence[Any]) -> BoolArray:
    """Return which requests [R] still decode: neither finished nor retracted."""
    return np.array([not (req.finished() or req.is_retracted) for req in reqs], np.bool_)


def mean_context(batch: Any) -> int:
    """Return the mean number of tokens of context per request."""
    lengths = batch.seq_lens_cpu
    if lengths is None:  # not kept on the host by back ends that do not ask for it
        return int(sum(req.seqlen for req in batch.reqs)) // max(1, len(batch.reqs))
    return int(lengths.sum()) // max(1, len(lengths))
