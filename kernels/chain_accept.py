"""Acceptance test of draft chains: which drafts survive, and the token that follows the last of them.

Three rules, all of them exact with respect to plain decoding:

- ``greedy``: draft k is accepted while it equals the target's argmax.
- ``target_only``: draft x is accepted with chance p(x); after a rejection the next token is drawn from p
  without x. This is the rule for drafts that were picked deterministically (argmax drafts: EAGLE, DFlash),
  and what SGLang 0.5.23 does by default (`sglang/kernels/jit/csrc/speculative/sampling.cuh`).
- ``rejection``: draft x, drawn from q, is accepted with chance min(1, p(x) / q(x)); after a rejection the
  next token is drawn from max(p - q, 0) normalised (Leviathan et al., arXiv 2211.17192, algorithm 1;
  `sglang/kernels/ops/speculative/reject_sampling.py`). q must be the distribution that x was really drawn
  from.

In all three, a chain whose verified drafts were all accepted (the whole block, or a prefix cut short by a
scheduler) takes its last token from p at the place after it, never from a residual (DSpark paper, section on
lossless scheduling). The random numbers are the caller's, so a result can be replayed and ranks can share it.

Signature and contract: `chain_accept`. Twin: `chain_accept_ref`. Kernel: `chain_accept_triton`.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from sglang_spec_ext.kernels.contracts import INDEX_DTYPES, check_absent, check_present, check_tensor
from sglang_spec_ext.kernels.dispatch import runs_on_triton

AcceptMode = Literal["greedy", "target_only", "rejection"]

# What fills `committed` behind the last token of a row, and every token of a padding row.
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class ChainAcceptResult:
    """What R chains of up to K drafts commit. All tensors are new and on the inputs' device."""

    num_accepted: torch.Tensor  # [R] int32, accepted drafts; the bonus token is not counted
    bonus: torch.Tensor  # [R] int64, the token after the last accepted draft; NO_TOKEN in a padding row
    committed: torch.Tensor  # [R, K + 1] int64, accepted drafts, then the bonus, then NO_TOKEN
    # [R] bool, False where the bonus could not be drawn: the row of p it comes from holds no positive mass
    # (all zero or NaN; `bonus` is then 0, a valid id that means nothing), or the row is padding.
    bonus_valid: torch.Tensor


def chain_accept(
    drafts: torch.Tensor,
    *,
    mode: AcceptMode,
    target_ids: torch.Tensor | None = None,
    target_probs: torch.Tensor | None = None,
    draft_probs: torch.Tensor | None = None,
    uniforms: torch.Tensor | None = None,
    final_uniforms: torch.Tensor | None = None,
    row_starts: torch.Tensor | None = None,
    verify_lens: torch.Tensor | None = None,
) -> ChainAcceptResult:
    """Verify R draft chains against the target. Nothing is read on the host, nothing is changed in place.

    Args:
        drafts: [R, K] int32 or int64, draft tokens x_1..x_K of each request (the anchor is not among them).
            A token outside the vocabulary has probability zero and is never accepted.
        mode: "greedy", "target_only" or "rejection", see the module docstring.
        target_ids: [N] int32 or int64, greedy only: the target's argmax at each verified place.
        target_probs: [N, V] float32, the sampled modes only: p at each verified place, with temperature,
            top-k, top-p and min-p applied (`renormalise`). Row stride free.
        draft_probs: [R, K, V] float32, rejection only: q at each draft position. Leading strides free. Values
            that are no probability (NaN, infinite, negative) count as zero.
        uniforms: [R, K] float32 in [0, 1), sampled modes only: the coin of each draft.
        final_uniforms: [R] float32 in [0, 1), sampled modes only: the draw of the last token. Independent of
            `uniforms`.
        row_starts: [R] int32 or int64: request r's places are rows row_starts[r] .. row_starts[r] + w_r - 1
            of the target tensor. None: the dense layout, row_starts[r] = r * (K + 1), N = R * (K + 1).
        verify_lens: [R] int32 or int64, the verify width w_r = drafts verified + 1, in 1 .. K + 1 (larger
            values count as K + 1). 0 marks a padding row of a captured graph. None: K + 1 for all.

    For a ragged batch pass a plan's `offsets[:-1]` and `verify_lens` (`survival_plan`). Passing `verify_lens`
    with the dense layout cuts acceptance of a fully verified batch.

    Returns: ChainAcceptResult; for R = 0 its tensors are empty and nothing is launched. K = 0 is plain
        decoding.
    Raises: ValueError or TypeError on a wrong mode, shape, dtype, device or stride, or an argument the mode
        does not read.
    """
    check_tensor("drafts", drafts, shape=(None, None), dtypes=INDEX_DTYPES)
    _check_mode(mode, drafts, target_ids, target_probs, draft_probs, uniforms, final_uniforms)
    num_requests, num_drafts = drafts.shape
    target = target_ids if target_probs is None else target_probs
    assert target is not None
    _check_layout(drafts, target, row_starts, verify_lens)
    if num_requests == 0:
        return _empty_result(num_drafts, drafts.device)
    if runs_on_triton(drafts):
        from sglang_spec_ext.kernels.chain_accept_triton import chain_accept_triton as implementation
    else:
        from sglang_spec_ext.kernels.chain_accept_ref import chain_accept_ref as implementation
    return implementation(
        drafts,
        mode=mode,
        target_ids=target_ids,
        target_probs=target_probs,
        draft_probs=draft_probs,
        uniforms=uniforms,
        final_uniforms=final_uniforms,
        row_starts=row_starts,
        verify_lens=verify_lens,
    )


