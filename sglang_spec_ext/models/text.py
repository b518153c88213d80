"""Lets the target answer prompts and keeps the text with the features that the drafts read.

One pass does both: while the target decodes a batch, its tapped layer outputs and final hidden states are
kept, so that no second forward pass is needed. The result is a folder of shards, each one safetensors file
written under a temporary name and renamed, so that an interrupted run continues at the next shard.
"""

import json
import pathlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from safetensors import safe_open

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.files import write_tensors
from sglang_spec_ext.models.prompts import Prompt
from sglang_spec_ext.models.target import KVCache, Target

Tensor = torch.Tensor

# Outputs of these layers are stored (for a target of 30 layers); each draft takes a subset. The last layer
# is not among them because SGLang cannot capture it for EAGLE-3.
STORED_TAPS = (2, 10, 18, 24, 28)
# Rows of a batch take these in turn: half of the text is greedy, as it is served by most benchmarks.
TEMPERATURES = (0.0, 0.7, 0.0, 1.0)
# Batches are formed from prompts of like length inside windows of this many batches, so that padding is
# small and yet any prefix of the shards mixes the kinds.
BATCHES_PER_WINDOW = 4
MAX_LOOP_PERIOD = 32
LOOP_SPAN = 96


class TextWriteError(SpecExtError):
    """A shard could not be written; the message names it and the cure."""


@dataclass(frozen=True)
class Sample:
    """One answered prompt.

    `tokens` [n] int64 starts with the prompt's `prompt_len` tokens; `taps` [n, len(STORED_TAPS), hidden]
    and `final` [n, hidden] (normed output of the last layer) are bfloat16 and belong to the same positions.
    """

    tokens: Tensor
    taps: Tensor
    final: Tensor
    prompt_len: int
    temperature: float
    kind: str
    split: str


@dataclass(frozen=True)
class TextReport:
    """How far the text is; `new_tokens` is 0 for a batch that was there already."""

    batches_done: int
    batches: int
    new_tokens: int


def plan_batches(lengths: Sequence[int], batch_size: int) -> list[list[int]]:
    """Group row numbers into batches of like length, window by window."""
    window = batch_size * BATCHES_PER_WINDOW
    batches = []
    for start in range(0, len(lengths), window):
        rows = sorted(range(start, min(start + window, len(lengths))), key=lambda row: (lengths[row], row))
        batches += [rows[i : i + batch_size] for i in range(0, len(rows), batch_size)]
    return batches


def looped(tokens: Sequence[int]) -> bool:
    """Whether the last LOOP_SPAN tokens repeat with a period of at most MAX_LOOP_PERIOD tokens.

    Such text is trivially predictable: more of it would teach a draft nothing and inflate acceptance.
    """
    tail = np.asarray(tokens[-LOOP_SPAN:])
    if len(tail) < LOOP_SPAN:
        return False
    return any(bool((tail[period:] == tail[:-period]).all()) for period in range(1, MAX_LOOP_PERIOD + 1))


def draw_tokens(logits: Tensor, temperatures: Tensor, *, generator: torch.Generator) -> Tensor:
    """Return one token per row of `logits` [batch, vocab], [batch]: the argmax where the temperature is 0."""
    tokens = logits.argmax(-1)
    warm = (temperatures > 0).nonzero()[:, 0]
    if len(warm):
        scaled = (logits[warm].float() / temperatures[warm, None]).softmax(-1)
        edges = scaled.cumsum_(-1)
        drawn = torch.rand(len(warm), 1, generator=generator) * edges[:, -1:]
        tokens[warm] = torch.searchsorted(edges, drawn)[:, 0].clamp_(max=logits.shape[-1] - 1)
    return tokens


