"""Closed-loop load for `spec-ext bench envelope`: SGLang's own `bench_serving` client, prompts of four kinds.

A load is a row of phases, each with a bound of requests in flight. A phase starts when all requests of the one before
were sent, not when they were answered, so that a batch drains while the next load sets in.
"""

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.evaluate import held_out_prompts
from sglang_spec_ext.models.prompts import KINDS

PER_KIND = 60  # all held-out prompts that there are
SHIFTING = (1, 32, 4, 16, 1)  # requests in flight, phase by phase
TIMEOUT_S = 1800.0  # of one load
LENGTH_SPREAD = 0.5  # answers are up to this much shorter or longer, so that requests end one by one


class LoadFailed(SpecExtError):
    """A request was not answered; the message ends with SGLang's own."""


@dataclass(frozen=True)
class Ask:
    """One request: prompt text with the chat template applied, its tokens, and tokens to answer."""

    prompt: str
    prompt_len: int
    max_tokens: int


@dataclass(frozen=True)
class Phase:
    """Requests, of which up to `concurrency` are in flight."""

    concurrency: int
    asks: tuple[Ask, ...]


@dataclass(frozen=True)
class Answer:
    """When a request was sent and answered, in seconds of one clock, and what came: (time, tokens) by chunk."""

    start_s: float
    end_s: float
    chunks: tuple[tuple[float, int], ...]
    accept_length: float | None  # tokens per verify step, bonus included

    @property
    def tokens(self) -> int:
        """Tokens of the answer."""
        return sum(count for _, count in self.chunks)


class Prompts:
    """Held-out prompts in a fixed order that mixes the kinds; `take` never repeats one before all had their turn."""

    def __init__(self, target: Path) -> None:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(target)
        by_kind = held_out_prompts(PER_KIND)
        mixed = [by_kind[kind * PER_KIND + rank].text for rank in range(PER_KIND) for kind in range(len(KINDS))]
        self._texts = [_with_template(tokenizer, text) for text in mixed]
        self._lens = [len(tokenizer(text)["input_ids"]) for text in self._texts]

    def take(self, count: int, *, start: int, max_tokens: Sequence[int]) -> tuple[Ask, ...]:
        """Return `count` requests from place `start` on, `max_tokens` in turn."""
        found = []
        for i in range(count):
            place = (start + i) % len(self._texts)
            found.append(Ask(self._texts[place], self._lens[place], max_tokens[i % len(max_tokens)]))
        return tuple(found)


def _with_template(tokenizer: Any, text: str) -> str:
    if tokenizer.chat_template is None:
        return text
    messages = [{"role": "user", "content": text}]
    return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))


def level(prompts: Prompts, concurrency: int, *, waves: int, tokens: int, start: int) -> Phase:
    """Return a steady load: answers of unequal lengths, the same for every setting.

    Equal ones end together where nothing is drafted, so that the next prompts share one prefill, and one by one
    elsewhere: a gift to plain decoding that no traffic makes.
    """
    return Phase(concurrency, prompts.take(concurrency * waves, start=start, max_tokens=_spread(tokens)))


def mark(prompts: Prompts, concurrency: int, *, start: int) -> Phase:
    """Return a phase of one short request, sent when all of the load before it were sent and one has ended."""
    return Phase(concurrency, prompts.take(1, start=start, max_tokens=(1,)))


def shifting(prompts: Prompts, *, waves: int, tokens: int, start: int, largest: int) -> list[Phase]:
    """Return the shifting load; a phase of one request at a time is as long as four waves of the others."""
    lengths = _spread(tokens)
    phases = []
    for bound in SHIFTING:
        concurrency = min(bound, largest)
        count = concurrency * waves * (4 if concurrency == 1 else 1)
        phases.append(Phase(concurrency, prompts.take(count, start=start, max_tokens=lengths)))
        start += count
    return phases


def _spread(tokens: int) -> list[int]:
    rng = random.Random(0)  # noqa: S311 - lengths, the same for every setting
    return [round(tokens * rng.uniform(1.0 - LENGTH_SPREAD, 1.0 + LENGTH_SPREAD)) for _ in range(64)]


def drive(url: str, phases: Sequence[Phase]) -> list[Answer]:
    """Send a load and wait for every answer."""
    from sglang.benchmark import serving

    serving.set_global_args(_client_arguments())
    try:
        return asyncio.run(asyncio.wait_for(_drive(serving, f"{url}/generate", phases), TIMEOUT_S))
    except TimeoutError as error:
        raise LoadFailed(f"{url}: a load was not answered within {TIMEOUT_S:.0f} s; see the server's log") from error


def _client_arguments() -> argparse.Namespace:
    """Return what `bench_serving` reads of its own command line: greedy, streamed, full length."""
    return argparse.Namespace(
        temperature=0.0, top_p=1.0, disable_ignore_eos=False, disable_stream=False, return_logprob=False,
        return_routed_experts=False, logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None,
        cache_report=False, header=None,
    )  # fmt: skip


async def _drive(serving: Any, url: str, phases: Sequence[Phase]) -> list[Answer]:
    sent: list[asyncio.Task[Answer]] = []
    for phase in phases:
        for ask in phase.asks:
            running = [task for task in sent if not task.done()]
            while len(running) >= phase.concurrency:
                _, pending = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                running = list(pending)
            sent.append(asyncio.create_task(_answer(serving, url, ask)))
    return list(await asyncio.gather(*sent))


async def _answer(serving: Any, url: str, ask: Ask) -> Answer:
    request = serving.RequestFuncInput(
        prompt=ask.prompt, api_url=url, prompt_len=ask.prompt_len, output_len=ask.max_tokens, model="default",
        lora_name=None, image_data=None, extra_request_body={},
    )  # fmt: skip
    output = await serving.async_request_sglang_generate(request)
    end = time.perf_counter()
    if not output.success or output.output_len < 1:
        raise LoadFailed(f"a request to {url} failed: {output.error.strip() or 'no tokens'}")
    at = output.start_time + output.ttft
    chunks = [(at, output.output_len - len(output.itl))]
    for gap in output.itl:  # bench_serving spreads the gap of a chunk over its tokens
        at += gap
        chunks.append((at, 1))
    return Answer(output.start_time, end, tuple(chunks), output.spec_accept_length or None)


def tokens_per_second(answers: Sequence[Answer]) -> float:
    """Return the output throughput as `bench_serving` defines it: all tokens over the time from first to last."""
    seconds = max(answer.end_s for answer in answers) - min(answer.start_s for answer in answers)
    return sum(answer.tokens for answer in answers) / seconds


def rate_between(answers: Sequence[Answer], begin_s: float, end_s: float) -> float:
    """Return the tokens per second of all answers in a stretch of time."""
    tokens = sum(count for answer in answers for at, count in answer.chunks if begin_s <= at < end_s)
    return tokens / (end_s - begin_s)


def accept_length(answers: Sequence[Answer]) -> float | None:
    """Return tokens per verify step over all requests, bonus included; None without speculation."""
    known = [answer for answer in answers if answer.accept_length]
    steps = sum(answer.tokens / answer.accept_length for answer in known if answer.accept_length)
    return sum(answer.tokens for answer in known) / steps if steps else None
