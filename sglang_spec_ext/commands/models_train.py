"""`spec-ext models train`: text from the target, then a draft from the text."""

import argparse
import json
import pathlib
import sys
from typing import TYPE_CHECKING, Any

from sglang_spec_ext.cli import UsageError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from sglang_spec_ext.models.prompts import Prompt
    from sglang_spec_ext.models.target import Target

ALGORITHMS = ("dspark", "eagle3", "dflash")
OWN_TEXT = "own"  # folder in that of the text
# Fewer than the 150 or so that an answer has on average, so that the messages suffice.
TOKENS_PER_ANSWER = 120


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--algorithm", choices=("text", *ALGORITHMS), required=True)
    parser.add_argument("--target", type=pathlib.Path, required=True, help="a Llama folder with its tokenizer")
    parser.add_argument("--text", type=pathlib.Path, required=True, help="folder of generated text, reused if there")
    parser.add_argument("--out", type=pathlib.Path, help="the draft's folder (not for --algorithm text)")
    parser.add_argument("--text-tokens", type=int, default=300_000, help="stop generating at this many tokens")
    parser.add_argument(
        "--own-tokens",
        type=int,
        default=250_000,
        help="and at this many tokens of answers to messages that the target writes itself (0: none)",
    )
    parser.add_argument(
        "--splits",
        nargs="+",
        choices=("train", "validation"),
        default=["train", "validation"],
        help="prompts to answer; validation alone makes text to calibrate on, in a folder of its own",
    )
    parser.add_argument(
        "--text-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="what the target computes in while it writes; bfloat16 is twice as fast on a CPU with units for it",
    )
    parser.add_argument("--steps", type=int, help="training steps (default: the recipe's)")
    parser.add_argument("--max-minutes", type=float, default=90.0, help="the schedule ends at this time at the latest")
    parser.add_argument(
        "--start-from", type=pathlib.Path, help="a draft's folder to go on from, on this text (default: from the text)"
    )
    parser.add_argument("--learning-rate", type=float, help="at its peak (default: the recipe's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")


def run(args: argparse.Namespace) -> int:
    """Generate missing text, then train; both continue where an earlier run stopped."""
    if args.algorithm != "text" and args.out is None:
        raise UsageError(f"models train: --out must name a folder for --algorithm {args.algorithm}; give one")
    if args.start_from is not None:
        _check_start(args.start_from, args.target)
    if not (args.target / "tokenizer.json").exists():
        raise UsageError(f"models train: --target must hold a tokenizer, got {args.target}; run models prepare")
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    if args.threads:
        torch.set_num_threads(args.threads)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        _make_text(args, progress)
        if args.algorithm != "text":
            _train(args, progress)
    from sglang_spec_ext.models.train import peak_memory_gib

    print(f"peak memory {peak_memory_gib():.2f} GiB")
    return 0


def _check_start(folder: pathlib.Path, target: pathlib.Path) -> None:
    from sglang_spec_ext.models.check import check_draft

    if problems := check_draft(folder, target):
        raise UsageError(f"models train: --start-from must be a draft for the target, got {folder}: {problems[0]}")


def _facts(folder: pathlib.Path) -> dict[str, Any]:
    """Return what is recorded of how a draft was trained; a foreign one has no record."""
    record = folder / "training.json"
    found: dict[str, Any] = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
    return found


def _make_text(args: argparse.Namespace, progress: "Progress") -> None:
    """Write what is missing of the two kinds of text: answers to seeded prompts, and to the target's own."""
    from sglang_spec_ext.models.prompts import build_prompts
    from sglang_spec_ext.models.text import count_new_tokens

    own_text = args.text / OWN_TEXT
    have, have_own = count_new_tokens(args.text), count_new_tokens(own_text)
    if have >= args.text_tokens and have_own >= args.own_tokens:
        return
    import torch
    from transformers import AutoTokenizer

    from sglang_spec_ext.models.target import Target

    target = Target(args.target, dtype=getattr(torch, args.text_dtype))
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    if have < args.text_tokens:
        task = progress.add_task("text", total=args.text_tokens, completed=have)
        _answer(args, progress, task, target, tokenizer, build_prompts(args.seed), args.text)
    if have_own < args.own_tokens:
        own = _own_prompts(args, progress, target, tokenizer, own_text / "prompts.json")
        task = progress.add_task("own text", total=args.own_tokens, completed=have_own)
        _answer(args, progress, task, target, tokenizer, own, own_text)


def _own_prompts(
    args: argparse.Namespace, progress: "Progress", target: "Target", tokenizer: object, path: pathlib.Path
) -> "list[Prompt]":
    from sglang_spec_ext.models.own_prompts import own_prompts

    path.parent.mkdir(parents=True, exist_ok=True)
    count = args.own_tokens // TOKENS_PER_ANSWER
    task = progress.add_task("own messages", total=count)
    written: list[Prompt] = []
    for written in own_prompts(target, tokenizer, path=path, count=count, seed=args.seed):
        progress.update(task, completed=len(written))
    return written


def _answer(
    args: argparse.Namespace,
    progress: "Progress",
    task: "TaskID",
    target: "Target",
    tokenizer: object,
    prompts: "list[Prompt]",
    folder: pathlib.Path,
) -> None:
    from sglang_spec_ext.models.text import make_text

    for report in make_text(target, tokenizer, prompts, folder=folder, seed=args.seed, splits=args.splits):
        progress.advance(task, report.new_tokens)
        if progress.tasks[task].completed >= progress.tasks[task].total:
            return


def _train(args: argparse.Namespace, progress: "Progress") -> None:
    from sglang_spec_ext.models.train import TrainSettings, train
    from sglang_spec_ext.models.train_recipes import RECIPES, build_trainee

    settings = TrainSettings(
        algorithm=args.algorithm,
        out=args.out,
        steps=args.steps or RECIPES[args.algorithm].steps,
        max_minutes=args.max_minutes,
        seed=args.seed,
        learning_rate=args.learning_rate,
        started_from=None if args.start_from is None else _facts(args.start_from),
    )
    trainee = build_trainee(
        args.algorithm,
        target_folder=args.target,
        text_folder=args.text,
        seed=args.seed,
        start_from=args.start_from,
    )
    task = progress.add_task(args.algorithm, total=1.0)
    for report in train(trainee, settings):
        shown = " ".join(f"{name} {value:.3f}" for name, value in report.shown.items())
        progress.update(task, completed=report.done, description=f"{args.algorithm} loss {report.loss:.3f} {shown}")
        if report.event:
            progress.console.print(report.event)
