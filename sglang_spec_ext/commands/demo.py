"""`spec-ext demo`: ask a real server a few questions, with and without speculation, and compare.

Starts `sglang.launch_server` twice, one server after the other, on a free loopback port; the client is `openai`.
"""

import argparse
import os
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field

import httpx
from openai import OpenAI
from rich.console import Console
from rich.table import Table

from sglang_spec_ext.cpu import selection
from sglang_spec_ext.testing import Server, running_server

PROMPTS = (
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "A train travels 60 km in 45 minutes. What is its speed in km/h? Think step by step.",
    "Write a short letter to a friend who has moved to another city.",
)


@dataclass
class Round:
    """What one server did: seconds and tokens of each answer, and its accept length with bonus."""

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    accept_length: float | None = None

    @property
    def tok_s(self) -> float:
        """Median tokens per second over the prompts, from the request to its last token."""
        return statistics.median(n / s for n, s in zip(self.tokens, self.seconds, strict=True))


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--target", required=True, help="folder of the target model")
    parser.add_argument("--draft", required=True, help="folder of the draft model")
    parser.add_argument("--algorithm", default="DSPARK", help="EAGLE3, DFLASH or DSPARK")
    parser.add_argument("--mode", default="adaptive", choices=("off", "shadow", "adaptive"))
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--max-tokens", type=int, default=96)


def run(args: argparse.Namespace) -> int:
    """Serve and ask twice; prints a table."""
    console = Console(file=sys.stdout)
    spec = _round(_arguments(args, speculative=True), args, console, f"with {args.algorithm}", show=True)
    plain = _round(_arguments(args, speculative=False), args, console, "without speculation", show=False)
    table = Table("", "tokens/s (median)", "accept length")
    table.add_row("without speculation", f"{plain.tok_s:.1f}", "1.00")
    length = "not reported" if spec.accept_length is None else f"{spec.accept_length:.2f}"
    table.add_row(f"with {args.algorithm} ({args.mode})", f"{spec.tok_s:.1f}", length)
    table.add_row("ratio", f"{spec.tok_s / plain.tok_s:.2f}", "")
    console.print(table)
    same = sum(a == b for a, b in zip(plain.texts, spec.texts, strict=True))
    console.print(f"{same} of {len(PROMPTS)} greedy answers are the same to the letter ({args.dtype})")
    return 0


def _arguments(args: argparse.Namespace, *, speculative: bool) -> list[str]:
    arguments = ["--model-path", args.target, "--dtype", args.dtype, "--log-level", "warning"]
    arguments += ["--max-running-requests", "8"]
    if selection.selected():
        arguments += ["--device", "cpu", "--sleep-on-idle"]
    if speculative:
        arguments += ["--speculative-algorithm", args.algorithm, "--speculative-draft-model-path", args.draft]
        if args.algorithm.startswith("EAGLE"):
            arguments += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
            arguments += ["--speculative-num-draft-tokens", "4"]
        if args.mode != "off":
            arguments += ["--spec-ext-mode", args.mode]
    return arguments


def _round(arguments: list[str], args: argparse.Namespace, console: Console, title: str, *, show: bool) -> Round:
    with ExitStack() as stack:
        with console.status(f"starting sglang.launch_server, {title}"):
            server = stack.enter_context(running_server(arguments, environment=dict(os.environ)))
        found = Round()
        client = OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=300)
        _ask(client, PROMPTS[0], 8, console, Round(), show=False)  # warm-up
        for prompt in PROMPTS:
            _ask(client, prompt, args.max_tokens, console, found, show=show)
        found.accept_length = _accept_length(server)
    return found


def _ask(client: OpenAI, prompt: str, max_tokens: int, console: Console, found: Round, *, show: bool) -> None:
    if show:
        console.print(f"\n[bold]{prompt}[/]")
    start = last = time.perf_counter()
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": prompt}],
        temperature=0,
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    tokens, text = 0, ""
    for chunk in stream:
        if chunk.usage is not None:
            tokens = chunk.usage.completion_tokens
        if chunk.choices and chunk.choices[0].delta.content:
            last = time.perf_counter()
            text += chunk.choices[0].delta.content
            if show:
                console.print(chunk.choices[0].delta.content, end="", markup=False, highlight=False, soft_wrap=True)
    if show:
        console.print()
    found.tokens.append(tokens)
    found.seconds.append(last - start)
    found.texts.append(text)


def _accept_length(server: Server) -> float | None:
    """Ask one prompt through `/generate`, whose answer carries the accept length."""
    body = {"text": PROMPTS[1], "sampling_params": {"temperature": 0, "max_new_tokens": 64, "ignore_eos": True}}
    info = httpx.post(f"{server.url}/generate", json=body, timeout=300).json()["meta_info"]
    value = info.get("spec_accept_length")
    return None if value is None else float(value)
