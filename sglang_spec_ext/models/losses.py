"""Distillation loss of a draft row against the target's distribution, with its gradient in closed form.

Loss of one row (DSpark paper, section on training): ce * CE(p, q) + (1 - ce) * TV(p, q), where p is the
target's and q the draft's distribution over a candidate set and TV = half the L1 distance; 1 - TV is the
chance that rejection sampling accepts a draft drawn from q. The candidate set is the tokens that the target
really uses plus a few sampled rare ones, whose logits carry log(number they stand for), in p and q alike,
so that both normalisers estimate the one over the whole vocabulary.

The [rows, candidates] matrix is never kept for the backward pass: rows go through in chunks, each chunk's
gradient is formed at once, and what is kept has the size of the inputs.
"""

from dataclasses import dataclass

import torch
from torch.autograd.function import FunctionCtx

Tensor = torch.Tensor
CHUNK_ROWS = 512


@dataclass(frozen=True)
class DistillResult:
    """Summed loss (scalar, differentiable) and per row: overlap 1 - TV, and whether the argmaxes agree."""

    loss: Tensor
    overlap: Tensor  # [rows] float32
    agrees: Tensor  # [rows] bool


@dataclass(frozen=True)
class Candidates:
    """The token set that a loss is computed over.

    `head` [c, hidden] are the rows that make logits (a Parameter for a draft with its own head);
    `log_count` [c] is added to every logit: log of how many tokens a candidate stands for.
    """

    head: Tensor
    log_count: Tensor


def teacher_probabilities(final: Tensor, candidates: Candidates) -> Tensor:
    """Return p [positions, c] float32 from the target's normed last hidden states [positions, hidden]."""
    return torch.addmm(candidates.log_count, final, candidates.head.T).softmax(-1)


def distill(
    hidden: Tensor,
    candidates: Candidates,
    *,
    teacher: Tensor,
    teacher_rows: Tensor,
    weight: Tensor,
    ce: float,
    latent: Tensor | None = None,
    markov_out: Tensor | None = None,
) -> DistillResult:
    """Return the weighted sum of row losses.

    `hidden` [rows, hidden] are the draft's normed outputs; `teacher` [positions, c] and `teacher_rows`
    [rows] name each row's p; `weight` [rows] may hold zeros for padding. With a Markov head the logits
    gain latent [rows, rank] @ markov_out [c, rank].T.
    """
    if latent is None:
        latent, markov_out = hidden.new_zeros(len(hidden), 0), hidden.new_zeros(len(candidates.head), 0)
    loss, overlap, agrees = _Distill.apply(
        hidden, candidates.head, latent, markov_out, candidates.log_count, teacher, teacher_rows, weight, ce
    )
    return DistillResult(loss, overlap, agrees)


class _Distill(torch.autograd.Function):
    """Forward also forms the gradients, since q is at hand only there."""

    @staticmethod
    def forward(  # noqa: PLR0913, PLR0917 - autograd hands its inputs over one by one
        ctx: FunctionCtx,
        hidden: Tensor,
        head: Tensor,
        latent: Tensor,
        markov_out: Tensor,
        log_count: Tensor,
        teacher: Tensor,
        teacher_rows: Tensor,
        weight: Tensor,
        ce: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        d_hidden, d_latent = torch.empty_like(hidden), torch.empty_like(latent)
        d_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        d_markov = torch.zeros_like(markov_out)
        loss = hidden.new_zeros(())
        overlap, agrees = hidden.new_empty(len(hidden)), torch.empty(len(hidden), dtype=torch.bool)
        has_markov = latent.shape[1] > 0
        for start in range(0, len(hidden), CHUNK_ROWS):
            rows = slice(start, start + CHUNK_ROWS)
            logits = torch.addmm(log_count, hidden[rows], head.T)
            if has_markov:
                logits.addmm_(latent[rows], markov_out.T)
            log_q = logits.log_softmax(-1)
            p, q = teacher[teacher_rows[rows]], log_q.exp()
            side = (q - p).sign_().mul_(0.5)  # d TV / d q
            tv = torch.linalg.vecdot(side, q - p)
            cross = -torch.linalg.vecdot(p, log_q)
            loss += (weight[rows] * (ce * cross + (1 - ce) * tv)).sum()
            overlap[rows], agrees[rows] = 1 - tv, p.argmax(-1) == q.argmax(-1)
            # d CE / d logits = q - p;  d TV / d logits = q * (side - <q, side>)
            slope = side.sub_(torch.linalg.vecdot(q, side)[:, None]).mul_(q).mul_(1 - ce)
            slope.add_(q, alpha=ce).sub_(p, alpha=ce).mul_(weight[rows, None])
            d_hidden[rows] = slope @ head
            if has_markov:
                d_latent[rows] = slope @ markov_out
                d_markov.addmm_(slope.T, latent[rows])
            if d_head is not None:
                d_head.addmm_(slope.T, hidden[rows])
        ctx.save_for_backward(d_hidden, d_head, d_latent, d_markov)
        ctx.mark_non_differentiable(overlap, agrees)
        return loss, overlap, agrees

    @staticmethod
    def backward(ctx: FunctionCtx, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if value is None else value * d_loss for value in ctx.saved_tensors]
        return (*scaled, None, None, None, None, None)
