"""Counter-based Gumbel noise, the same stream as upstream's Markov sampler.

Philox4x32-10 (Salmon et al., SC 2011) keyed by a launch key, with counter (token // 4, row, step, offset);
word k of a call belongs to token 4 * q + k, and becomes -log(E) with E = -log(1 - u) and u = (word + 1/2) /
2**32, as in `sglang/kernels/ops/speculative/dspark/markov_sample.py`. A row of a batch draws the same noise
wherever it runs.
"""

import torch

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF
UNIFORM_SCALE = 2.0**-32


def _philox(key: int, counter: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    # 32-bit words in int64: the product wraps around, and masking its halves undoes the sign
    c0, c1, c2, c3 = counter
    k0, k1 = key & _WORD, (key >> 32) & _WORD
    for _ in range(_ROUNDS):
        a, b = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((b >> 32) & _WORD) ^ c1 ^ k0, b & _WORD, ((a >> 32) & _WORD) ^ c3 ^ k1, a & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def gumbel_noise(
    num_rows: int, vocab_size: int, *, key: int, offset: torch.Tensor, step: int
) -> torch.Tensor:
    """Return [num_rows, V] float32 noise on the device of `offset` ([1] int64, its low 32 bits count)."""
    device = offset.device
    quads = torch.arange(-(-vocab_size // 4), device=device)[None, :]
    rows = torch.arange(num_rows, device=device)[:, None]
    zero = torch.zeros_like(quads)
    words = _philox(key, (quads, rows, zero + (step & _WORD), zero + (offset & _WORD)))
    bits = torch.stack(torch.broadcast_tensors(*words), dim=-1).reshape(num_rows, -1)[:, :vocab_size]
    uniform = (bits.float() + 0.5) * UNIFORM_SCALE
    return -torch.log(-torch.log1p(-uniform))
