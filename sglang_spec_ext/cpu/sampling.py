"""Exact sampled verification on a CPU, for EAGLE, DFlash, DSpark and NGRAM.

Each algorithm samples from the distribution that plain decoding samples from: temperature, then top-k and top-p
jointly, then min-p (`kernels/renormalise.py`). Stands in for the names that `speculative/eagle_utils.py`,
`speculative/dflash_utils.py` and `kernels/ops/speculative/dspark/dspark_accept.py` leave to CUDA kernels.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch

from sglang_spec_ext.kernels.chain_accept import NO_TOKEN, chain_accept
from sglang_spec_ext.kernels.renormalise import renormalise

SAMPLING_VERIFY_AVAILABLE = True

# sampling parameters of the batch that eagle_sample is verifying; SGLang's scheduler runs one step at a time
_verifying: list[Any] = []


def target_probs(logits: torch.Tensor, sampling_info: Any, rows_per_request: int) -> torch.Tensor:
    """Return the distributions [rows, V] float32 that plain decoding would sample these rows from."""

    def per_row(values: torch.Tensor) -> torch.Tensor:
        return values.reshape(-1).repeat_interleave(rows_per_request, dim=0)

    return renormalise(
        logits,
        temperatures=per_row(sampling_info.temperatures.float()),
        top_ks=per_row(sampling_info.top_ks) if sampling_info.need_top_k_sampling else None,
        top_ps=per_row(sampling_info.top_ps) if sampling_info.need_top_p_sampling else None,
        min_ps=per_row(sampling_info.min_ps) if sampling_info.need_min_p_sampling else None,
    )


def with_sampling_info(
    original: Callable[..., Any], verify_input: Any, batch: Any, *args: Any, **kwargs: Any
) -> Any:
    """Keep the batch's sampling parameters at hand while `eagle_sample` computes its probabilities."""
    _verifying.append(batch.sampling_info)
    try:
        return original(verify_input, batch, *args, **kwargs)
    finally:
        _verifying.pop()


