"""Starts a training from a draft folder instead of from the text: what it holds, in the form that is trained.

The folder states its own tokens: an EAGLE-3 draft in `d2t`, a DSpark draft by its Markov rows (all tokens without a
row of their own were written with one shared row). A training on other text keeps them.
"""

import json
import pathlib

import torch
from safetensors.torch import load_file

from sglang_spec_ext.models.drafts_block import BlockDraft, BlockShape
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Draft, Eagle3Shape
from sglang_spec_ext.models.drafts_load import DraftFolderError, block_shape, eagle3_shape

Tensor = torch.Tensor
MARKOV_ROWS = ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight")


def own_tokens(folder: pathlib.Path) -> Tensor | None:
    """Return the tokens [n] int64 that a folder's draft vocabulary or Markov head tells apart; None for DFlash."""
    stored = load_file(folder / "model.safetensors")
    if "d2t" in stored:
        return stored["d2t"] + torch.arange(len(stored["d2t"]))
    if MARKOV_ROWS[0] not in stored:
        return None
    rows = torch.cat([stored[name] for name in MARKOV_ROWS], 1).float()
    _, row_of, count = rows.unique(dim=0, return_inverse=True, return_counts=True)
    return (row_of != count.argmax()).nonzero()[:, 0]


def take_weights(draft: BlockDraft | Eagle3Draft, folder: pathlib.Path) -> None:
    """Put a folder's weights into a draft of the same shape and tokens, whose feature scale stays.

    DraftFolderError when the shapes differ.
    """
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found: BlockShape | Eagle3Shape
    found = eagle3_shape(config) if "draft_vocab_size" in config else block_shape(config)
    if found != draft.shape:
        message = f"{folder}: the draft's shape must be that of the recipe, {draft.shape}, got {found}"
        raise DraftFolderError(f"{message}; train from the start instead, without --start-from")
    weights = {name: value.float() for name, value in load_file(folder / "model.safetensors").items() if name != "d2t"}
    weights["fc.scale"] = draft.fc.scale
    weights["fc.weight"] = weights["fc.weight"] * draft.fc.scale
    if isinstance(draft, BlockDraft) and draft.shape.markov_rank:
        first = torch.zeros(int(draft.markov_row.max()) + 1, dtype=torch.int64)
        # several tokens share the last row: any of them has it
        first[draft.markov_row] = torch.arange(len(draft.markov_row))
        for name in MARKOV_ROWS:
            weights[name] = weights[name][first]
    draft.load_state_dict(weights)
