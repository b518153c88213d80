"""One step of DSpark's sequential head: bias the base logits by the previous token and draw the next draft.

The logits of draft k are the block's base logits plus a low-rank bias, W2 @ W1[x_{k-1}] (DSpark paper,
section on the Markov head; upstream `sglang/kernels/ops/speculative/dspark/markov_sample.py`, which first
writes the bias as an [R, V] tensor). On a GPU the bias exists only in registers, tile by tile: W2 is read
once for the whole batch.

A draft is the argmax at temperature 0 and a Gumbel-max draw from softmax(logits / T) otherwise. Its
log-probability is of the distribution that it was really drawn from, which is what rejection needs.

Twin: `markov_step_ref`. Kernels: `markov_step_triton` (two launches: tiles, then rows).
"""

from dataclasses import dataclass

import torch
from sglang_spec_ext.kernels.contracts import (
    FLOAT_DTYPES,
    INDEX_DTYPES,
    check_absent,
    check_present,
    check_tensor,
)
from sglang_spec_ext.kernels.dispatch import runs_on_triton


@dataclass(frozen=True, slots=True)
class GumbelKey:
    """Where a step's Philox noise comes from (`gumbel.gumbel_noise`)."""

    key: int  # 64 bits, one per launch of the server
    offset: torch.Tensor  # [1] int64 on the logits' device, advanced by the caller every decode step
    step: int  # position in the block


@dataclass(frozen=True, slots=True)
class MarkovStep:
    """The drafts of one position, and what an estimator reads from their rows. One entry per request."""

    tokens: torch.Tensor  # [R] int64
    log_probs: torch.Tensor | None  # [R] float32, log q(token) at the row's temperature (at 1 in a greedy row)
    margins: torch.Tensor | None  # [R] float32, largest minus second largest biased logit, before any temperature
    log_sum_exps: torch.Tensor | None  # [R] float32, of biased logits / temperature (at 1 in a greedy row)


def markov_step(
    base_logits: torch.Tensor,
    prev_tokens: torch.Tensor,
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    temperatures: torch.Tensor | None = None,
    gumbel: "GumbelKey | torch.Tensor | None" = None,
    logits_out: torch.Tensor | None = None,
    statistics: bool = True,
) -> MarkovStep:
    """Draft one token of each request. Nothing is read on the host.

    Args:
        base_logits: [R, V] float32, bfloat16 or float16. Row stride free. Not changed.
        prev_tokens: [R] int32 or int64, the token before this position; one outside W1 gives no bias.
        w1: [V', r] float32, bfloat16 or float16, the embedding of the previous token; r at least 1.
        w2: [V, r], dtype of w1. The bias is rounded to this dtype, as a matrix product in it would be.
        temperatures: [R] float32, at least 0; a row at 0 is greedy. None: all are.
        gumbel: the noise, needed exactly when temperatures are given: a GumbelKey, or explicit noise [R, V]
            float32 (a CPU draws it from a generator of its own sooner than from Philox).
        logits_out: [R, V] float32, bfloat16 or float16, overwritten with the biased logits (rejection needs
            q = softmax of them over T). They are rounded to this dtype before anything is drawn from them, so
            that q is what was drawn from. None: they are never written, and not rounded.
        statistics: False leaves log_probs, margins and log_sum_exps out, which are None then: a third of the time
            on a CPU, nothing on a GPU, which returns them all the same.

    The lowest id wins among equals. A row with NaN drafts the first NaN's id and has NaN statistics.

    Returns: MarkovStep; for R = 0 its tensors are empty and nothing is launched.
    Raises: ValueError or TypeError on a wrong shape, dtype, device or stride, or noise without temperatures.
    """
    _check(base_logits, prev_tokens, w1, w2, temperatures, gumbel, logits_out)
    if base_logits.shape[0] == 0:
        empty = torch.empty(0, dtype=torch.float32, device=base_logits.device)
        return MarkovStep(torch.empty(0, dtype=torch.int64, device=base_logits.device), empty, empty, empty)
    if runs_on_triton(base_logits):
        from sglang_spec_ext.kernels.markov_step_triton import markov_step_triton as implementation
    else:
        from sglang_spec_ext.kernels.markov_step_ref import markov_step_ref as implementation
    return implementation(
        base_logits,
        prev_tokens,
        w1=w1,
        w2=w2,
        temperatures=temperatures,
        gumbel=gumbel,
        logits_out=logits_out,
        statistics=statistics,
    )


def _check(
    base_logits: torch.Tensor,
    prev_tokens: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    temperatures: torch.Tensor | None,
    gumbel: "GumbelKey | torch.Tensor | None",
    logits_out: torch.Tensor | None,
) -> None:
    check_tensor("base_logits", base_logits, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_requests, vocab_size = base_logits.shape
    device = base_logits.device
    if vocab_size == 0:
        raise ValueError("base_logits must have at least one column (the vocabulary), got 0")
    check_tensor("prev_tokens", prev_tokens, shape=(num_requests,), dtypes=INDEX_DTYPES, device=device)
    check_tensor("w1", w1, shape=(None, None), dtypes=FLOAT_DTYPES, device=device)
    rank = w1.shape[1]
    if rank == 0:
        raise ValueError("w1 must have at least one column (the rank), got 0")
    check_tensor("w2", w2, shape=(vocab_size, rank), dtypes=(w1.dtype,), device=device)
    if logits_out is not None:
        shape = (num_requests, vocab_size)
        check_tensor("logits_out", logits_out, shape=shape, dtypes=FLOAT_DTYPES, device=device)
    if temperatures is None:
        check_absent("gumbel", gumbel, because="without temperatures")
        return
    check_tensor("temperatures", temperatures, shape=(num_requests,), dtypes=(torch.float32,), device=device)
    check_present("gumbel", gumbel, because="with temperatures")
    if isinstance(gumbel, GumbelKey):
        check_tensor("gumbel.offset", gumbel.offset, shape=(1,), dtypes=(torch.int64,), device=device)
    elif gumbel is not None:
        shape = (num_requests, vocab_size)
        check_tensor("gumbel", gumbel, shape=shape, dtypes=(torch.float32,), device=device)
