"""Checks a draft folder, alone and against its target, before an engine is started.

Pure: reads config.json and safetensors headers, needs neither torch nor SGLang. SGLang's own loaders skip
unknown tensors and leave missing ones at their initial values, so a damaged folder would serve with an
accept length of 1 and no message.
"""

import json
import math
import pathlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_spec_ext.models.draft_formats import DRAFT_FORMATS, Config, DraftFormat, eagle3_num_aux, nested
from sglang_spec_ext.models.safetensors_header import (
    CheckpointError,
    TensorEntry,
    read_integers,
    read_tensor_entries,
)

MARKOV_HEAD_TYPES = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class DraftReport:
    """What a folder holds and what is wrong with it; `problems` is empty for a folder that can be served.

    `tap_layers` are target layers whose outputs are read (None = SGLang's default for the target's depth,
    () = none); `block_size` is SGLang's own field: drafted tokens for DSpark, verify width for DFlash.
    """

    folder: str
    architecture: str | None
    algorithm: str | None
    tap_layers: tuple[int, ...] | None
    mask_token_id: int | None
    block_size: int | None
    draft_vocab_size: int | None
    num_parameters: int
    num_bytes: int
    problems: tuple[str, ...]


def check_draft(folder: str | pathlib.Path, target: str | pathlib.Path | None = None) -> list[str]:
    """Return one sentence per problem of a draft folder (and of its fit to `target`); [] means good."""
    return list(report_draft(folder, target).problems)


def report_draft(folder: str | pathlib.Path, target: str | pathlib.Path | None = None) -> DraftReport:
    """Read a draft folder and return its facts and its problems; raises nothing for a bad folder."""
    folder = pathlib.Path(folder)
    problems: list[str] = []
    config = _read_config(folder, problems)
    entries = _read_entries(folder, problems)
    architecture = _architecture(folder, config, problems)
    draft_format = DRAFT_FORMATS.get(architecture) if architecture else None
    if config and draft_format:
        config = {"head_dim": _default_head_dim(config), **config}
        complete = _check_config(config, draft_format, problems)
        if complete and entries:
            _check_tensors(config, draft_format, entries, problems=problems)
        if target is not None:
            _check_fit(config, draft_format, pathlib.Path(target), problems=problems)
    return DraftReport(
        folder=str(folder),
        architecture=architecture,
        algorithm=draft_format.algorithm if draft_format else None,
        tap_layers=draft_format.taps(config) if config and draft_format else None,
        mask_token_id=nested(config, "mask_token_id"),
        block_size=nested(config, "block_size"),
        draft_vocab_size=config.get("draft_vocab_size"),
        num_parameters=sum(math.prod(entry.shape) for entry in entries.values()),
        num_bytes=sum(entry.num_bytes for entry in entries.values()),
        problems=tuple(problems),
    )


def _read_config(folder: pathlib.Path, problems: list[str]) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        problems.append(f"{path}: must be a readable JSON file ({error}); save the folder again")
        return {}
    if not isinstance(config, dict):
        problems.append(f"{path}: must be a JSON object, got {type(config).__name__}; save the folder again")
        return {}
    return config


def _read_entries(folder: pathlib.Path, problems: list[str]) -> dict[str, TensorEntry]:
    try:
        return read_tensor_entries(folder)
    except (CheckpointError, OSError) as error:
        problems.append(str(error))
        return {}