def _check_mode(
    mode: AcceptMode,
    drafts: torch.Tensor,
    target_ids: torch.Tensor | None,
    target_probs: torch.Tensor | None,
    draft_probs: torch.Tensor | None,
    uniforms: torch.Tensor | None,
    final_uniforms: torch.Tensor | None,
) -> None:
    if mode not in get_args(AcceptMode):
        raise ValueError(f"mode must be one of {', '.join(get_args(AcceptMode))}, got {mode!r}")
    num_requests, num_drafts = drafts.shape
    device, because = drafts.device, f"in mode {mode!r}"
    sampled = {"target_probs": target_probs, "uniforms": uniforms, "final_uniforms": final_uniforms}
    if mode == "greedy":
        for name, value in {**sampled, "draft_probs": draft_probs}.items():
            check_absent(name, value, because=because)
        check_present("target_ids", target_ids, because=because)
        check_tensor("target_ids", target_ids, shape=(None,), dtypes=INDEX_DTYPES, device=device)
        return
    check_absent("target_ids", target_ids, because=because)
    for name, value in sampled.items():
        check_present(name, value, because=because)
    floats = (torch.float32,)
    check_tensor("target_probs", target_probs, shape=(None, None), dtypes=floats, device=device)
    check_tensor("uniforms", uniforms, shape=(num_requests, num_drafts), dtypes=floats, device=device)
    check_tensor("final_uniforms", final_uniforms, shape=(num_requests,), dtypes=floats, device=device)
    assert target_probs is not None
    vocab_size = target_probs.shape[1]
    if vocab_size == 0:
        raise ValueError("target_probs must have at least one column (the vocabulary), got 0")
    if mode == "target_only":
        check_absent("draft_probs", draft_probs, because=because)
        return
    check_present("draft_probs", draft_probs, because=because)
    shape = (num_requests, num_drafts, vocab_size)
    check_tensor("draft_probs", draft_probs, shape=shape, dtypes=floats, device=device)


def _check_layout(
    drafts: torch.Tensor,
    target: torch.Tensor,
    row_starts: torch.Tensor | None,
    verify_lens: torch.Tensor | None,
) -> None:
    num_requests, num_drafts = drafts.shape
    for name, value in (("row_starts", row_starts), ("verify_lens", verify_lens)):
        if value is not None:
            check_tensor(name, value, shape=(num_requests,), dtypes=INDEX_DTYPES, device=drafts.device)
    rows = num_requests * (num_drafts + 1)
    if row_starts is None and target.shape[0] < rows:
        raise ValueError(
            f"the target tensor must have R * (K + 1) = {rows} rows in the dense layout, "
            f"got {target.shape[0]}; pass row_starts for a ragged one"
        )
    if num_requests and target.shape[0] == 0:
        raise ValueError(f"the target tensor must have at least one row for {num_requests} requests, got 0")


def _empty_result(num_drafts: int, device: torch.device) -> ChainAcceptResult:
    return ChainAcceptResult(
        num_accepted=torch.empty(0, dtype=torch.int32, device=device),
        bonus=torch.empty(0, dtype=torch.int64, device=device),
        committed=torch.empty((0, num_drafts + 1), dtype=torch.int64, device=device),
        bonus_valid=torch.empty(0, dtype=torch.bool, device=device),
    )