def verify_softmax(logits: torch.Tensor, temperatures: torch.Tensor) -> torch.Tensor:
    """Return the verify rows' target distributions [rows, V]; `temperatures` [rows, 1] only tells their number."""
    sampling_info = _verifying[-1]
    requests = sampling_info.temperatures.shape[0]
    return target_probs(logits, sampling_info, temperatures.shape[0] // requests)


def already_filtered(probs: torch.Tensor, limits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities as they are: `verify_softmax` has applied every filter."""
    return probs


def verify_target_probs(
    *,
    next_token_logits: torch.Tensor,
    sampling_info: Any,
    draft_token_num: int,
    bs: int,
    max_top_k: int | None = None,
    uniform_top_k_value: int | None = None,
    use_sparse_topk: bool = True,
) -> torch.Tensor:
    """Return the target distributions [bs, draft_token_num, V] of DFlash and DSpark verification."""
    probs = target_probs(next_token_logits, sampling_info, draft_token_num)
    return probs.view(bs, draft_token_num, -1)


def with_min_p(original: Callable[..., Any], *, sampling_info: Any, **kwargs: Any) -> Any:
    """Send a batch that asks for min-p through the filtered path of DSpark's acceptance."""
    if sampling_info.need_min_p_sampling and not sampling_info.need_top_k_sampling:
        sampling_info = copy.copy(sampling_info)
        sampling_info.need_top_k_sampling = True
    return original(sampling_info=sampling_info, **kwargs)


def tree_target_only(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Verify greedy drafts by target-only sampling, in place; a chain or a tree of n nodes for each request.

    The interface is that of `kernels/ops/speculative/sampling.py: tree_speculative_sampling_target_only`.
    `target_probs` is [bs, n, V]; thresholds other than 1 are refused at start, since they change the output.
    """
    bs, n = candidates.shape
    if bool((retrive_next_sibling >= 0).any()):
        walk_tree(
            predicts, accept_index, accept_token_num, candidates, retrive_next_token, retrive_next_sibling,
            uniform_samples, uniform_samples_for_final_sampling, target_probs,
        )
        return
    result = chain_accept(
        candidates[:, 1:].contiguous(),
        mode="target_only",
        target_probs=target_probs.reshape(bs * n, -1),
        uniforms=uniform_samples[:, : n - 1].contiguous(),
        final_uniforms=uniform_samples_for_final_sampling,
        # a chain may be shorter than the width: NGRAM pads with nodes that hang on the root
        verify_lens=chain_lengths(retrive_next_token),
    )
    if not bool(result.bonus_valid.all()):
        raise FloatingPointError("verification met a target distribution that is NaN or sums to zero")
    write_chain(result, predicts, accept_index, accept_token_num, n)


def chain_rejection(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Verify sampled drafts by rejection sampling, in place.

    The interface is that of `kernels/ops/speculative/reject_sampling.py: chain_speculative_sampling_triton`;
    `target_probs` is [bs, n, V], `draft_probs` [bs, n - 1, V].
    """
    bs, n = candidates.shape
    result = chain_accept(
        candidates[:, 1:].contiguous(),
        mode="rejection",
        target_probs=target_probs.reshape(bs * n, -1),
        draft_probs=draft_probs[:, : n - 1].contiguous(),
        uniforms=uniform_samples[:, : n - 1].contiguous(),
        final_uniforms=uniform_samples_for_final_sampling,
    )
    write_chain(result, predicts, accept_index, accept_token_num, n)


def chain_lengths(retrive_next_token: torch.Tensor) -> torch.Tensor:
    """Return how many nodes [bs] int32 a walk from the root along first children visits."""
    bs, n = retrive_next_token.shape
    rows = torch.arange(bs)
    node = torch.zeros(bs, dtype=torch.int64)
    length = torch.ones(bs, dtype=torch.int32)
    for _ in range(n - 1):
        child = retrive_next_token[rows, node].long()
        length += child >= 0
        node = torch.where(child >= 0, child, node)
        if not bool((child >= 0).any()):
            break
    return length


def write_chain(
    result: Any, predicts: torch.Tensor, accept_index: torch.Tensor, accept_token_num: torch.Tensor, n: int
) -> None:
    """Write a chain's outcome in the layout of SGLang's tree kernels, in place."""
    bs = accept_token_num.numel()
    kept = result.committed != NO_TOKEN
    flat = torch.arange(bs * n).view(bs, n)
    predicts.view(bs, n)[kept] = result.committed[kept].to(predicts.dtype)
    depth = accept_index.shape[1]
    accept_index[kept[:, :depth]] = flat[:, :depth][kept[:, :depth]].to(accept_index.dtype)
    accept_token_num.copy_(result.num_accepted)


def walk_tree(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
) -> None:
    """Verify trees by target-only sampling, request by request, in place.

    At each node one coin is compared with the running mass of the children, in sibling order; a child whose turn
    covers the coin is accepted. A node without an accepted child draws from what the children leave of p.
    """
    bs, n = candidates.shape
    first, sibling, tokens = retrive_next_token.tolist(), retrive_next_sibling.tolist(), candidates.tolist()
    for b in range(bs):
        node, accepted = 0, 0
        accept_index[b, 0] = b * n
        while True:
            coin = float(uniform_samples[b, node])
            child, refused = _choose_child(target_probs[b, node], coin, first[b][node], sibling[b], tokens[b])
            if child < 0:
                break
            predicts[b * n + node] = tokens[b][child]
            if accepted + 1 == accept_index.shape[1]:
                break
            accepted += 1
            accept_index[b, accepted] = b * n + child
            node = child
        if child < 0:
            final = float(uniform_samples_for_final_sampling[b])
            predicts[b * n + node] = _draw_without(target_probs[b, node], refused, final)
        accept_token_num[b] = accepted


def _choose_child(
    p: torch.Tensor, coin: float, child: int, sibling: list[int], tokens: list[int]
) -> tuple[int, list[int]]:
    """Return the child whose turn covers the coin (-1 for none) and the tokens that were passed over."""
    mass = 0.0
    refused: list[int] = []
    while child >= 0:
        token = tokens[child]
        if token not in refused:  # padding nodes may repeat a token, which must not count twice
            mass += float(p[token])
            if coin < mass:
                break
            refused.append(token)
        child = sibling[child]
    return child, refused


def _draw_without(p: torch.Tensor, refused: list[int], coin: float) -> int:
    """Draw from p [V] without the refused tokens; from p itself when they hold all of it."""
    rest = p.clone()
    rest[refused] = 0.0
    if float(rest.sum()) <= 0:
        rest = p
    cdf = rest.double().cumsum(0)
    token = int(torch.searchsorted(cdf, coin * float(cdf[-1]), right=True))
    return min(token, int(rest.nonzero()[-1]))
