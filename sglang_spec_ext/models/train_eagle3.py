"""One training step and one validation of an EAGLE-3 draft."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from sglang_spec_ext.models.draft_regression import regress_projection
from sglang_spec_ext.models.draft_start import ContentPairs, aim_by_content
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Draft
from sglang_spec_ext.models.features import Batch, collate, draw_batch
from sglang_spec_ext.models.losses import Candidates, distill, teacher_probabilities
from sglang_spec_ext.models.text import Sample
from sglang_spec_ext.models.train_record import Progress, Validation

Tensor = torch.Tensor

SEQUENCES_PER_STEP = 6
# Rows that go on to the next draft step, as a share of those of the step before.
KEPT_PER_STEP = (0.6, 0.6, 0.6, 0.6)
REGRESSION_BATCHES = 16
CONTENT_BATCHES = 16
# One head of each group that shares keys looks for places like the present one.
CONTENT_HEADS = (2, 5, 8)


class Eagle3Trainer:
    """Unrolls an EAGLE-3 draft over sequences and forms its loss."""

    def __init__(self, draft: Eagle3Draft, samples: Sequence[Sample], *, head: Tensor) -> None:
        self.draft, self.samples = draft, samples
        self.head = head.float()[draft.common]  # the target's rows, for p

    def loss(self, rng: np.random.Generator, progress: Progress) -> tuple[Tensor, dict[str, float]]:
        """Return the mean loss over one step's rows and what a progress line shows."""
        batch = draw_batch(self.samples, self.draft.shape.taps, size=SEQUENCES_PER_STEP, rng=rng)
        starts, bases = self._draw_starts(batch, rng)
        outputs = self.draft.unroll(batch, starts)
        teacher_head = Candidates(self.head, torch.zeros(len(self.head)))
        draft_head = Candidates(self.draft.lm_head.weight, torch.zeros(len(self.head)))
        teacher = teacher_probabilities(batch.final.flatten(0, 1), teacher_head)
        hidden, rows, weight = [], [], []
        for step, (output, base) in enumerate(zip(outputs, bases, strict=True)):
            # step j of start s predicts the token after position s + j + 1
            position = base + step + 1
            valid = (base >= batch.prompt_len[:, None] - 1) & (position < batch.lengths[:, None])
            row = torch.arange(len(base))[:, None] * batch.tokens.shape[1] + position
            hidden.append(output[valid])
            rows.append(row[valid])
            # every step counts by the share of rows that it keeps, so one mean over all rows is enough
            weight.append(torch.ones(int(valid.sum())))
        weights = torch.cat(weight)
        result = distill(
            torch.cat(hidden),
            draft_head,
            teacher=teacher,
            teacher_rows=torch.cat(rows),
            weight=weights / weights.sum(),
            ce=progress.ce,
        )
        shown = {"overlap": float(result.overlap.mean()), "agree": float(result.agrees.float().mean())}
        return result.loss, shown

    def prepare(self, rng: np.random.Generator, *, final_norm: Tensor) -> float:
        """Start the layer from data: what it looks for, then its projections by least squares on first drafts.

        Returns the share of the target state's variance that is explained.
        """
        layer = self.draft.midlayer
        aim_by_content(layer.self_attn, CONTENT_HEADS, self._content_pairs(rng))
        with torch.no_grad():
            layer.mlp.down_proj.weight.zero_()
        for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
            found = regress_projection(
                self._runs(rng), projection=projection, reader=self.draft.norm, final_norm=final_norm
            )
        with torch.no_grad():
            # least squares shrinks what it cannot foresee; the norm would blow it up again
            self.draft.norm.weight.copy_(final_norm * found.scale)
        return found.explained

    @torch.no_grad()
    def _content_pairs(self, rng: np.random.Generator) -> ContentPairs:
        """Pair what a first draft's query knows with the state that the target has one token later."""
        parts = []
        for number in range(CONTENT_BATCHES):
            batch = draw_batch(self.samples, self.draft.shape.taps, size=SEQUENCES_PER_STEP, rng=rng)
            joined = self.draft.joined(batch.tokens[:, 1:], self.draft.fc(batch.taps[:, :-1]))
            later = torch.arange(1, joined.shape[1])
            valid = (later >= batch.prompt_len[:, None]) & (later + 1 < batch.lengths[:, None])
            key = joined[:, 1:].clone()
            key[..., : key.shape[-1] // 2] = 0.0  # the token after it, which is what is looked for
            sequence = torch.arange(len(joined))[:, None].expand(valid.shape) + number * SEQUENCES_PER_STEP
            parts.append((joined[:, :-1][valid], key[valid], sequence[valid], batch.tokens[:, 1:-1][valid]))
        return ContentPairs(*(torch.cat(part) for part in zip(*parts, strict=True)))

    def _runs(self, rng: np.random.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Run first drafts; yield which rows count and the target's states that they should foretell."""
        for _ in range(REGRESSION_BATCHES):
            batch = draw_batch(self.samples, self.draft.shape.taps, size=SEQUENCES_PER_STEP, rng=rng)
            base = torch.arange(batch.tokens.shape[1] - 1)[None].expand(len(batch.tokens), -1)
            self.draft.unroll(batch, [base])
            valid = (base >= batch.prompt_len[:, None] - 1) & (base + 1 < batch.lengths[:, None])
            yield valid, batch.final[:, 1:][valid]

    def _draw_starts(self, batch: Batch, rng: np.random.Generator) -> tuple[list[Tensor], list[Tensor]]:
        """Return, per step, indices into the step before, and the starts that they name."""
        size, length = batch.tokens.shape
        everything = torch.arange(length - 1)[None].expand(size, -1)
        starts, bases = [everything], [everything]
        low = batch.prompt_len[:, None].numpy() - 1
        room = (batch.lengths - batch.prompt_len)[:, None].numpy()
        count = int(room.max())
        for step, kept in enumerate(KEPT_PER_STEP):
            count = max(1, int(count * kept))
            if step == 0:
                index = low + (rng.random((size, count)) * room).astype(np.int64)
            else:
                index = rng.random((size, starts[-1].shape[1])).argsort(1)[:, :count]
            chosen = torch.from_numpy(np.ascontiguousarray(index))
            starts.append(chosen)
            bases.append(bases[-1].gather(1, chosen))
        return starts, bases


@torch.inference_mode()
def validate_eagle3(
    draft: Eagle3Draft, samples: Sequence[Sample], *, head: Tensor, num_drafts: int = 7, stride: int = 12
) -> Validation:
    """Measure an EAGLE-3 draft like `validate_block`; a token outside its vocabulary counts as a miss."""
    head = head.float()
    record = Validation.empty(num_drafts)
    for sample in samples:
        batch = collate([sample], draft.shape.taps)
        length, prompt_len = len(sample.tokens), sample.prompt_len
        base = torch.arange(prompt_len - 1, length - num_drafts - 1, stride)[None]
        if base.numel() == 0:
            continue
        same = torch.arange(base.shape[1])[None]
        starts = [torch.arange(length - 1)[None], base, *[same] * (num_drafts - 2)]
        outputs = draft.unroll(batch, starts)
        outputs[0] = outputs[0].gather(1, base[..., None].expand(-1, -1, outputs[0].shape[-1]))
        hidden = torch.stack([output[0] for output in outputs], 1)  # [n, drafts, hidden]
        logits = torch.full((*hidden.shape[:2], len(head)), float("-inf"))
        logits[..., draft.common] = draft.lm_head(hidden)
        position = base[0][:, None] + 1 + torch.arange(num_drafts)
        record.add(logits, batch.final[0][position] @ head.T, sample=sample, confidence=None)
    return record