def _architecture(folder: pathlib.Path, config: Config, problems: list[str]) -> str | None:
    if not config:
        return None
    names = config.get("architectures")
    if isinstance(names, list) and len(names) == 1 and names[0] in DRAFT_FORMATS:
        return str(names[0])
    known = ", ".join(DRAFT_FORMATS)
    problems.append(f"{folder}: architectures must name one of {known}, got {names!r}; is this a draft?")
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def _default_head_dim(config: Config) -> int | None:
    """Return what transformers' LlamaConfig fills in; formats that must state it list it as required."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if (
        config.get("model_type") == "qwen3"
        or not isinstance(hidden, int)
        or not isinstance(heads, int)
        or heads < 1
    ):
        return None
    return hidden // heads


def _check_config(config: Config, draft_format: DraftFormat, problems: list[str]) -> bool:
    """Check config keys; returns whether the tensor table can be built from them."""
    broken = [key for key in draft_format.required_keys if not _positive(config.get(key))]
    for key in broken:
        inner = key in (config.get("dflash_config") or {})
        cure = "move it out of dflash_config to the top level" if inner else "write it into config.json"
        problems.append(f"config.json: {key} must be a positive integer, got {config.get(key)!r}; {cure}")
    inner_keys = set(config.get("dflash_config") or {}) - set(config) - set(broken)
    problems += [
        f"config.json: {key} must stand at the top level, found in dflash_config; move it"
        for key in draft_format.top_level_only
        if key in inner_keys
    ]
    if draft_format.has_mask_token and not isinstance(nested(config, "mask_token_id"), int):
        found = nested(config, "mask_token_id")
        problems.append(
            f"config.json: mask_token_id must be a token id, got {found!r}; write the one trained with"
        )
    if draft_format.algorithm == "DSPARK" and config.get("markov_head_type") not in MARKOV_HEAD_TYPES:
        known = ", ".join(MARKOV_HEAD_TYPES)
        problems.append(
            f"config.json: markov_head_type must be one of {known}, got {config.get('markov_head_type')!r}"
        )
    if draft_format.algorithm == "EAGLE3":
        broken += _check_eagle3_config(config, draft_format, problems)
    taps = draft_format.taps(config)
    if taps and not all(isinstance(layer, int) and layer >= 0 for layer in taps):
        problems.append(
            f"config.json: tap layers must be layer numbers from 0, got {list(taps)}; correct the list"
        )
    if taps and len(set(taps)) != len(taps):
        problems.append(
            f"config.json: tap layers must be distinct, got {list(taps)}; SGLang captures each once"
        )
    return not broken


def _check_eagle3_config(config: Config, draft_format: DraftFormat, problems: list[str]) -> list[str]:
    broken = []
    if "draft_vocab_size" not in config and not config.get("tie_word_embeddings"):
        problems.append(
            "config.json: draft_vocab_size must exist (null = the target's whole vocabulary); add it"
        )
        broken.append("draft_vocab_size")
    taps = draft_format.taps(config)
    if taps and eagle3_num_aux(config) != len(taps):
        rule = f"num_aux_hidden_states must equal the number of tap layers {list(taps)}"
        problems.append(f"config.json: {rule}, got {eagle3_num_aux(config)}; correct one of the two")
    return broken


def _check_tensors(
    config: Config, draft_format: DraftFormat, entries: dict[str, TensorEntry], *, problems: list[str]
) -> None:
    expected = draft_format.tensors(config)
    found: dict[str, TensorEntry] = {}
    for stored_name, entry in entries.items():
        name = draft_format.canonical(stored_name)
        if name in found:
            problems.append(f"tensor {name} is stored twice, once as {stored_name}; keep one")
        found[name] = entry
        if name not in expected and not name.startswith(draft_format.ignored_prefixes or ("\0",)):
            problems.append(
                f"tensor {stored_name} {list(entry.shape)} is unexpected: SGLang would skip it; remove it"
            )
    for name, rule in expected.items():
        stored = found.get(name)
        if stored is None:
            if rule.required:
                problems.append(
                    f"tensor {name} {list(rule.shape)} is missing: SGLang would serve it untrained"
                )
            continue
        if stored.shape != rule.shape:
            shapes = f"must have shape {list(rule.shape)} by config.json, got {list(stored.shape)}"
            problems.append(f"tensor {name} {shapes}; the folder mixes two checkpoints")
        if stored.dtype not in rule.dtypes:
            problems.append(
                f"tensor {name} must be one of {', '.join(rule.dtypes)}, got {stored.dtype}; convert it"
            )
    confidence = [found.get(f"confidence_head.proj.{part}") for part in ("weight", "bias")]
    if draft_format.algorithm == "DSPARK" and sum(entry is None for entry in confidence) == 1:
        problems.append("confidence_head.proj needs weight and bias together; one of the two is missing")
    if (
        draft_format.algorithm == "EAGLE3"
        and "d2t" in found
        and not any("tensor d2t" in text for text in problems)
    ):
        _check_draft_vocabulary(config, found["d2t"], problems)


def _check_draft_vocabulary(config: Config, entry: TensorEntry, problems: list[str]) -> None:
    """`d2t` holds offsets: target id = draft id + d2t[draft id]."""
    ids = read_integers(entry) + np.arange(entry.shape[0])
    outside = int(((ids < 0) | (ids >= config["vocab_size"])).sum())
    if outside:
        rule = f"ids must lie in [0, {config['vocab_size']})"
        problems.append(
            f"tensor d2t holds offsets, whose {rule}; {outside} do not: were target ids stored instead?"
        )
    elif len(np.unique(ids)) != len(ids):
        problems.append("tensor d2t maps two draft ids to one target id; build it from distinct target ids")


def _check_fit(
    config: Config, draft_format: DraftFormat, target: pathlib.Path, *, problems: list[str]
) -> None:
    raw = _read_config(target, problems)
    wanted = raw.get("text_config", raw)
    if not wanted:
        return
    name, num_layers = target.name, wanted.get("num_hidden_layers")
    for key, value in (
        ("hidden_size", config.get("hidden_size")),
        ("vocab_size", config.get("vocab_size")),
        ("num_hidden_layers", nested(config, "num_target_layers", num_layers)),
        ("hidden_size", config.get("target_hidden_size", wanted.get("hidden_size"))),
    ):
        if _positive(value) and value != wanted.get(key):
            label = "num_target_layers" if key == "num_hidden_layers" else key
            fault = f"draft {label} {value} must equal the target's {key} {wanted.get(key)} ({name})"
            problems.append(f"{fault}; take the draft that was trained for this target")
    taps = draft_format.taps(config) or ()
    if isinstance(num_layers, int):
        # SGLang captures in front of layer i + 1, so the last layer's output is out of reach
        problems += [
            f"tap layer {layer} must be below the target's last layer {num_layers - 1} ({name}); choose another"
            for layer in taps
            if isinstance(layer, int) and layer >= num_layers - 1
        ]
    mask = nested(config, "mask_token_id")
    vocab = wanted.get("vocab_size")
    if (
        draft_format.has_mask_token
        and isinstance(mask, int)
        and isinstance(vocab, int)
        and not 0 <= mask < vocab
    ):
        problems.append(
            f"mask_token_id must lie in [0, {vocab}) of the target ({name}), got {mask}; choose another"
        )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
