"""One training step and one validation of a block draft (DFlash, DSpark)."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.nn import functional

from sglang_spec_ext.models.draft_regression import regress_last_projection
from sglang_spec_ext.models.drafts_block import BlockDraft
from sglang_spec_ext.models.features import Batch, collate, draw_batch
from sglang_spec_ext.models.losses import Candidates, distill, teacher_probabilities
from sglang_spec_ext.models.text import Sample
from sglang_spec_ext.models.train_record import Progress, Validation

Tensor = torch.Tensor

SEQUENCES_PER_STEP = 8
ROWS_PER_SEQUENCE = 128
# Place d is drawn with weight exp(-d / DECAY): late places are reached seldom, so they earn little.
DECAY = 2.0
# Tokens outside the common ones that a step samples, to keep their logits down.
NUM_RARE = 512


class BlockTrainer:
    """Draws rows and forms the loss of a block draft."""

    def __init__(self, draft: BlockDraft, samples: Sequence[Sample], *, common: Tensor, head: Tensor) -> None:
        self.draft, self.samples = draft, samples
        self.head = head.float()  # [vocab, hidden], the target's
        self.common = common
        is_common = torch.zeros(len(head), dtype=torch.bool)
        is_common[common] = True
        self.rare = (~is_common).nonzero()[:, 0]

    def loss(self, rng: np.random.Generator, progress: Progress) -> tuple[Tensor, dict[str, float]]:
        """Return the mean loss over one step's rows and what a progress line shows."""
        shape = self.draft.shape
        batch, hidden, position, valid = self._forward(rng)
        flat = (torch.arange(len(hidden))[:, None] * batch.tokens.shape[1] + position)[valid]
        used, teacher_rows = flat.unique(return_inverse=True)
        chosen = self.rare[torch.from_numpy(rng.choice(len(self.rare), NUM_RARE, replace=False))]
        tokens = torch.cat([self.common, chosen])
        log_count = torch.zeros(len(tokens))
        log_count[len(self.common) :] = float(np.log(len(self.rare) / NUM_RARE))
        candidates = Candidates(self.head[tokens], log_count)
        teacher = teacher_probabilities(batch.final.flatten(0, 1)[used], candidates)
        hidden = hidden[valid]
        latent = markov_out = None
        if shape.markov_rank:
            latent = self.draft.latent(batch.tokens.gather(1, position)[valid])
            markov_out = self.draft.markov_out(tokens)
        weight = torch.full((len(hidden),), 1.0 / len(hidden))
        result = distill(
            hidden,
            candidates,
            teacher=teacher,
            teacher_rows=teacher_rows,
            weight=weight,
            ce=progress.ce,
            latent=latent,
            markov_out=markov_out,
        )
        loss = result.loss
        shown = {"overlap": float(result.overlap.mean()), "agree": float(result.agrees.float().mean())}
        if latent is not None:
            logit = self.draft.confidence_logit(hidden.detach(), latent.detach())
            loss = loss + functional.binary_cross_entropy_with_logits(logit, result.overlap.clamp(0, 1))
        return loss, shown

    def regress(self, rng: np.random.Generator, *, final_norm: Tensor, num_batches: int = 24) -> float:
        """Start the last projection by least squares; returns the explained share of variance."""

        def runs() -> Iterator[tuple[Tensor, Tensor]]:
            for _ in range(num_batches):
                batch, _, position, valid = self._forward(rng)
                which = torch.arange(len(position))[:, None]
                yield valid, batch.final[which, position][valid]

        return regress_last_projection(
            runs(), down=self.draft.layers[-1].mlp.down_proj, norm=self.draft.norm, final_norm=final_norm
        )

    def _forward(self, rng: np.random.Generator) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """Draw a batch; return it, the outputs [size, rows, hidden], each row's position and validity.

        Draft d of anchor a proposes the token after position a + d.
        """
        shape = self.draft.shape
        batch = draw_batch(self.samples, shape.taps, size=SEQUENCES_PER_STEP, rng=rng)
        anchors, owner, drafts, valid = self._draw_rows(batch, rng)
        hidden = self.draft.hidden(batch, anchors=anchors, owner=owner, places=drafts + shape.first_row)
        position = (anchors.gather(1, owner) + drafts).clamp(max=batch.tokens.shape[1] - 1)
        return batch, hidden, position, valid

    def _draw_rows(self, batch: Batch, rng: np.random.Generator) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return anchors [size, n], owner and draft index [size, rows] int64, and valid [size, rows] bool."""
        shape, size = self.draft.shape, len(batch.tokens)
        # before its last layer a deeper draft pays for whole blocks, so several rows share an anchor
        sharing = 1 if shape.num_layers == 1 else 4
        num_anchors = ROWS_PER_SEQUENCE // sharing
        room = (batch.lengths - batch.prompt_len)[:, None].numpy()
        anchors = batch.prompt_len[:, None].numpy() + (rng.random((size, num_anchors)) * room).astype(np.int64)
        odds = np.exp(-np.arange(shape.num_drafts) / DECAY)
        drafts = rng.choice(shape.num_drafts, (size, ROWS_PER_SEQUENCE), p=odds / odds.sum())
        owner = np.broadcast_to(np.arange(ROWS_PER_SEQUENCE) // sharing, drafts.shape)
        anchors, owner, drafts = (torch.from_numpy(np.ascontiguousarray(part)) for part in (anchors, owner, drafts))
        valid = anchors.gather(1, owner) + drafts < batch.lengths[:, None]
        return anchors, owner, drafts, valid


@torch.inference_mode()
def validate_block(
    draft: BlockDraft, samples: Sequence[Sample], *, head: Tensor, stride: int = 12, batch_size: int = 8
) -> Validation:
    """Measure a block draft on whole texts, over the full vocabulary, with the target's own tokens as prefix.

    With an accepted prefix the tokens before a place are the target's, so this gives the greedy acceptance
    exactly for texts that were decoded greedily, and the sampled one in expectation for the others.
    """
    shape, head = draft.shape, head.float()
    markov_out = draft.markov_out(torch.arange(len(head))) if shape.markov_rank else None
    record = Validation.empty(shape.num_drafts)
    for start in range(0, len(samples), batch_size):
        part = samples[start : start + batch_size]
        batch = collate(part, shape.taps)
        count = int((batch.lengths - batch.prompt_len).max())
        anchors = batch.prompt_len[:, None] + torch.arange(0, count, stride)[None]
        complete = anchors + shape.num_drafts <= batch.lengths[:, None]
        anchors = anchors.clamp(max=batch.tokens.shape[1] - 1)
        places = torch.arange(shape.num_drafts).repeat(anchors.shape[1])[None].expand(len(part), -1)
        owner = torch.arange(anchors.shape[1]).repeat_interleave(shape.num_drafts)[None].expand(len(part), -1)
        hidden = draft.hidden(batch, anchors=anchors, owner=owner, places=places + shape.first_row)
        hidden = hidden.unflatten(1, (-1, shape.num_drafts))
        for row, sample in enumerate(part):
            keep = complete[row]
            if not bool(keep.any()):
                continue
            position = anchors[row, keep][:, None] + torch.arange(shape.num_drafts)
            logits = hidden[row, keep] @ head.T
            confidence = None
            if markov_out is not None:
                latent = draft.latent(batch.tokens[row][position])
                logits += latent @ markov_out.T
                confidence = draft.confidence_logit(hidden[row, keep], latent)
            record.add(logits, batch.final[row][position] @ head.T, sample=sample, confidence=confidence)
    return record
