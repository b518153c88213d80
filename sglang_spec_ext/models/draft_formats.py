"""What each draft architecture's folder must hold: config keys, tensors, shapes and dtypes.

Source: the loaders of SGLang 0.5.23 (`srt/models/llama_eagle.py`, `llama_eagle3.py`, `dflash.py`,
`dspark.py`, `srt/speculative/dflash_utils.py`, `dspark_components/dspark_config.py`). Those loaders skip
tensors that they do not know and do not miss backbone tensors that are absent, hence this table.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

FLOATING = ("BF16", "F16", "F32")
INTEGER = ("I64", "I32")
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Expected:
    """One tensor of a format: its shape, the allowed dtypes, and whether the draft works without it."""

    shape: tuple[int, ...]
    dtypes: tuple[str, ...] = FLOATING
    required: bool = True


@dataclass(frozen=True)
class DraftFormat:
    """How one architecture is stored.

    `required_keys` are config.json keys that must be positive integers; `tensors(config)` is the table of
    tensors by canonical name; `canonical(name)` maps a stored name to it (loaders accept aliases);
    `ignored_prefixes` are tensors which the loader skips on purpose; `taps(config)` are the target layers
    whose outputs are read (None = SGLang's default, chosen from the target's depth).
    """

    algorithm: str
    required_keys: tuple[str, ...]
    tensors: Callable[[Config], dict[str, Expected]]
    canonical: Callable[[str], str]
    taps: Callable[[Config], tuple[int, ...] | None]
    ignored_prefixes: tuple[str, ...] = ()
    has_mask_token: bool = False
    top_level_only: tuple[str, ...] = field(default=())


def nested(config: Config, key: str, default: Any = None) -> Any:
    """Return a DFlash key from `dflash_config` or, failing that, from the top level (SGLang's order)."""
    inner = config.get("dflash_config") or {}
    return inner.get(key, config.get(key, default))


def _attention(config: Config, prefix: str, *, input_width: int) -> dict[str, Expected]:
    hidden, head = config["hidden_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    widths = {
        "q_proj": (query, input_width),
        "k_proj": (key_value, input_width),
        "v_proj": (key_value, input_width),
    }
    widths["o_proj"] = (hidden, query)
    table = {f"{prefix}self_attn.{name}.weight": Expected(shape) for name, shape in widths.items()}
    if config.get("attention_bias"):
        table |= {f"{prefix}self_attn.{name}.bias": Expected((shape[0],)) for name, shape in widths.items()}
    return table


def _mlp(config: Config, prefix: str) -> dict[str, Expected]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    return {
        f"{prefix}mlp.gate_proj.weight": Expected((inner, hidden)),
        f"{prefix}mlp.up_proj.weight": Expected((inner, hidden)),
        f"{prefix}mlp.down_proj.weight": Expected((hidden, inner)),
    }


def _dflash_tensors(config: Config) -> dict[str, Expected]:
    hidden = config["hidden_size"]
    taps = _block_taps(config)
    # without ids SGLang spreads one tap per draft layer
    num_taps = len(taps) if taps else config["num_hidden_layers"]
    table = {
        "fc.weight": Expected((hidden, num_taps * hidden)),
        "hidden_norm.weight": Expected((hidden,)),
        "norm.weight": Expected((hidden,)),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        table |= _attention(config, prefix, input_width=hidden) | _mlp(config, prefix)
        for name in ("input_layernorm", "post_attention_layernorm"):
            table[f"{prefix}{name}.weight"] = Expected((hidden,))
        for name in ("q_norm", "k_norm"):
            table[f"{prefix}self_attn.{name}.weight"] = Expected((config["head_dim"],))
    return table


def _dspark_tensors(config: Config) -> dict[str, Expected]:
    hidden, vocab, rank = config["hidden_size"], config["vocab_size"], config["markov_rank"]
    table = _dflash_tensors(config)
    for name in ("markov_w1", "markov_w2"):
        table[f"markov_head.{name}.weight"] = Expected((vocab, rank))
    kind = config.get("markov_head_type")
    if kind == "gated":
        table["markov_head.gate_proj.weight"] = Expected((rank, hidden + rank))
        table["markov_head.gate_proj.bias"] = Expected((rank,))
    if kind == "rnn":
        table["markov_head.joint_proj.weight"] = Expected((3 * rank, 2 * rank + hidden))
        table["markov_head.joint_proj.bias"] = Expected((3 * rank,))
    # static verification never builds the head; the other modes refuse a folder without it
    promised = bool(config.get("enable_confidence_head", False))
    width = hidden + (rank if config.get("confidence_head_with_markov", True) else 0)
    table["confidence_head.proj.weight"] = Expected((1, width), required=promised)
    table["confidence_head.proj.bias"] = Expected((1,), required=promised)
    return table


def _eagle3_tensors(config: Config) -> dict[str, Expected]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    target_hidden = config.get("target_hidden_size", hidden)
    num_aux, eagle = eagle3_num_aux(config), config.get("eagle_config") or {}
    table = {
        "fc.weight": Expected((hidden, num_aux * target_hidden)),
        "norm.weight": Expected((hidden,)),
        "embed_tokens.weight": Expected((vocab, hidden), required=False),
        "t2d": Expected((vocab,), ("BOOL", *INTEGER), required=False),
    }
    if config.get("bias"):
        table["fc.bias"] = Expected((hidden,))
    if eagle.get("norm_before_fc", config.get("norm_before_fc")):
        table["input_norm.weight"] = Expected((num_aux * target_hidden,))
    if config.get("fc_norm") or config.get("use_aux_norm"):
        table |= {f"fc_norm.{i}.weight": Expected((target_hidden,)) for i in range(num_aux)}
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        width = 2 * hidden if index == 0 else hidden  # the first layer reads [embedding ; hidden state]
        table |= _attention({**config, "attention_bias": False}, prefix, input_width=width) | _mlp(config, prefix)
        table[f"{prefix}input_layernorm.weight"] = Expected((hidden,), required=index == 0)
        for name in ("hidden_norm", "post_attention_layernorm"):
            table[f"{prefix}{name}.weight"] = Expected((hidden,))
    draft_vocab = config.get("draft_vocab_size")
    reduced = draft_vocab is not None and draft_vocab != vocab
    owns_head = draft_vocab is not None and not config.get("tie_word_embeddings", False)
    table["lm_head.weight"] = Expected((draft_vocab or vocab, hidden), required=owns_head)
    table["d2t"] = Expected((draft_vocab or vocab,), INTEGER, required=reduced)
    return table


def _eagle_tensors(config: Config) -> dict[str, Expected]:
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    table = {
        "fc.weight": Expected((hidden, 2 * hidden)),
        "fc.bias": Expected((hidden,)),
        "embed_tokens.weight": Expected((vocab, hidden), required=False),
    }
    for index in range(config["num_hidden_layers"]):
        prefix = f"layers.{index}."
        table |= _attention(config, prefix, input_width=hidden) | _mlp(config, prefix)
        table[f"{prefix}post_attention_layernorm.weight"] = Expected((hidden,))
        if index > 0:  # layer 0 reads the fused input without a norm
            table[f"{prefix}input_layernorm.weight"] = Expected((hidden,))
    return table


def _block_taps(config: Config) -> tuple[int, ...] | None:
    ids = nested(config, "target_layer_ids")
    return tuple(ids) if ids is not None else None


def _eagle3_taps(config: Config) -> tuple[int, ...] | None:
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return tuple(ids) if ids else None


def eagle3_num_aux(config: Config) -> int:
    """Return how many target layers `fc` reads: the explicit key, the list of ids, or SGLang's default 3."""
    explicit = config.get("num_aux_hidden_states")
    taps = _eagle3_taps(config)
    return int(explicit) if explicit is not None else len(taps) if taps else 3


_LLAMA_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
)
# Qwen3Config fills an absent head_dim with 128 and absent key/value heads with 32: they must be stated.
_BLOCK_KEYS = (*_LLAMA_KEYS, "head_dim")
_DFLASH = DraftFormat(
    algorithm="DFLASH",
    required_keys=_BLOCK_KEYS,
    tensors=_dflash_tensors,
    canonical=lambda name: name.removeprefix("model."),
    taps=_block_taps,
    ignored_prefixes=("rotary_emb.",),
    has_mask_token=True,
)
_DSPARK = DraftFormat(
    algorithm="DSPARK",
    required_keys=(*_BLOCK_KEYS, "block_size", "markov_rank"),
    tensors=_dspark_tensors,
    canonical=lambda name: name.removeprefix("model."),
    taps=_block_taps,
    ignored_prefixes=("embed_tokens.", "lm_head.", "rotary_emb."),
    has_mask_token=True,
    # the model build reads these at the top level only, although the parser finds nested ones
    top_level_only=(
        "markov_rank",
        "markov_head_type",
        "confidence_head_with_markov",
        "enable_confidence_head",
    ),
)
_EAGLE3 = DraftFormat(
    algorithm="EAGLE3",
    required_keys=_LLAMA_KEYS,
    tensors=_eagle3_tensors,
    canonical=lambda name: name.removeprefix("model.").replace("midlayer.", "layers.0."),
    taps=_eagle3_taps,
)
_EAGLE = DraftFormat(
    algorithm="EAGLE",
    required_keys=_LLAMA_KEYS,
    tensors=_eagle_tensors,
    canonical=lambda name: name,
    taps=lambda _config: (),
    ignored_prefixes=("lm_head.",),
)
# config.json `architectures[0]` -> format
DRAFT_FORMATS: dict[str, DraftFormat] = {
    "LlamaForCausalLMEagle": _EAGLE,
    "LlamaForCausalLMEagle3": _EAGLE3,
    "DFlashDraftModel": _DFLASH,
    "Qwen3DSparkModel": _DSPARK,
    "DSparkDraftModel": _DSPARK,
}
