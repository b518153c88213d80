"""The parts that every draft is made of, named as the checkpoint formats name them."""

import torch
from torch import nn
from torch.nn import functional

from sglang_spec_ext.models.target import apply_rope, rope_table

Tensor = torch.Tensor


class RMSNorm(nn.Module):
    """x * rsqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Keep the shape."""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Projections(nn.Module):
    """Query, key, value and output projections of grouped attention, optionally with per-head norms."""

    def __init__(
        self,
        *,
        input_width: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float,
        norms: bool,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.q_proj = nn.Linear(input_width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(input_width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(input_width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False)
        self.q_norm = RMSNorm(head_dim, eps) if norms else nn.Identity()
        self.k_norm = RMSNorm(head_dim, eps) if norms else nn.Identity()

    def query(self, x: Tensor, positions: Tensor, theta: float) -> Tensor:
        """x [..., input_width] at positions [...] -> rotated [..., heads, head_dim]."""
        heads = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        return apply_rope(heads, *rope_table(positions, head_dim=self.head_dim, theta=theta))

    def key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [..., input_width] -> unrotated key and value, [..., kv_heads, head_dim] each."""
        shape = (self.kv_heads, self.head_dim)
        return self.k_norm(self.k_proj(x).unflatten(-1, shape)), self.v_proj(x).unflatten(-1, shape)

    def rotate(self, key: Tensor, positions: Tensor, theta: float) -> Tensor:
        """Rotate key [..., kv_heads, head_dim] by positions [...]."""
        return apply_rope(key, *rope_table(positions, head_dim=self.head_dim, theta=theta))


def attend_two_parts(
    query: Tensor,
    *,
    context: tuple[Tensor, Tensor],
    visible: Tensor,
    own: tuple[Tensor, Tensor],
) -> Tensor:
    """Attend over a context shared by all rows of a sequence and over a few keys of the row's own.

    query [batch, rows, heads, d]; context key and value [batch, length, kv_heads, d]; visible
    [batch, rows, length] bool; own key and value [batch, rows, n, kv_heads, d]. Returns
    [batch, rows, heads * d]. Expanding the shared context to every row would need rows times the memory.
    """
    batch, rows, heads, dim = query.shape
    kv_heads = context[0].shape[2]
    grouped = query.view(batch, rows, kv_heads, heads // kv_heads, dim) * dim**-0.5
    # [batch, kv, rows * group, d] x [batch, kv, d, length]
    flat = grouped.permute(0, 2, 1, 3, 4).reshape(batch, kv_heads, -1, dim)
    far = flat @ context[0].permute(0, 2, 3, 1)
    far = far.view(batch, kv_heads, rows, -1, far.shape[-1]).masked_fill(~visible[:, None, :, None], float("-inf"))
    near = torch.einsum("brkgd,brnkd->bkrgn", grouped, own[0])
    weights = torch.cat([far, near], -1).softmax(-1)
    far, near = weights.split([far.shape[-1], near.shape[-1]], -1)
    mixed = far.reshape(batch, kv_heads, -1, far.shape[-1]) @ context[1].transpose(1, 2)
    mixed = mixed.view(batch, kv_heads, rows, -1, dim).permute(0, 2, 1, 3, 4)
    mixed = mixed + torch.einsum("bkrgn,brnkd->brkgd", near, own[1])
    return mixed.reshape(batch, rows, -1)


class ScaledFeatures(nn.Linear):
    """The checkpoint's `fc` over tapped features, trained over features of unit scale.

    Llama targets carry a few channels hundreds of times larger than the rest. A step of equal size on every
    weight would move the output by those channels alone; so the weight here belongs to features divided by
    `scale` [inputs], and `folded` is the weight over the raw ones.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.register_buffer("scale", torch.ones(inputs))

    def forward(self, features: Tensor) -> Tensor:
        """features [..., inputs], raw -> [..., outputs]."""
        return super().forward(features / self.scale)

    def average(self, features: Tensor) -> None:
        """Start from features [n, inputs]: take their scale and average the taps channel by channel."""
        num_taps = self.in_features // self.out_features
        with torch.no_grad():
            self.scale.copy_(features.pow(2).mean(0).sqrt().clamp_(min=1e-3))
            self.weight.copy_(torch.eye(self.out_features).repeat(1, num_taps) / num_taps**0.5)

    def folded(self) -> Tensor:
        """Return the weight [outputs, inputs] over raw features."""
        return self.weight / self.scale


def init_linear(module: nn.Module, generator: torch.Generator) -> None:
    """Give every matrix of a module normal weights of variance 1 / fan-in (seeded)."""
    for parameter in module.parameters():
        if parameter.ndim == 2:
            with torch.no_grad():
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
