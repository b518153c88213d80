"""The distribution that plain decoding samples from, as explicit rows: temperature, top-k, top-p, min-p.

Verification is exact only if p is this very distribution. SGLang 0.5.23 applies the filters in two orders,
and both are here under `filter_order`:

- ``joint``: top-k and top-p both look at the whole softmax; this is what its samplers do in plain decoding
  (the PyTorch one always, FlashInfer's unless a request asks for min-p: `sglang/srt/layers/sampler.py`,
  `top_k_top_p_min_p_sampling_from_probs_torch` and `filter_apply_order="joint"`).
- ``top_k_first``: top-p looks at the softmax renormalised after top-k; FlashInfer's sampler when any request
  of the batch asks for min-p, and the target rows of SGLang's own speculative verification.

min-p is applied last and against the largest probability, in both orders. Upstream's verification leaves it
out; here it is never left out. A greedy request is top_k = 1 at temperature 1, as SGLang normalises it.

This op has a torch implementation only, written for a CPU: it picks its candidates by value, so on a GPU it
would synchronise, and there SGLang's own softmax and renormalisation kernels serve.
"""

from typing import Literal, get_args

import torch
from sglang_spec_ext.kernels.contracts import FLOAT_DTYPES, INDEX_DTYPES, check_tensor

FilterOrder = Literal["joint", "top_k_first"]

# How many of the largest probabilities are looked at first, and the factor when a row needs more. A chat
# model's nucleus at top-p 0.9 is a few dozen tokens; sorting a whole vocabulary costs milliseconds a row.
_FIRST_WINDOW = 64
_WINDOW_GROWTH = 8
# Columns per group whose maximum is taken; the groups are strided, so that the pass is vectorised.
_GROUP_SIZE = 32


