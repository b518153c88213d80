"""`spec-ext models evaluate`: accept length of a draft on the real engine, held-out prompts, by kind."""

import argparse
import dataclasses
import json
import pathlib
import sys
from typing import Any

from sglang_spec_ext.cli import UsageError

# SGLang's own flags, as `--speculative-algorithm` spells them; EAGLE needs its chain length stated.
CHAIN = {"speculative_num_steps": 7, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 8}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("draft", type=pathlib.Path, help="the draft's folder")
    parser.add_argument("--target", type=pathlib.Path, required=True)
    parser.add_argument("--per-kind", type=int, default=16, help="held-out prompts of each of the four kinds")
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--batch", type=int, default=8, help="requests in flight")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print one table; 1 when the folder does not pass the check."""
    from sglang_spec_ext.models.check import report_draft

    report = report_draft(args.draft, args.target)
    if report.problems:
        print("\n".join(report.problems), file=sys.stderr)
        return 1
    if not (args.target / "tokenizer.json").exists():
        raise UsageError(f"models evaluate: --target must hold a tokenizer, got {args.target}")
    measured = _measure(args, str(report.algorithm))
    if args.json:
        print(
            json.dumps({label: {k: _facts(v) for k, v in kinds.items()} for label, kinds in measured.items()})
        )
    else:
        from sglang_spec_ext.models.evaluate import markdown_table

        print(markdown_table(measured), end="")
    return 0


def _facts(found: Any) -> dict[str, Any]:
    facts = dataclasses.asdict(found)
    return facts | {"accept_len_with_bonus": found.accept_len_with_bonus, "accept_rates": found.accept_rates}


def _measure(args: argparse.Namespace, algorithm: str) -> dict[str, dict[str, Any]]:
    from rich.console import Console
    from rich.progress import Progress
    from transformers import AutoTokenizer

    from sglang_spec_ext.engine import Engine
    from sglang_spec_ext.models.evaluate import ask, held_out_prompts, pool_answers
    from sglang_spec_ext.models.text import encode_chat

    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = held_out_prompts(args.per_kind)
    encoded = [encode_chat(tokenizer, prompt.text) for prompt in prompts]
    engine = Engine(
        model_path=str(args.target),
        speculative_algorithm=algorithm,
        speculative_draft_model_path=str(args.draft),
        device=args.device,
        dtype=args.dtype,
        max_running_requests=args.batch,
        log_level="warning",
        **(CHAIN if algorithm.startswith("EAGLE") else {}),
    )
    measured: dict[str, dict[str, Any]] = {}
    try:
        with Progress(console=Console(file=sys.stderr)) as progress:
            task = progress.add_task("asking", total=len(prompts) * len(args.temperatures))
            for temperature in args.temperatures:
                answers = []
                for start in range(0, len(prompts), args.batch):
                    part = slice(start, start + args.batch)
                    found = ask(
                        engine, encoded[part], temperature=temperature, max_new_tokens=args.max_new_tokens
                    )
                    answers += zip((prompt.kind for prompt in prompts[part]), found, strict=True)
                    progress.advance(task, len(found))
                label = "greedy" if temperature == 0 else f"temperature {temperature:g}"
                measured[label] = pool_answers(answers, num_drafts=7)
    finally:
        engine.shutdown()
    return measured
