"""The block drafts: DFlash and DSpark, as SGLang serves them, in a form that trains quickly on a CPU.

A block is the last accepted token (the anchor, at position a) and masks after it. Every layer attends,
without a causal mask inside the block, to keys made from projected target features of the positions before
a and to the block's own keys. DSpark reads token a + 1 + k off the block's place k; DFlash reads token a + k
off place k and drops the anchor's own output. Source: `srt/models/dflash.py`, `srt/models/dspark.py`.

Only the last layer is evaluated row by row, for the (anchor, place) pairs that a step trains: with one layer
this costs a seventh of whole blocks, and late places, which are seldom reached, can be drawn less often.
"""

from dataclasses import dataclass

import torch
from torch import nn

from sglang_spec_ext.models.draft_modules import (
    MLP,
    Projections,
    RMSNorm,
    ScaledFeatures,
    attend_two_parts,
    init_linear,
)
from sglang_spec_ext.models.draft_start import Start
from sglang_spec_ext.models.features import Batch
from sglang_spec_ext.models.target import TargetConfig

Tensor = torch.Tensor


@dataclass(frozen=True)
class BlockShape:
    """What a block draft looks like.

    `block` is the number of tokens that go through the layers; `first_row` is the first place whose output
    is used: 0 for DSpark, 1 for DFlash. `markov_rank` 0 means no Markov and no confidence head.
    """

    taps: tuple[int, ...]
    num_layers: int
    intermediate_size: int
    num_kv_heads: int
    block: int
    first_row: int
    mask_token_id: int
    markov_rank: int = 0

    @property
    def num_drafts(self) -> int:
        """Tokens that one block proposes."""
        return self.block - self.first_row


class Layer(nn.Module):
    """One Qwen3-style layer: norm, attention with per-head query and key norms, norm, MLP."""

    def __init__(self, target: TargetConfig, shape: BlockShape) -> None:
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Projections(
            input_width=hidden,
            hidden=hidden,
            heads=target.num_attention_heads,
            kv_heads=shape.num_kv_heads,
            head_dim=target.head_dim,
            eps=eps,
            norms=True,
        )
        self.mlp = MLP(hidden, shape.intermediate_size)


