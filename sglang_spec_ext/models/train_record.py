"""What a training knows about where it stands, and what a validation measured."""

import math
from dataclasses import dataclass, field

import torch

from sglang_spec_ext.models.text import Sample

Tensor = torch.Tensor

WARMUP_STEPS = 30
FINAL_LR = 0.02
# The share of cross entropy falls from 1 to 0.1: total variation alone has no slope where p and q are apart.
CE_FULL_UNTIL, CE_LOW_FROM, CE_LOW = 0.3, 0.7, 0.1


@dataclass(frozen=True)
class Progress:
    """The part of a training that is done, 0 to 1, and the schedules that hang on it."""

    done: float
    step: int = WARMUP_STEPS

    @property
    def lr_factor(self) -> float:
        """Linear warm-up, then a cosine down to FINAL_LR."""
        warm = min(1.0, (self.step + 1) / WARMUP_STEPS)
        return warm * (FINAL_LR + (1 - FINAL_LR) * 0.5 * (1 + math.cos(math.pi * self.done)))

    @property
    def ce(self) -> float:
        """The share of cross entropy in the loss."""
        fallen = (self.done - CE_FULL_UNTIL) / (CE_LOW_FROM - CE_FULL_UNTIL)
        return 1.0 - (1.0 - CE_LOW) * min(1.0, max(0.0, fallen))


@dataclass
class Validation:
    """Per draft place: greedy agreement and overlap 1 - TV, one row per anchor.

    `agrees` holds [n, drafts] bool of greedy texts; `overlap` [n, drafts] of sampled texts; `confidence`
    [n, drafts] logits beside `overlap` of all texts, with `greedy` [n] bool telling the two apart; `features`
    [n, drafts, f] what the confidence head read, where that is kept.
    """

    num_drafts: int
    agrees: list[Tensor] = field(default_factory=list)
    overlap: list[Tensor] = field(default_factory=list)
    confidence: list[Tensor] = field(default_factory=list)
    greedy: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)

    @classmethod
    def empty(cls, num_drafts: int) -> "Validation":
        """Return a record without rows."""
        return cls(num_drafts)

    def add(self, draft: Tensor, target: Tensor, *, sample: Sample, confidence: Tensor | None) -> None:
        """Add the blocks of one text: draft and target logits [n, drafts, vocab]."""
        self.agrees.append(draft.argmax(-1) == target.argmax(-1))
        self.overlap.append(torch.minimum(draft.softmax(-1), target.softmax(-1)).sum(-1))
        self.greedy.append(torch.full((len(draft),), sample.temperature == 0))
        if confidence is not None:
            self.confidence.append(confidence)

    @property
    def greedy_accept_len(self) -> float:
        """Mean accept length with bonus on greedily decoded texts."""
        rows = torch.cat(self.agrees)[torch.cat(self.greedy)]
        return 1.0 + float(rows.float().cumprod(-1).sum(-1).mean())

    @property
    def sampled_accept_len(self) -> float:
        """Expected accept length with bonus at temperature 1 on sampled texts."""
        rows = torch.cat(self.overlap)[~torch.cat(self.greedy)]
        return 1.0 + float(rows.cumprod(-1).sum(-1).mean())

    @property
    def greedy_rates(self) -> list[float]:
        """Acceptance of each place given that the earlier ones were accepted, greedy texts."""
        reached = torch.cat(self.agrees)[torch.cat(self.greedy)].float().cumprod(-1).mean(0)
        before = torch.cat([torch.ones(1), reached[:-1]])
        return (reached / before.clamp(min=1e-9)).tolist()

    def fitted(self, half: int) -> tuple[Tensor, Tensor]:
        """Return features [n, drafts, f] of a half of the texts, and the chance [n, drafts] that a draft is accepted.

        The halves are those of `survival`, so that what was fitted on one is judged on texts of the other alone.
        """
        texts = [*self._texts(greedy=False, half=half), *self._texts(greedy=True, half=half)]
        features, accepted = ([part[i] for i in texts] for part in (self.features, self.overlap))
        return torch.cat(features), torch.cat(accepted).clamp(0.0, 1.0)

    def rescore(self, weight: Tensor, bias: Tensor) -> None:
        """Take the confidence logits of another head: `weight` [f], `bias` []."""
        self.confidence = [features @ weight + bias for features in self.features]

    def survival(self, *, greedy: bool, half: int) -> tuple[Tensor, Tensor]:
        """Return confidence logits and the survival that they should predict, [n, drafts] float32 each.

        `half` 0 or 1 takes every other text: rows of one text are alike, so no text is in both.
        On greedy texts survival is 0 or 1; on sampled ones it is the product of acceptance probabilities.
        """
        texts = self._texts(greedy=greedy, half=half)
        accepted = torch.cat([(self.agrees if greedy else self.overlap)[i] for i in texts]).float()
        return torch.cat([self.confidence[i] for i in texts]), accepted.cumprod(-1)

    def _texts(self, *, greedy: bool, half: int) -> list[int]:
        return [i for i, rows in enumerate(self.greedy) if bool(rows[0]) == greedy][half::2]
