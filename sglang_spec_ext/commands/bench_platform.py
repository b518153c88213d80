"""`spec-ext bench platform`: a decode step of the engine against transformers' own `generate`.

Both run in turn, round after round, on the same prompts; the median of the per-round ratios is reported, since the
speed of a shared machine drifts. A server beside it verifies eight tokens a step (NGRAM, whose drafts cost next to
nothing), in turn with the engine, for the price of verification at batch 1; two engines in one process would share
SGLang's published configuration.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang_spec_ext.cli import UsageError
from sglang_spec_ext.cpu import selection
from sglang_spec_ext.testing import running_server

SHORT, LONG = 8, 72
VERIFY_WIDTH = 8
PROMPT = "Write a detailed story about knight number {}, who travels through the mountains and finds a library."


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--target", required=True, help="folder of the model")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print ratios: median, smallest and largest over the rounds."""
    if not selection.selected():
        raise UsageError(
            f"bench platform measures the CPU reference platform: export SGLANG_PLATFORM={selection.PLATFORM_NAME}"
        )
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    tokenizer.pad_token, tokenizer.padding_side = tokenizer.eos_token, "left"
    model = AutoModelForCausalLM.from_pretrained(args.target, dtype=getattr(torch, args.dtype)).eval()
    ngram = ["--model-path", args.target, "--dtype", args.dtype, "--device", "cpu", "--sleep-on-idle"]
    ngram += ["--max-running-requests", "4", "--disable-radix-cache", "--log-level", "error"]
    ngram += ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", str(VERIFY_WIDTH)]
    ngram += ["--speculative-ngram-max-bfs-breadth", "1"]
    rows = []
    with _engine(args) as plain:
        rows += [
            _compare(
                f"engine / transformers, batch {batch}",
                lambda n, batch=batch: _engine_seconds(plain, tokenizer, batch, n),
                lambda n, batch=batch: _transformers_seconds(model, tokenizer, batch, n),
                args.rounds,
            )
            for batch in args.batches
        ]
        with running_server(ngram) as verifying:
            rows.append(_verify_row(plain, verifying.url, tokenizer, args.rounds))
    if args.json:
        print(json.dumps({"rows": rows, "rounds": args.rounds, "dtype": args.dtype}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("step time", "median ms", "against ms", "ratio", "min", "max")
    for row in rows:
        table.add_row(row["name"], *(f"{row[key]:.2f}" for key in ("ms", "against_ms", "ratio", "min", "max")))
    Console(file=sys.stdout).print(table)
    return 0


@contextmanager
def _engine(args: argparse.Namespace) -> Iterator[Any]:
    import sglang

    engine = sglang.Engine(
        model_path=args.target,
        dtype=args.dtype,
        device="cpu",
        log_level="error",
        max_running_requests=32,
        sleep_on_idle=True,
        disable_radix_cache=True,
    )
    try:
        yield engine
    finally:
        engine.shutdown()


def _prompts(tokenizer: Any, batch: int) -> list[list[int]]:
    return [tokenizer(PROMPT.format(i))["input_ids"] for i in range(batch)]


def _engine_seconds(engine: Any, tokenizer: Any, batch: int, tokens: int) -> float:
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    engine.generate(input_ids=_prompts(tokenizer, batch), sampling_params=params)
    return time.perf_counter() - start


def _transformers_seconds(model: Any, tokenizer: Any, batch: int, tokens: int) -> float:
    import torch

    inputs = tokenizer([PROMPT.format(i) for i in range(batch)], return_tensors="pt", padding=True)
    with torch.inference_mode():
        start = time.perf_counter()
        model.generate(
            **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=tokenizer.eos_token_id
        )
        return time.perf_counter() - start


def _step_ms(seconds: Callable[[int], float]) -> float:
    """Return the milliseconds of one step, from two lengths, so that prefill and start-up cancel."""
    return (seconds(LONG) - seconds(SHORT)) / (LONG - SHORT) * 1e3


def _compare(name: str, ours: Callable[[int], float], theirs: Callable[[int], float], rounds: int) -> dict[str, Any]:
    ours(SHORT)
    theirs(SHORT)
    pairs = [(_step_ms(ours), _step_ms(theirs)) for _ in range(rounds)]
    return _row(name, pairs)


def _verify_row(plain: Any, url: str, tokenizer: Any, rounds: int) -> dict[str, Any]:
    """Compare the time of a verify step of eight tokens with a plain step, both at batch 1."""
    import httpx

    def verify_ms() -> float:
        params = {"temperature": 0, "max_new_tokens": LONG, "ignore_eos": True}
        measured = []
        for tokens in (SHORT, LONG):
            params["max_new_tokens"] = tokens
            start = time.perf_counter()
            body = {"input_ids": _prompts(tokenizer, 1)[0], "sampling_params": params}
            answer = httpx.post(f"{url}/generate", json=body, timeout=300).json()
            measured.append((time.perf_counter() - start, answer["meta_info"]["spec_verify_ct"]))
        (short_s, short_steps), (long_s, long_steps) = measured
        return float((long_s - short_s) / (long_steps - short_steps) * 1e3)

    verify_ms()
    pairs = [(verify_ms(), _step_ms(lambda n: _engine_seconds(plain, tokenizer, 1, n))) for _ in range(rounds)]
    return _row(f"verify {VERIFY_WIDTH} tokens / plain, batch 1", pairs)


def _row(name: str, pairs: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = [ours / theirs for ours, theirs in pairs]
    return {
        "name": name,
        "ms": statistics.median(pair[0] for pair in pairs),
        "against_ms": statistics.median(pair[1] for pair in pairs),
        "ratio": statistics.median(ratios),
        "min": min(ratios),
        "max": max(ratios),
    }