def renormalise(
    logits: torch.Tensor,
    *,
    temperatures: torch.Tensor,
    top_ks: torch.Tensor | None = None,
    top_ps: torch.Tensor | None = None,
    min_ps: torch.Tensor | None = None,
    filter_order: FilterOrder = "joint",
) -> torch.Tensor:
    """Turn target logits into the sampling distribution of each row.

    Args:
        logits: [N, V] float32, bfloat16 or float16. -inf marks a forbidden token. Not changed.
        temperatures: [N] or [N, 1] float32, above zero.
        top_ks: [N] int32 or int64, at least 1; V or more keeps all. None: no row limits it.
        top_ps: [N] float32 in (0, 1]; 1 keeps all. None: no row limits it.
        min_ps: [N] float32 in [0, 1]; 0 keeps all. None: no row limits it.
        filter_order: "joint" (plain decoding) or "top_k_first", see the module docstring.

    One row per verified place: repeat a request's parameters for its places (`torch.repeat_interleave`).

    Returns: [N, V] float32, new, each row summing to 1, exactly 0 outside its support. Of equal probabilities
        at a limit the lower token ids are kept. A row that holds NaN or +inf, or no finite logit, is NaN.
    Raises: ValueError or TypeError on a wrong shape, dtype, device or order.
    """
    check_tensor("logits", logits, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_rows, vocab_size = logits.shape
    floats, device = (torch.float32,), logits.device
    if device.type != "cpu":
        raise ValueError(
            f"logits must be on the CPU, got {device}; on a GPU use SGLang's renormalisation kernels"
        )
    temperatures = temperatures.reshape(-1)
    check_tensor("temperatures", temperatures, shape=(num_rows,), dtypes=floats, device=device)
    if top_ks is not None:
        check_tensor("top_ks", top_ks, shape=(num_rows,), dtypes=INDEX_DTYPES, device=device)
    for name, value in (("top_ps", top_ps), ("min_ps", min_ps)):
        if value is not None:
            check_tensor(name, value, shape=(num_rows,), dtypes=floats, device=device)
    if filter_order not in get_args(FilterOrder):
        raise ValueError(
            f"filter_order must be one of {', '.join(get_args(FilterOrder))}, got {filter_order!r}"
        )

    probs = torch.softmax(logits.float() / temperatures[:, None], dim=-1)
    if num_rows == 0 or vocab_size == 0:
        return probs
    limits = torch.full((num_rows,), vocab_size) if top_ks is None else top_ks.long().clamp(1, vocab_size)
    unlimited = limits == vocab_size
    if top_ps is not None:
        unlimited &= top_ps >= 1.0
    unlimited |= probs[:, 0].isnan()
    if bool(unlimited.all()):
        return probs if min_ps is None else _min_p(probs, probs.amax(dim=1, keepdim=True), min_ps)
    values, ids = _leading(probs, limits, top_ps, unlimited, filter_order)
    min_ps = torch.zeros(num_rows) if min_ps is None else min_ps
    leading = _min_p(values, values[:, :1], min_ps)
    mixed = bool(unlimited.any())
    dense = _min_p(probs, probs.amax(dim=1, keepdim=True), min_ps) if mixed else None
    # in place, because a fresh [N, V] costs more than the filter; scatter_add_, because what pads a short row
    # points at id 0 with value 0
    probs = probs.zero_().scatter_add_(1, ids, leading)
    return probs if dense is None else torch.where(unlimited[:, None], dense, probs)


def _min_p(probs: torch.Tensor, largest: torch.Tensor, min_ps: torch.Tensor) -> torch.Tensor:
    """Drop what is below its row's share of the largest probability, and normalise."""
    kept = torch.where(probs < largest * min_ps[:, None], 0.0, probs)
    return kept / kept.sum(dim=1, keepdim=True)


def _leading(
    probs: torch.Tensor,
    limits: torch.Tensor,
    top_ps: torch.Tensor | None,
    unlimited: torch.Tensor,
    filter_order: FilterOrder,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities that top-k and top-p keep, [N, W] largest first and zero-padded, and their
    ids.

    A row marked `unlimited` keeps everything; what is returned for it is not to be read.
    """
    vocab_size = probs.shape[1]
    window = _FIRST_WINDOW
    while True:
        values, ids, sizes, complete = _window(probs, window)
        counts = torch.minimum(limits, sizes)
        if top_ps is not None:
            mass = values if filter_order == "joint" else _renormalised_top_k(values, limits, vocab_size)
            # Kept while the mass in front of a token is at most top-p; that is monotone along the row.
            in_front = mass.cumsum(dim=1) - mass
            in_nucleus = (in_front <= top_ps[:, None]).sum(dim=1).clamp(min=1)
            counts = torch.where(top_ps >= 1.0, counts, torch.minimum(counts, in_nucleus))
        # A row is settled once its window holds all of it, or its whole top-k, or a token that top-p drops;
        # with top-k first the last is no proof, since the mass of the top-k is the norm.
        settled = complete | unlimited | (limits <= sizes)
        dropped = counts < sizes
        settled |= dropped if filter_order == "joint" else dropped & (limits == vocab_size)
        if bool(settled.all()):
            return torch.where(torch.arange(values.shape[1]) < counts[:, None], values, 0.0), ids
        window *= _WINDOW_GROWTH


def _window(
    probs: torch.Tensor, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Find the largest positive probabilities of each row, about `window` of them, without sorting the row.

    Returns values [N, W] (largest first, lower ids first among equals, padded with zeros), their ids [N, W],
    how many are real [N], and whether these are all the positive ones of the row [N]. What is left out of a
    row is strictly smaller than everything returned for it.
    """
    num_rows, vocab_size = probs.shape
    num_groups = vocab_size // _GROUP_SIZE
    if window >= num_groups:
        values, ids = probs.sort(dim=1, descending=True, stable=True)
        return values, ids, (values > 0).sum(dim=1), torch.ones(num_rows, dtype=torch.bool)
    # No column outside the groups with the `window` largest maxima exceeds the smallest of these maxima.
    head = probs[:, : num_groups * _GROUP_SIZE].unflatten(1, (_GROUP_SIZE, num_groups))
    maxima, groups = head.amax(dim=1).topk(window, dim=1)
    groups = groups.sort(dim=1).values
    threshold = maxima[:, -1:]
    chosen = groups[:, None, :].expand(-1, _GROUP_SIZE, -1)
    tail = torch.arange(num_groups * _GROUP_SIZE, vocab_size)
    candidates = torch.cat([head.gather(2, chosen).flatten(1), probs[:, tail]], dim=1)
    chosen_ids = (chosen + torch.arange(_GROUP_SIZE)[:, None] * num_groups).flatten(1)  # ascending
    candidate_ids = torch.cat([chosen_ids, tail.expand(num_rows, -1)], dim=1)
    row, column = (candidates > threshold).nonzero(as_tuple=True)
    sizes = torch.bincount(row, minlength=num_rows)
    place = torch.arange(len(row)) - (sizes.cumsum(0) - sizes)[row]
    shape = (num_rows, max(int(sizes.max()), 1))
    values = probs.new_zeros(shape).index_put_((row, place), candidates[row, column])
    ids = column.new_zeros(shape).index_put_((row, place), candidate_ids[row, column])
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order), sizes, threshold.squeeze(1) <= 0


def _renormalised_top_k(values: torch.Tensor, limits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    in_top_k = torch.arange(values.shape[1]) < limits[:, None]
    mass = torch.where(in_top_k, values, 0.0)
    norm = torch.where(limits[:, None] == vocab_size, 1.0, mass.sum(dim=1, keepdim=True))
    return mass / norm
