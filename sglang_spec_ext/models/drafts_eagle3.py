"""The EAGLE-3 draft, as SGLang serves it, with its training-time test in parallel over a whole sequence.

Position s holds the pair (state of position s, embedding of token s + 1) and predicts token s + 2. In step 0
the state is the projected target feature; in step j it is the draft's own output of step j - 1 for the same
start s, at position s + j. A query of step j sees the step-0 keys up to s and its own later keys, which is
what the engine's cache holds after a verification. Source: `srt/models/llama_eagle3.py`; EAGLE-3 paper.
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
from sglang_spec_ext.models.draft_start import Start, aim_heads, constant_probe
from sglang_spec_ext.models.features import Batch
from sglang_spec_ext.models.target import TargetConfig

Tensor = torch.Tensor
TAPS_BESIDE_MEAN = 0.3
# The token just read reaches the draft through attention alone: in each group of heads that share values, one
# starts at its own position. Those values start by reading the embedding more than the state.
HEAD_DISTANCES = (0, 1, 2, 0, 1, 3, 0, 2, 4)
STATE_BESIDE_EMBEDDING = 0.3


@dataclass(frozen=True)
class Eagle3Shape:
    """What an EAGLE-3 draft looks like: tapped layers, MLP width and size of its own vocabulary."""

    taps: tuple[int, ...]
    intermediate_size: int
    draft_vocab_size: int


class Midlayer(nn.Module):
    """The one layer: attention reads [normed embedding ; normed state], the residual is the state."""

    def __init__(self, target: TargetConfig, intermediate_size: int) -> None:
        super().__init__()
        hidden, eps = target.hidden_size, target.rms_norm_eps
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.self_attn = Projections(
            input_width=2 * hidden,
            hidden=hidden,
            heads=target.num_attention_heads,
            kv_heads=target.num_key_value_heads,
            head_dim=target.head_dim,
            eps=eps,
            norms=False,
        )
        self.mlp = MLP(hidden, intermediate_size)


class Eagle3Draft(nn.Module):
    """An EAGLE-3 draft with a vocabulary and head of its own; `common` [draft_vocab] are its tokens."""

    def __init__(self, shape: Eagle3Shape, target: TargetConfig, *, embedding: Tensor, common: Tensor) -> None:
        super().__init__()
        self.shape, self.target = shape, target
        hidden = target.hidden_size
        self.fc = ScaledFeatures(len(shape.taps) * hidden, hidden)
        self.midlayer = Midlayer(target, shape.intermediate_size)
        self.norm = RMSNorm(hidden, target.rms_norm_eps)
        self.lm_head = nn.Linear(hidden, shape.draft_vocab_size, bias=False)
        # the target's own rows stay: training them costs a fifth of a step, and little text would spoil rare ones
        self.lm_head.requires_grad_(False)
        self.register_buffer("embedding", embedding.float(), persistent=False)
        self.register_buffer("common", common, persistent=False)

    def initialise(self, start: Start, *, seed: int) -> None:
        """Seeded start: a state that is the target's mean state plus the taps, averaged per channel at unit
        scale and quieter; the target's head rows.
        """
        init_linear(self, torch.Generator().manual_seed(seed))
        mean_state, output_scale = start.mean_state()
        with torch.no_grad():
            self.fc.average(start.features)
            always = constant_probe(start.features / self.fc.scale)
            self.fc.weight.mul_(TAPS_BESIDE_MEAN).add_(torch.outer(mean_state, always))
            self._aim_heads(start)
            self.midlayer.mlp.down_proj.weight.mul_(TAPS_BESIDE_MEAN)
            self.norm.weight.copy_(start.final_norm * output_scale)
            self.lm_head.weight.copy_(start.head[self.common])

    def _aim_heads(self, start: Start) -> None:
        layer = self.midlayer
        # any tokens will do: what matters is which directions all of them share
        tokens = self.common[torch.arange(len(start.features)) % len(self.common)]
        joined = torch.cat(
            [layer.input_layernorm(self.embedding[tokens]), layer.hidden_norm(self.fc(start.features))], -1
        )
        aim_heads(
            layer.self_attn,
            query_rows=joined,
            key_rows=joined,
            distances=HEAD_DISTANCES,
            theta=self.target.rope_theta,
        )
        layer.self_attn.v_proj.weight[:, self.target.hidden_size :] *= STATE_BESIDE_EMBEDDING

    def joined(self, token: Tensor, state: Tensor) -> Tensor:
        """Return what attention reads [..., 2 * hidden] at a state [..., hidden] and the token after it [...]."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(self.embedding[token]), layer.hidden_norm(state)], -1)

    def unroll(self, batch: Batch, starts: list[Tensor]) -> list[Tensor]:
        """Return the normed outputs of every step, [size, rows_j, hidden].

        `starts[0]` [size, length - 1] must be all positions in order, since they fill the cache; a later
        `starts[j]` [size, rows_j] names places in `starts[j - 1]` (indices along its second axis).
        """
        layer, theta = self.midlayer, self.target.rope_theta
        which = torch.arange(len(batch.tokens))[:, None]
        position = starts[0]
        state = self.fc(batch.taps[:, :-1])
        base = position  # the start of each row that is still alive
        cache: tuple[Tensor, Tensor] | None = None
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []
        outputs = []
        for step, chosen in enumerate(starts):
            if step:
                state, base = state[which, chosen], base[which, chosen]
                own_keys = [part[which, chosen] for part in own_keys]
                own_values = [part[which, chosen] for part in own_values]
                position = base + step
            # a start near the end runs past the text: its rows carry no weight
            token = batch.tokens.gather(1, (position + 1).clamp(max=batch.tokens.shape[1] - 1))
            joined = self.joined(token, state)
            query = layer.self_attn.query(joined, position, theta)
            key, value = layer.self_attn.key_value(joined)
            key = layer.self_attn.rotate(key, position, theta)
            if cache is None:
                cache = (key, value)
                own = (key[:, :, None][:, :, :0], value[:, :, None][:, :, :0])
            else:
                own_keys.append(key)
                own_values.append(value)
                own = (torch.stack(own_keys, 2), torch.stack(own_values, 2))
            visible = starts[0][:, None] <= base[..., None]
            mixed = attend_two_parts(query, context=cache, visible=visible, own=own)
            state = state + layer.self_attn.o_proj(mixed)
            state = state + layer.mlp(layer.post_attention_layernorm(state))
            outputs.append(self.norm(state))
        return outputs
