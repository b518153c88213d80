"""Reads draft folders back: shapes, and a DFlash or DSpark draft whole, so that what is measured is what is shipped."""

import json
import pathlib
from typing import Any

import torch
from safetensors.torch import load_file

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.check import check_draft
from sglang_spec_ext.models.draft_formats import nested
from sglang_spec_ext.models.drafts_block import BlockDraft, BlockShape
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Shape
from sglang_spec_ext.models.target import Target


class DraftFolderError(SpecExtError):
    """A folder that holds no block draft for this target."""


def block_shape(config: dict[str, Any]) -> BlockShape:
    """Return the shape that a DFlash or DSpark `config.json` states; DraftFolderError for another draft's."""
    is_dspark = "markov_rank" in config
    if not is_dspark and config["architectures"] != ["DFlashDraftModel"]:
        raise DraftFolderError(f"config.json: architectures must be a block draft's, got {config['architectures']}")
    return BlockShape(
        taps=tuple(nested(config, "target_layer_ids")),
        num_layers=config["num_hidden_layers"],
        intermediate_size=config["intermediate_size"],
        num_kv_heads=config["num_key_value_heads"],
        block=config["block_size"],
        first_row=0 if is_dspark else 1,
        mask_token_id=nested(config, "mask_token_id"),
        markov_rank=config.get("markov_rank", 0),
    )


def eagle3_shape(config: dict[str, Any]) -> Eagle3Shape:
    """Return the shape that an EAGLE-3 `config.json` states."""
    return Eagle3Shape(
        taps=tuple(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]),
        intermediate_size=config["intermediate_size"],
        draft_vocab_size=config["draft_vocab_size"],
    )


def load_block_draft(folder: pathlib.Path, target: Target, *, target_folder: pathlib.Path) -> BlockDraft:
    """Return the draft in float32, with a Markov row for every token of the vocabulary."""
    if problems := check_draft(folder, target_folder):
        raise DraftFolderError("; ".join(problems))
    shape = block_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    everything = torch.arange(target.config.vocab_size)
    draft = BlockDraft(shape, target.config, embedding=target.embedding, common=everything)
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items()}
    weights["fc.scale"] = torch.ones(weights["fc.weight"].shape[1])
    for name in ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"):
        if name in weights:  # the shared row for tokens without one of their own: there are none
            weights[name] = torch.cat([weights[name], torch.zeros(1, shape.markov_rank)])
    draft.load_state_dict(weights)
    return draft.eval()