@torch.inference_mode()
def answer_batch(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    temperatures: Sequence[float],
    max_new_tokens: int,
    eos_id: int,
    seed: int,
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Answer token-id prompts; returns (tokens, taps, final) per row as in `Sample`.

    A row ends with the end-of-sequence token, after `max_new_tokens`, or once it loops.
    """
    longest = max(map(len, prompts))
    alive = torch.arange(len(prompts))
    pad = torch.tensor([longest - len(ids) for ids in prompts])
    ids = torch.tensor([[eos_id] * (longest - len(row)) + list(row) for row in prompts])
    heat = torch.tensor(temperatures)
    generator = torch.Generator().manual_seed(seed)
    cache = KVCache(target.config, batch=len(prompts), capacity=longest + max_new_tokens, dtype=target.dtype)
    history = [list(row) for row in prompts]
    states: list[list[Tensor]] = [[] for _ in prompts]  # per row, [n, taps + 1, hidden] bfloat16
    done = torch.zeros(len(prompts), dtype=torch.bool)
    for step in range(max_new_tokens):
        final, taps = target.forward(ids, pad=pad, cache=cache, taps=STORED_TAPS)
        stacked = torch.stack([*taps, final], 2).to(torch.bfloat16)
        for place in (~done).nonzero()[:, 0].tolist():
            states[int(alive[place])].append(stacked[place, int(pad[place]) if step == 0 else 0 :])
        ids = draw_tokens(final[:, -1] @ target.head.T, heat, generator=generator)[:, None]
        for place in (~done).nonzero()[:, 0].tolist():
            row = history[int(alive[place])]
            row.append(int(ids[place]))
            done[place] = row[-1] == eos_id or (step % 8 == 7 and looped(row[len(prompts[alive[place]]) :]))
        if bool(done.all()):
            break
        if float(done.float().mean()) > 0.2:
            kept = (~done).nonzero()[:, 0]
            cache.keep_rows(kept)
            alive, pad, heat, ids, done = (value[kept] for value in (alive, pad, heat, ids, done))
    answers = []
    for row, parts in zip(history, states, strict=True):
        joined = torch.cat(parts)  # the last token was drawn but never fed, so it has no state
        answers.append((torch.tensor(row[: len(joined)]), joined[:, :-1], joined[:, -1]))
    return answers


def write_shard(path: pathlib.Path, samples: Sequence[Sample]) -> None:
    """Write samples as one safetensors file, under a temporary name until it is whole."""
    facts = [[s.prompt_len, len(s.tokens), s.temperature, s.kind, s.split] for s in samples]
    tensors = {
        "tokens": torch.cat([s.tokens for s in samples]).to(torch.int32),
        "taps": torch.cat([s.taps for s in samples]).contiguous(),
        "final": torch.cat([s.final for s in samples]).contiguous(),
    }
    metadata = {"samples": json.dumps(facts), "taps": json.dumps(STORED_TAPS)}
    try:
        write_tensors(path, tensors, metadata=metadata)
    except OSError as error:
        raise TextWriteError(f"{error}; the shards before it are kept; free some space and start again") from error


def read_shard(path: pathlib.Path) -> list[Sample]:
    """Read a shard; its tensors stay memory-mapped."""
    with safe_open(path, framework="pt") as stored:
        facts = json.loads(stored.metadata()["samples"])
        tokens = stored.get_tensor("tokens").long()
        taps, final = stored.get_tensor("taps"), stored.get_tensor("final")
    samples, start = [], 0
    for prompt_len, count, temperature, kind, split in facts:
        part = slice(start, start + count)
        samples.append(Sample(tokens[part], taps[part], final[part], prompt_len, temperature, kind, split))
        start += count
    return samples


def count_new_tokens(folder: pathlib.Path) -> int:
    """Return how many tokens the target has written to a folder of shards (0 for an absent folder)."""
    total = 0
    for path in sorted(folder.glob("shard-*.safetensors")):
        with safe_open(path, framework="pt") as stored:
            facts = json.loads(stored.metadata()["samples"])
        total += sum(count - prompt_len for prompt_len, count, *_ in facts)
    return total


def make_text(
    target: Target,
    tokenizer: object,
    prompts: Sequence[Prompt],
    *,
    folder: pathlib.Path,
    batch_size: int = 96,
    max_new_tokens: int = 200,
    seed: int = 0,
    splits: Sequence[str] = ("train", "validation"),
) -> Iterator[TextReport]:
    """Answer every prompt of the named splits, yielding after each batch.

    Existing shards are kept: the same arguments give the same plan, so a second call goes on where the
    first one stopped.
    """
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [prompt for prompt in prompts if prompt.split in splits]
    encoded = [encode_chat(tokenizer, prompt.text) for prompt in chosen]
    eos_id = tokenizer.eos_token_id  # type: ignore[attr-defined]
    num_kinds = len({prompt.kind for prompt in prompts})
    batches = plan_batches([len(ids) for ids in encoded], batch_size)
    for number, rows in enumerate(batches):
        path = folder / f"shard-{number:04d}.safetensors"
        new_tokens = 0
        if not path.exists():
            temperatures = [TEMPERATURES[row // num_kinds % len(TEMPERATURES)] for row in rows]
            answers = answer_batch(
                target,
                [encoded[row] for row in rows],
                temperatures=temperatures,
                max_new_tokens=max_new_tokens,
                eos_id=eos_id,
                seed=seed + number,
            )
            samples = [
                Sample(*answer, len(encoded[row]), heat, chosen[row].kind, chosen[row].split)
                for row, answer, heat in zip(rows, answers, temperatures, strict=True)
            ]
            new_tokens = sum(len(sample.tokens) - sample.prompt_len for sample in samples)
            write_shard(path, samples)
        yield TextReport(number + 1, len(batches), new_tokens)


def encode_chat(tokenizer: object, text: str) -> list[int]:
    """Return the token ids of one user message under the tokenizer's chat template."""
    encoded: list[int] = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
    )
    return encoded
