"""One training step and one validation of a block draft (DFlash, DSpark)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from sglang_spec_ext.models.draft_regression import Capture, regress_projection
from sglang_spec_ext.models.draft_start import (
    PEAK,
    ContentPairs,
    aim_by_content,
    aim_heads,
    aim_values,
    constant_probe,
    telling_directions,
)
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
PREPARING_BATCHES = 16
# Distances that heads look back to at the start: a mask at place k finds the anchor k and the newest context k + 1
# tokens back, hence the spread. The heads of CONTENT_HEADS look for places like the one that is foretold instead.
HEAD_DISTANCES = (0, 1, 2, 0, 0, 1, 0, 3, 0)
CONTENT_HEADS = (4, 6, 8)
# The heads of a group look alike and divide among them what the context tells.
VALUE_GROUPS = ((0, 3), (1, 5), (2, 7), CONTENT_HEADS)


@dataclass(frozen=True)
class Rows:
    """What a step trains on: a batch, its anchors [size, n], and rows with the draft's outputs.

    `position` [size, rows] is the place in the text that a row reads as its newest token: draft d of anchor a
    proposes the token after position a + d. `valid` [size, rows] bool; `hidden` [size, rows, hidden].
    """

    batch: Batch
    anchors: Tensor
    position: Tensor
    valid: Tensor
    hidden: Tensor


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
        drawn = self._forward(rng)
        batch, hidden, position, valid = drawn.batch, drawn.hidden, drawn.position, drawn.valid
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
            # its slope reaches the layers: the head is linear, so what tells good drafts from bad must be in the state
            logit = self.draft.confidence_logit(hidden, latent)
            loss = loss + functional.binary_cross_entropy_with_logits(logit, result.overlap.clamp(0, 1))
        return loss, shown

    def prepare(self, rng: np.random.Generator, *, final_norm: Tensor) -> float:
        """Start the layers from data, one after the other: where they look, what they carry, what they add.

        Every layer's output is made the best linear guess of the target's state. Returns the share of that
        state's variance that the last layer explains.
        """
        draft, layers = self.draft, list(self.draft.layers)
        telling = self._telling(rng)
        readers = [*(layer.input_layernorm for layer in layers[1:]), draft.norm]
        for index, (layer, reader) in enumerate(zip(layers, readers, strict=True)):
            self._aim(index, rng, telling)
            with torch.no_grad():
                layer.mlp.down_proj.weight.zero_()
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                runs = self._runs(rng, of_blocks=index + 1 < len(layers))
                found = regress_projection(runs, projection=projection, reader=reader, final_norm=final_norm)
        with torch.no_grad():
            # least squares shrinks what it cannot foresee; the norm would blow it up again
            draft.norm.weight.copy_(final_norm * found.scale)
        return found.explained

    @torch.no_grad()
    def _telling(self, rng: np.random.Generator) -> Tensor:
        """Return the directions of projected features that tell most of the target's state at their position."""
        parts = []
        for _ in range(PREPARING_BATCHES):
            batch = draw_batch(self.samples, self.draft.shape.taps, size=SEQUENCES_PER_STEP, rng=rng)
            place = torch.arange(batch.tokens.shape[1])
            valid = (place >= batch.prompt_len[:, None] - 1) & (place < batch.lengths[:, None])
            parts.append((self.draft.hidden_norm(self.draft.fc(batch.taps[valid])), batch.final[valid]))
        rows, target = (torch.cat(part) for part in zip(*parts, strict=True))
        return telling_directions(rows, target, rows.shape[1])

    @torch.no_grad()
    def _aim(self, index: int, rng: np.random.Generator, telling: Tensor) -> None:
        """Aim the heads of layer `index`: some at distances, some at context like that of the row's position.

        The row does not see that context. Before the first layer a mask knows nothing, so that layer's pairs are
        those of anchors.
        """
        draft, layer = self.draft, self.draft.layers[index]
        inputs, features = Capture(layer.input_layernorm), Capture(draft.hidden_norm)
        blocks, contexts, pairs = [], [], []
        for number in range(PREPARING_BATCHES):
            rows = self._forward(rng)
            token = rows.batch.tokens.gather(1, rows.position)
            which = torch.arange(len(token))[:, None]
            context = draft.hidden_norm(features.values[-1])[which, rows.position]
            query = layer.input_layernorm(inputs.values[-1] if index else draft.embedding[token])
            sequence = (which + number * len(token)).expand(token.shape)
            pairs.append(tuple(part[rows.valid] for part in (query, context, sequence, token)))
            blocks.append(layer.input_layernorm(inputs.values[0]).flatten(0, 2)[::4])
            contexts.append(context[rows.valid])
            inputs.values.clear()
            features.values.clear()
        inputs.stop()
        features.stop()
        # with normed queries and keys, a perfect match has the logit sqrt(head_dim) times this
        layer.self_attn.q_norm.weight.fill_(PEAK / layer.self_attn.head_dim**0.5)
        block = torch.cat(blocks)
        keys = torch.cat([block, *contexts])  # a row looks at context and at its own block alike
        aim_heads(
            layer.self_attn,
            query_rows=block,
            key_rows=keys,
            distances=HEAD_DISTANCES,
            theta=draft.target.rope_theta,
        )
        found = ContentPairs(*(torch.cat(part) for part in zip(*pairs, strict=True)))
        aim_by_content(layer.self_attn, CONTENT_HEADS, found)
        aim_values(layer.self_attn, VALUE_GROUPS, telling)
        # one value channel is 1 for whatever a row looks at: what it adds is a constant
        layer.self_attn.v_proj.weight[0] = constant_probe(keys)

    def _runs(self, rng: np.random.Generator, *, of_blocks: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Run the draft; yield which rows count and the target's states, for whole blocks or for the drawn rows."""
        shape = self.draft.shape
        for _ in range(PREPARING_BATCHES):
            rows = self._forward(rng)
            position, valid = rows.position, rows.valid
            if of_blocks:
                # DFlash does not read the anchor's own row: there it guesses as the first mask does
                place = (torch.arange(shape.block) - shape.first_row).clamp(min=0)
                position = rows.anchors[..., None] + place
                valid = position < rows.batch.lengths[:, None, None]
                position = position.clamp(max=rows.batch.tokens.shape[1] - 1)
            which = torch.arange(len(position)).view(-1, *[1] * (position.ndim - 1))
            yield valid, rows.batch.final[which, position][valid]

    def _forward(self, rng: np.random.Generator) -> Rows:
        """Draw a batch and its rows, and run the draft over them."""
        shape = self.draft.shape
        batch = draw_batch(self.samples, shape.taps, size=SEQUENCES_PER_STEP, rng=rng)
        anchors, owner, drafts, valid = self._draw_rows(batch, rng)
        hidden = self.draft.hidden(batch, anchors=anchors, owner=owner, places=drafts + shape.first_row)
        position = (anchors.gather(1, owner) + drafts).clamp(max=batch.tokens.shape[1] - 1)
        return Rows(batch, anchors, position, valid, hidden)

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
    draft: BlockDraft,
    samples: Sequence[Sample],
    *,
    head: Tensor,
    stride: int = 12,
    batch_size: int = 8,
    keep_features: bool = False,
) -> Validation:
    """Measure a block draft on whole texts, over the full vocabulary, with the target's own tokens as prefix.

    With an accepted prefix the tokens before a place are the target's, so this gives the greedy acceptance
    exactly for texts that were decoded greedily, and the sampled one in expectation for the others. `keep_features`
    keeps what the confidence head reads.
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
                if keep_features:
                    record.features.append(draft.confidence_features(hidden[row, keep], latent))
            record.add(logits, batch.final[row][position] @ head.T, sample=sample, confidence=confidence)
    return record