class MarkovHead(nn.Module):
    """Rank-r bias from the token before; rows for the common tokens and one shared row for all others."""

    def __init__(self, num_common: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(num_common + 1, rank)
        self.markov_w2 = nn.Linear(rank, num_common + 1, bias=False)


class BlockDraft(nn.Module):
    """A DFlash or DSpark draft over a borrowed, frozen embedding.

    `common` [c] are the tokens with Markov rows of their own; `embedding` [vocab, hidden] is the target's.
    """

    def __init__(self, shape: BlockShape, target: TargetConfig, *, embedding: Tensor, common: Tensor) -> None:
        super().__init__()
        self.shape, self.target = shape, target
        hidden = target.hidden_size
        self.fc = ScaledFeatures(len(shape.taps) * hidden, hidden)
        self.hidden_norm = RMSNorm(hidden, target.rms_norm_eps)
        self.layers = nn.ModuleList(Layer(target, shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(hidden, target.rms_norm_eps)
        if shape.markov_rank:
            self.markov_head = MarkovHead(len(common), shape.markov_rank)
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(hidden + shape.markov_rank, 1)})
        markov_row = torch.full((target.vocab_size,), len(common))
        markov_row[common] = torch.arange(len(common))
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("markov_row", markov_row, persistent=False)

    def initialise(self, start: Start, *, seed: int) -> None:
        """Seeded start: averaged taps, random layers; what depends on text is the trainer's to prepare."""
        generator = torch.Generator().manual_seed(seed)
        init_linear(self, generator)
        with torch.no_grad():
            self.fc.average(start.features)
            if self.shape.markov_rank:
                # a zero product with gradients on one side: the bias starts at nothing
                self.markov_head.markov_w1.weight.normal_(0.0, 1.0, generator=generator)
                self.markov_head.markov_w2.weight.zero_()
                self.confidence_head["proj"].weight.zero_()
                self.confidence_head["proj"].bias.zero_()

    def hidden(self, batch: Batch, *, anchors: Tensor, owner: Tensor, places: Tensor) -> Tensor:
        """Return normed outputs [size, rows, hidden].

        `anchors` [size, n] are positions of anchor tokens; row r of a sequence is place `places` [size, rows]
        of the block of anchor `owner` [size, rows] (an index into `anchors`).
        """
        size, num_anchors = anchors.shape
        steps = torch.arange(self.shape.block)
        tokens = batch.tokens.gather(1, anchors)
        mask = self.embedding[self.shape.mask_token_id].expand(size, num_anchors, self.shape.block - 1, -1)
        x = torch.cat([self.embedding[tokens][:, :, None], mask], 2)  # [size, n, block, hidden]
        positions = anchors[..., None] + steps  # [size, n, block]
        context = self.hidden_norm(self.fc(batch.taps))  # [size, length, hidden]
        before = torch.arange(batch.tokens.shape[1]) < anchors[..., None]  # [size, n, length]
        which = torch.arange(size)[:, None]
        for index, layer in enumerate(self.layers):
            last = index == len(self.layers) - 1
            keys = self._keys(layer, context=context, x=x, positions=positions, same_masks=index == 0)
            if last:
                rows, row_positions = x[which, owner, places], positions[which, owner, places]
                visible, own = before[which, owner], (keys[2][which, owner], keys[3][which, owner])
            else:
                rows, row_positions = x.flatten(1, 2), positions.flatten(1)
                visible = before.repeat_interleave(self.shape.block, 1)
                own = tuple(part.repeat_interleave(self.shape.block, 1) for part in keys[2:])
            query = layer.self_attn.query(layer.input_layernorm(rows), row_positions, self.target.rope_theta)
            mixed = attend_two_parts(query, context=keys[:2], visible=visible, own=own)
            rows = rows + layer.self_attn.o_proj(mixed)
            rows = rows + layer.mlp(layer.post_attention_layernorm(rows))
            x = rows if last else rows.unflatten(1, (num_anchors, self.shape.block))
        return self.norm(x)

    def _keys(
        self, layer: Layer, *, context: Tensor, x: Tensor, positions: Tensor, same_masks: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (context key, value [size, length, kv, d], block key, value [size, n, block, kv, d])."""
        attention, theta = layer.self_attn, self.target.rope_theta
        far_key, far_value = attention.key_value(context)
        far_key = attention.rotate(far_key, torch.arange(context.shape[1])[None], theta)
        if same_masks:  # before the first layer all masks are one vector
            normed = layer.input_layernorm(x[:, :, :2])
            parts = attention.key_value(normed)
            spread = [0] + [1] * (self.shape.block - 1)
            near_key, near_value = (part[:, :, spread] for part in parts)
        else:
            near_key, near_value = attention.key_value(layer.input_layernorm(x))
        return far_key, far_value, attention.rotate(near_key, positions, theta), near_value

    def latent(self, previous: Tensor) -> Tensor:
        """Return the Markov latent [..., rank] of the tokens before."""
        return self.markov_head.markov_w1(self.markov_row[previous])

    def markov_out(self, tokens: Tensor) -> Tensor:
        """Return the Markov output rows [n, rank] of candidate tokens."""
        return self.markov_head.markov_w2.weight[self.markov_row[tokens]]

    def confidence_logit(self, hidden: Tensor, latent: Tensor) -> Tensor:
        """Return the logit of 'this draft is accepted, given that the earlier ones were', [...]."""
        return self.confidence_head["proj"](self.confidence_features(hidden, latent))[..., 0]

    @staticmethod
    def confidence_features(hidden: Tensor, latent: Tensor) -> Tensor:
        """Return what the confidence head reads, [..., hidden + rank]."""
        return torch.cat([hidden, latent], -1)
