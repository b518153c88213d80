"""`spec-ext models calibrate FOLDER`: temperatures for a DSpark draft's confidence, or a new head, with a plot."""

import argparse
import dataclasses
import json
import pathlib
from typing import TYPE_CHECKING, Any

from sglang_spec_ext.cli import UsageError

if TYPE_CHECKING:
    import numpy as np

    from sglang_spec_ext.models.calibrate import Calibration


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("folder", type=pathlib.Path, help="the DSpark draft's folder; the results are written there")
    parser.add_argument("--target", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True, help="the folder of generated text")
    parser.add_argument(
        "--splits",
        nargs="+",
        choices=("train", "validation"),
        default=["validation"],
        help="whose answers to use: both for text of a seed that the draft was not trained on",
    )
    parser.add_argument(
        "--refit",
        action="store_true",
        help="fit the confidence head anew on the first half of the texts, and replace it in the folder",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Fit on one half of the held-back text, judge on the other, write sts*.json and reliability*.png."""
    import torch

    from sglang_spec_ext.models.confidence_fit import fit_head, write_head
    from sglang_spec_ext.models.drafts_load import load_block_draft
    from sglang_spec_ext.models.features import load_samples
    from sglang_spec_ext.models.target import Target
    from sglang_spec_ext.models.train_block import validate_block

    target = Target(args.target, dtype=torch.float32)
    draft = load_block_draft(args.folder, target, target_folder=args.target)
    if not draft.shape.markov_rank:
        raise UsageError(f"models calibrate: {args.folder} must be a DSpark draft; DFlash has no confidence head")
    samples = [sample for split in args.splits for sample in load_samples(args.text, split)]
    record = validate_block(draft, samples, head=target.head, stride=3, keep_features=args.refit)
    if args.refit:
        record.rescore(*write_head(args.folder, *fit_head(*record.fitted(half=0))))
    results: dict[str, Any] = {}
    for label, greedy in (("sampled", False), ("greedy", True)):
        halves = [tuple(part.numpy() for part in record.survival(greedy=greedy, half=half)) for half in (0, 1)]
        results[label] = dataclasses.asdict(_calibrate(args.folder, label, *halves))
    print(json.dumps(results) if args.json else _table(results))
    return 0


def _calibrate(
    folder: pathlib.Path, label: str, fitting: "tuple[np.ndarray, ...]", judging: "tuple[np.ndarray, ...]"
) -> "Calibration":
    from sglang_spec_ext.models.calibrate import fit_temperatures, judge, plot_reliability, write_sts

    judged = judge(fit_temperatures(*fitting), *judging)
    # the file for sampling is the default; the greedy one is for servers that mostly decode greedily
    name = "sts.json" if label == "sampled" else "sts_greedy.json"
    write_sts(judged, folder / name, dataset=f"held-back prompts, {label} decoding")
    plot_reliability(judged, *judging, path=folder / f"reliability_{label}.png")
    return judged


def _table(results: dict[str, Any]) -> str:
    lines = ["decoding  position  temperature  ECE before  ECE after  AUC"]
    for label, found in results.items():
        columns = (found["temperatures"], found["ece_before"], found["ece_after"], found["auc"])
        for k, (t, before, after, auc) in enumerate(zip(*columns, strict=True), 1):
            lines.append(f"{label:9s} {k:8d}  {t:11.2f}  {before:9.1%}  {after:8.1%}  {auc:.2f}")
    return "\n".join(lines)
