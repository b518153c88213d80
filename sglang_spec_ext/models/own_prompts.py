"""Lets the target write user messages itself, so that training text is wider than any set of templates.

A chat model that continues its own template's user header writes what a user might ask (the idea of Magpie,
arXiv 2406.08464). Half of the messages begin freely, which a small model makes chat mostly; the others begin with an
opening of one of the four kinds. The held-out prompts play no part in it.
"""

import json
import pathlib
from collections.abc import Iterator

import numpy as np

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.files import replace_atomically
from sglang_spec_ext.models.prompts import KINDS, VALIDATION_SHARE, Prompt
from sglang_spec_ext.models.target import Target
from sglang_spec_ext.models.text import answer_batch

OPENINGS: dict[str, tuple[str, ...]] = {
    "chat": ("How", "What", "Why", "Explain", "Can you", "I'm", "My", "List"),
    "code": ("Write a Python", "Create a function", "How do I", "Implement", "Fix this code:", "Using SQL,"),
    "prose": ("Write a short story", "Write a blog post", "Write a poem", "Create a dialogue", "Edit this text:"),
    "maths": ("Solve", "Calculate", "What is the", "If a", "How many", "Prove that", "Simplify"),
}
TEMPERATURE = 0.9
MAX_MESSAGE_TOKENS = 64
MIN_MESSAGE_CHARS = 12
BATCH_SIZE = 96
MAX_FRUITLESS = 4  # batches
_MARK = "\x00"


class OwnPromptsError(SpecExtError):
    """The target does not write user messages."""


def own_prompts(
    target: Target, tokenizer: object, *, path: pathlib.Path, count: int, seed: int
) -> Iterator[list[Prompt]]:
    """Yield the messages written so far after each batch, until there are `count`; `path` keeps them all.

    Messages are distinct and ended by the target itself within MAX_MESSAGE_TOKENS. A second call with the same
    arguments yields what the file holds.
    """
    if path.exists():
        yield [Prompt(*fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
        return
    rng = np.random.default_rng([seed, 2])
    header = _user_header(tokenizer)
    found: dict[str, Prompt] = {}
    fruitless = 0
    while len(found) < count:
        had = len(found)
        begun = [_beginning(rng, KINDS[row % len(KINDS)]) for row in range(BATCH_SIZE)]
        for prompt in _write_batch(target, tokenizer, header, begun, rng):
            found.setdefault(prompt.text, prompt)
        fruitless = 0 if len(found) > had else fruitless + 1
        if fruitless == MAX_FRUITLESS:
            raise OwnPromptsError(
                f"messages: {count} were asked for and {len(found)} are written, but the target ended no new one "
                f"within {MAX_MESSAGE_TOKENS} tokens in {MAX_FRUITLESS} batches; train on the seeded prompts alone "
                "(--own-tokens 0)"
            )
        yield list(found.values())[:count]
    fields = [[prompt.text, prompt.kind, prompt.split] for prompt in list(found.values())[:count]]
    text = json.dumps(fields, indent=0)
    replace_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def _beginning(rng: np.random.Generator, kind: str) -> tuple[str, str]:
    """Return (kind, opening) of a message: half of the time without an opening, and then of no particular kind."""
    openings = OPENINGS[kind]
    return ("chat", "") if rng.random() < 0.5 else (kind, openings[int(rng.integers(len(openings)))])


def _user_header(tokenizer: object) -> str:
    """Return what the chat template writes before the text of a first user message."""
    shown: str = tokenizer.apply_chat_template(  # type: ignore[attr-defined]
        [{"role": "user", "content": _MARK}], tokenize=False
    )
    return shown[: shown.index(_MARK)]


def _write_batch(
    target: Target, tokenizer: object, header: str, begun: list[tuple[str, str]], rng: np.random.Generator
) -> Iterator[Prompt]:
    encode, decode = tokenizer.encode, tokenizer.decode  # type: ignore[attr-defined]
    skipped = len(encode(header))
    answers = answer_batch(
        target,
        [encode(header + opening) for _, opening in begun],
        temperatures=[TEMPERATURE] * len(begun),
        max_new_tokens=MAX_MESSAGE_TOKENS,
        eos_id=tokenizer.eos_token_id,  # type: ignore[attr-defined]
        seed=int(rng.integers(2**31)),
    )
    for (kind, opening), (tokens, _, _) in zip(begun, answers, strict=True):
        ended = len(tokens) < len(encode(header + opening)) + MAX_MESSAGE_TOKENS - 1
        text = decode(tokens[skipped:]).strip()
        if ended and len(text) >= MIN_MESSAGE_CHARS:
            yield Prompt(text, kind, "validation" if rng.random() < VALIDATION_SHARE else "train")
