"""Writes a trained draft as the folder that SGLang loads: config.json and model.safetensors in bfloat16.

Markov rows, trained for the common tokens and one shared rest, are written out for the whole vocabulary.
"""

import json
import pathlib
from typing import Any

import torch
from torch import nn

from sglang_spec_ext.models.check import check_draft
from sglang_spec_ext.models.drafts_block import BlockDraft
from sglang_spec_ext.models.drafts_eagle3 import Eagle3Draft
from sglang_spec_ext.models.files import replace_atomically, write_tensors
from sglang_spec_ext.models.target import TargetConfig

Tensor = torch.Tensor
Folder = tuple[dict[str, Any], dict[str, Tensor]]


def _common_config(target: TargetConfig, *, intermediate_size: int, num_kv_heads: int) -> dict[str, Any]:
    return {
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate_size,
        "num_attention_heads": target.num_attention_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": target.head_dim,
        "vocab_size": target.vocab_size,
        "rms_norm_eps": target.rms_norm_eps,
        "rope_theta": target.rope_theta,
        "max_position_embeddings": 8192,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }


def _folded(draft: nn.Module) -> dict[str, Tensor]:
    """Return the draft's tensors with the feature scale folded into `fc`."""
    tensors = dict(draft.state_dict())
    del tensors["fc.scale"]
    return tensors | {"fc.weight": draft.fc.folded()}


def block_folder(draft: BlockDraft) -> Folder:
    """Return (config, tensors) of a DFlash or DSpark draft."""
    shape, target = draft.shape, draft.target
    config = _common_config(target, intermediate_size=shape.intermediate_size, num_kv_heads=shape.num_kv_heads) | {
        "model_type": "qwen3",
        "num_hidden_layers": shape.num_layers,
        "num_target_layers": target.num_hidden_layers,
        "layer_types": ["full_attention"] * shape.num_layers,
        "block_size": shape.block,
    }
    tensors = {name: value for name, value in _folded(draft).items() if not name.startswith("markov_head")}
    taps = {"target_layer_ids": list(shape.taps), "mask_token_id": shape.mask_token_id}
    if not shape.markov_rank:
        return config | {"architectures": ["DFlashDraftModel"], "dflash_config": taps}, tensors
    for name in ("markov_w1", "markov_w2"):
        rows = getattr(draft.markov_head, name).weight.detach()
        tensors[f"markov_head.{name}.weight"] = rows[draft.markov_row]
    config |= taps | {
        "architectures": ["Qwen3DSparkModel"],
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }
    return config, tensors


def eagle3_folder(draft: Eagle3Draft) -> Folder:
    """Return (config, tensors) of an EAGLE-3 draft; d2t holds offsets."""
    shape, target = draft.shape, draft.target
    config = _common_config(
        target, intermediate_size=shape.intermediate_size, num_kv_heads=target.num_key_value_heads
    ) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "target_hidden_size": target.hidden_size,
        "draft_vocab_size": shape.draft_vocab_size,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(shape.taps),
            "use_aux_hidden_state": True,
        },
    }
    tensors = _folded(draft)
    tensors["d2t"] = draft.common - torch.arange(len(draft.common))
    return config, tensors


def save_draft(draft: BlockDraft | Eagle3Draft, folder: pathlib.Path) -> None:
    """Write the two files, each whole or not at all; the folder's other files stay.

    ValueError when the result would not pass the folder check (a defect of this module).
    """
    config, tensors = eagle3_folder(draft) if isinstance(draft, Eagle3Draft) else block_folder(draft)
    stored = {
        name: value.detach().to(torch.bfloat16 if value.is_floating_point() else value.dtype).contiguous()
        for name, value in tensors.items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2) + "\n"
    write_tensors(folder / "model.safetensors", stored)
    replace_atomically(folder / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
    if problems := check_draft(folder):
        raise ValueError(f"{folder}: the written draft is not loadable: {problems}")
