"""`spec-ext bench overhead`: what the extension costs a step whose width it does not change.

Four settings in turn, round after round, on the same prompts: stock SGLang at its fixed width; our server in mode off,
pinned to that width, and in shadow mode. All run the same steps, so the ratio of their times is the overhead. Two
processes of one program differ by themselves (where memory lies, which start they had), so pinned and shadow are
compared with mode off of the same process, and that with stock SGLang. The share that our code itself measures, of
the same steps, stands beside it.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sglang_spec_ext.commands.bench_envelope_setups import ALGORITHMS
from sglang_spec_ext.cpu import selection
from sglang_spec_ext.runtime import SpecExt
from sglang_spec_ext.testing import running_server

PROMPT = "Write a detailed story about knight number {}, who travels through the mountains and finds a library."
SETTINGS = ("stock", "off", "pinned", "shadow")
AGAINST = {"off": "stock", "pinned": "off", "shadow": "off"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("--target", required=True, help="folder of the target")
    parser.add_argument("--draft", required=True, help="folder of the draft")
    parser.add_argument("--algorithm", default="DSPARK", choices=ALGORITHMS)
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--device", default="cpu", help="SGLang's --device")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Measure and print."""
    with _servers(args) as measure:
        rows = [row for batch in args.batches for row in _rows(measure, batch, args.rounds)]
    if args.json:
        print(json.dumps({"rows": rows, "rounds": args.rounds, "algorithm": args.algorithm, "dtype": args.dtype}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table("batch", "setting", "ms a step", "against", "ratio", "95 % of the median", "own share")
    for row in rows:
        share = row["own_share"]
        table.add_row(
            str(row["batch"]),
            row["setting"],
            f"{row['ms']:.2f}",
            row["against"],
            f"{row['ratio']:.4f}",
            f"{row['low']:.4f} to {row['high']:.4f}",
            "" if share is None else f"{share:.2%}",
        )
    Console(file=sys.stdout).print(table)
    return 0


Measure = Callable[[str, int], tuple[float, float]]  # (setting, batch) -> seconds a step, and of these our own


@contextmanager
def _servers(args: argparse.Namespace) -> Iterator[Measure]:
    """Run both servers; yield what measures one generation."""
    import httpx
    from transformers import AutoTokenizer

    common = ["--model-path", args.target, "--dtype", args.dtype, "--device", args.device, "--sleep-on-idle"]
    common += ["--max-running-requests", str(max(args.batches)), "--disable-radix-cache", "--log-level", "error"]
    common += ["--speculative-algorithm", args.algorithm, "--speculative-draft-model-path", args.draft]
    if args.algorithm.startswith("EAGLE"):
        common += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
        common += ["--speculative-num-draft-tokens", "4"]
    environment = {"SGLANG_PLATFORM": selection.PLATFORM_NAME} if args.device == "cpu" else {}
    prompts = [AutoTokenizer.from_pretrained(args.target)(PROMPT.format(i))["input_ids"] for i in range(64)]
    with ExitStack() as stack:
        stock = stack.enter_context(running_server(common, environment=environment))
        ours = stack.enter_context(running_server([*common, "--spec-ext-mode", "adaptive"], environment=environment))
        client = stack.enter_context(httpx.Client(timeout=600))
        control = SpecExt(ours.url)

        def measure(setting: str, batch: int) -> tuple[float, float]:
            if setting == "stock":
                return _generate(client, stock.url, prompts[:batch], args.tokens), 0.0
            control.set_mode("adaptive" if setting == "pinned" else setting)
            if setting == "pinned":
                control.pin(control.state()["tiers"][-1])
            before = control.state()
            seconds = _generate(client, ours.url, prompts[:batch], args.tokens)
            after = control.state()
            own = (after["own_s"] - before["own_s"]) / max(1, after["steps"] - before["steps"])
            return seconds, own

        yield measure


def _generate(client: Any, url: str, prompts: list[list[int]], tokens: int) -> float:
    """Return the seconds of a step, prefill shared out among them."""
    params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start = time.perf_counter()
    answers = client.post(f"{url}/generate", json={"input_ids": prompts, "sampling_params": params}).json()
    seconds = time.perf_counter() - start
    return seconds / max(answer["meta_info"]["spec_verify_ct"] for answer in answers)


def _rows(measure: Measure, batch: int, rounds: int) -> list[dict[str, Any]]:
    for setting in SETTINGS:
        measure(setting, batch)  # warm-up
    found: dict[str, list[tuple[float, float]]] = {setting: [] for setting in SETTINGS}
    for number in range(rounds):
        for place in range(len(SETTINGS)):
            setting = SETTINGS[(number + place) % len(SETTINGS)]
            found[setting].append(measure(setting, batch))
    return [_row(batch, setting, found[setting], found[other]) for setting, other in AGAINST.items()]


def _row(batch: int, setting: str, ours: list[tuple[float, float]], other: list[tuple[float, float]]) -> dict[str, Any]:
    ratios = sorted(mine / theirs for (mine, _), (theirs, _) in zip(ours, other, strict=True))
    seconds = statistics.median(mine for mine, _ in ours)
    reach = round(0.98 * len(ratios) ** 0.5)  # order statistics that hold the median in 95 of 100 cases
    middle = len(ratios) // 2
    return {
        "batch": batch,
        "setting": setting,
        "against": AGAINST[setting],
        "ms": seconds * 1e3,
        "ratio": statistics.median(ratios),
        "low": ratios[max(0, middle - reach)],
        "high": ratios[min(len(ratios) - 1, middle + reach)],
        "own_share": statistics.median(own for _, own in ours) / seconds,
    }
