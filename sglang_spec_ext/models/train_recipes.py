"""The three recipes: how large each draft is, what it reads, how long it trains by default."""

import json
import pathlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from sglang_spec_ext.models.draft_restart import own_tokens, take_weights
from sglang_spec_ext.models.draft_start import Start
from sglang_spec_ext.models.drafts_block import BlockDraft, BlockShape
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Draft, Eagle3Shape
from sglang_spec_ext.models.features import common_tokens, load_samples, sample_rows
from sglang_spec_ext.models.files import replace_atomically
from sglang_spec_ext.models.target import Target
from sglang_spec_ext.models.text import Sample
from sglang_spec_ext.models.train_block import BlockTrainer, validate_block
from sglang_spec_ext.models.train_eagle3 import Eagle3Trainer, validate_eagle3
from sglang_spec_ext.models.train_record import Progress, Validation

Tensor = torch.Tensor
Draft = BlockDraft | Eagle3Draft

NUM_COMMON = 4096
# Never written by the target and absent from chat prompts: <repo_name> of SmolLM2's tokenizer.
MASK_TOKEN_ID = 3
VALIDATION_SAMPLES = 48


@dataclass(frozen=True)
class Recipe:
    """One algorithm's default shape and length of training (steps, peak learning rate)."""

    shape: BlockShape | Eagle3Shape
    steps: int
    learning_rate: float


# Each folder stays below 16 MB in bfloat16. A layer of the target's width has 3.5 M parameters, each tap
# 0.33 M in `fc`, the Markov tables 0.098 M per rank. The block drafts keep a key/value head per query head:
# all that they learn of the context passes through the values, and 3 heads would let 192 numbers through.
RECIPES: dict[str, Recipe] = {
    "dspark": Recipe(
        BlockShape(
            taps=(2, 18, 28),
            num_layers=1,
            intermediate_size=1536,
            num_kv_heads=9,
            block=7,
            first_row=0,
            mask_token_id=MASK_TOKEN_ID,
            markov_rank=28,
        ),
        steps=1500,
        learning_rate=2e-3,
    ),
    "dflash": Recipe(
        BlockShape(
            taps=(2, 28),
            num_layers=2,
            intermediate_size=1280,
            num_kv_heads=9,
            block=8,
            first_row=1,
            mask_token_id=MASK_TOKEN_ID,
        ),
        steps=1500,
        learning_rate=2e-3,
    ),
    "eagle3": Recipe(
        Eagle3Shape(taps=(2, 18, 28), intermediate_size=1536, draft_vocab_size=NUM_COMMON),
        steps=1500,
        learning_rate=1.5e-3,
    ),
}


@dataclass(frozen=True)
class Trainee:
    """A draft with what a training loop calls: a start before step 0, a step's loss, and a validation."""

    draft: Draft
    prepare: Callable[[], None]
    loss: Callable[[np.random.Generator, Progress], tuple[Tensor, dict[str, float]]]
    validate: Callable[[], Validation]
    num_train_tokens: int


def build_trainee(
    algorithm: str,
    *,
    target_folder: pathlib.Path,
    text_folder: pathlib.Path,
    seed: int,
    start_from: pathlib.Path | None = None,
) -> Trainee:
    """Return a draft of one recipe over the text in a folder, which it starts from, or from another draft's folder."""
    shape = RECIPES[algorithm].shape
    target = Target(target_folder, dtype=torch.float32)
    train = load_samples(text_folder, "train")
    held_back = _spread(load_samples(text_folder, "validation"), VALIDATION_SAMPLES)
    common = None if start_from is None else own_tokens(start_from)
    if common is None:
        common = _fixed_common_tokens(text_folder, train, vocab_size=target.config.vocab_size)
    start = Start(*sample_rows(train, shape.taps), final_norm=target.norm, head=target.head)
    num_tokens = sum(len(sample.tokens) - sample.prompt_len for sample in train)
    if isinstance(shape, Eagle3Shape):
        eagle3 = Eagle3Draft(shape, target.config, embedding=target.embedding, common=common)
        eagle3.initialise(start, seed=seed)
        eagle3_trainer = Eagle3Trainer(eagle3, train, head=target.head)
        return Trainee(
            draft=eagle3,
            prepare=lambda: _prepare(eagle3, eagle3_trainer, target, seed=seed, start_from=start_from),
            loss=eagle3_trainer.loss,
            validate=lambda: validate_eagle3(eagle3, held_back, head=target.head),
            num_train_tokens=num_tokens,
        )
    block = BlockDraft(shape, target.config, embedding=target.embedding, common=common)
    block.initialise(start, seed=seed)
    block_trainer = BlockTrainer(block, train, common=common, head=target.head)
    return Trainee(
        draft=block,
        prepare=lambda: _prepare(block, block_trainer, target, seed=seed, start_from=start_from),
        loss=block_trainer.loss,
        validate=lambda: validate_block(block, held_back, head=target.head),
        num_train_tokens=num_tokens,
    )


def _prepare(
    draft: Draft,
    trainer: BlockTrainer | Eagle3Trainer,
    target: Target,
    *,
    seed: int,
    start_from: pathlib.Path | None,
) -> None:
    if start_from is None:
        trainer.prepare(np.random.default_rng([seed, 1]), final_norm=target.norm)
    else:
        take_weights(draft, start_from)


def _spread(samples: list[Sample], count: int) -> list[Sample]:
    """Return `count` samples at even distances."""
    return [samples[i] for i in np.linspace(0, len(samples) - 1, min(count, len(samples))).astype(int)]


def _fixed_common_tokens(folder: pathlib.Path, samples: list[Sample], *, vocab_size: int) -> Tensor:
    """Return the common tokens of a text folder, counted once: a resumed training may see more text."""
    path = folder / "common_tokens.json"
    if not path.exists():
        ids = common_tokens(samples, size=NUM_COMMON, vocab_size=vocab_size).tolist()
        replace_atomically(path, lambda temporary: temporary.write_text(json.dumps(ids), encoding="utf-8"))
    return torch.tensor(json.loads(path.read_text(encoding="utf-8")))
