"""Turns the stored shards into training batches: sequences with features, and which tokens are common.

A batch is drawn from (seed, step) alone, so that an interrupted training continues with the batches that it
would have seen. Sequences of like length are put together.
"""

import pathlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.text import STORED_TAPS, Sample, read_shard

Tensor = torch.Tensor
MIN_NEW_TOKENS = 8  # shorter answers hold no room for a block
LENGTH_POOL = 4  # a batch is the like-long part of this many times its size


class TextMissingError(SpecExtError):
    """The folder of generated text holds no usable sample."""


@dataclass(frozen=True)
class Batch:
    """`size` sequences padded on the right to a common `length`.

    `tokens` [size, length] int64; `taps` [size, length, taps * hidden] and `final` [size, length, hidden]
    float32; `prompt_len`, `lengths` [size] int64.
    """

    tokens: Tensor
    taps: Tensor
    final: Tensor
    prompt_len: Tensor
    lengths: Tensor


def load_samples(folder: pathlib.Path, split: str) -> list[Sample]:
    """Return the samples of one split, of the folder and those in it, that are long enough.

    Raises TextMissingError when there are none.
    """
    samples = [
        sample
        for path in sorted(folder.rglob("shard-*.safetensors"))
        for sample in read_shard(path)
        if sample.split == split and len(sample.tokens) - sample.prompt_len >= MIN_NEW_TOKENS
    ]
    if not samples:
        raise TextMissingError(f"{folder}: holds no text of split {split!r}; run the text stage first")
    return samples


def collate(samples: Sequence[Sample], taps: Sequence[int]) -> Batch:
    """Pad samples to one batch with the features of the layers `taps`, a subset of STORED_TAPS."""
    columns = [STORED_TAPS.index(tap) for tap in taps]
    return Batch(
        tokens=pad_sequence([s.tokens for s in samples], batch_first=True),
        taps=pad_sequence([s.taps[:, columns].flatten(1).float() for s in samples], batch_first=True),
        final=pad_sequence([s.final.float() for s in samples], batch_first=True),
        prompt_len=torch.tensor([s.prompt_len for s in samples]),
        lengths=torch.tensor([len(s.tokens) for s in samples]),
    )


def draw_batch(
    samples: Sequence[Sample], taps: Sequence[int], *, size: int, rng: np.random.Generator
) -> Batch:
    """Draw `size` sequences of like length."""
    pool = rng.permutation(len(samples))[: size * LENGTH_POOL]
    ordered = sorted(pool.tolist(), key=lambda i: len(samples[i].tokens))
    start = int(rng.integers(max(1, len(ordered) - size + 1)))
    return collate([samples[i] for i in ordered[start : start + size]], taps)


def common_tokens(samples: Sequence[Sample], *, size: int, vocab_size: int) -> Tensor:
    """Return the `size` token ids that answers use most, ascending, int64 [size].

    Ids that never occur fill the places that are left, lowest first.
    """
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for sample in samples:
        counts += torch.bincount(sample.tokens[sample.prompt_len :], minlength=vocab_size)
    order = counts.argsort(descending=True, stable=True)
    return order[:size].sort().values


def sample_rows(samples: Sequence[Sample], taps: Sequence[int], *, limit: int = 64) -> tuple[Tensor, Tensor]:
    """Return tapped outputs [n, taps * hidden] and normed last states [n, hidden] of answers, float32."""
    columns = [STORED_TAPS.index(tap) for tap in taps]
    some = samples[:limit]
    features = torch.cat([s.taps[s.prompt_len :, columns].flatten(1).float() for s in some])
    return features, torch.cat([s.final[s.prompt_len :].float() for s in some])
