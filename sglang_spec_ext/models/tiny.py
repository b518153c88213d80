"""Tiny seeded checkpoints for tests: targets of two families and a draft of every kind that SGLang loads.

Formats: `sglang/srt/models/{llama,qwen3,llama_eagle,llama_eagle3,dflash,dspark}.py`. Two families of entries:

- `random-*`: ordinary random weights. A random draft is accepted about once in V tokens, so these show that a
  draft never changes the output, not that it helps.
- `blend-*`: a target that mostly follows a table from the last token to the next (its residual branches, and with
  them attention, add about a third), and drafts built to know that table except for a chosen quarter of the
  tokens. Drafts are accepted often and refused often, at any temperature, without training. It has a tokenizer
  of one token a character, so that text interfaces can be tested too.
"""

import json
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 8, 4, 2, 32
RANDOM_VOCAB, BLEND_VOCAB, REDUCED_VOCAB = 512, 64, 128
FAVOURITE = 5  # the token that the blend target emits most, and its block draft always proposes
GAMMA, BLOCK, MARKOV_RANK = 7, 8, 16
TAPS = (1, 4, 6)
SEED = 20260105


@dataclass(frozen=True)
class Entry:
    """One checkpoint folder: its recipe string changes whenever its content would."""

    name: str
    build: Callable[[Path], None]

    @property
    def recipe(self) -> str:
        """Identify the content: bump the number when a builder changes."""
        return f"tiny/{self.name}/4"


def entries() -> tuple[Entry, ...]:
    """Return every tiny checkpoint, targets first."""
    rows: list[Entry] = [
        Entry("random-llama", lambda path: _random_target(path, "llama")),
        Entry("random-qwen3", lambda path: _random_target(path, "qwen3")),
        Entry("random-eagle", lambda path: _save(path, _eagle_config(RANDOM_VOCAB), _eagle(RANDOM_VOCAB))),
        Entry("random-eagle3", lambda path: _save(path, *_eagle3(RANDOM_VOCAB, RANDOM_VOCAB))),
        Entry("random-eagle3-reduced", lambda path: _save(path, *_eagle3(RANDOM_VOCAB, REDUCED_VOCAB))),
        Entry("random-dflash", lambda path: _save(path, _dflash_config(RANDOM_VOCAB), _block_backbone())),
    ]
    rows += [
        Entry(f"random-dspark-{head}", lambda path, head=head: _save(path, *_dspark(RANDOM_VOCAB, head)))
        for head in ("vanilla", "gated", "rnn")
    ]
    rows += [
        Entry("blend-llama", lambda path: _blend_target(path, "llama")),
        Entry("blend-qwen3", lambda path: _blend_target(path, "qwen3")),
        Entry("blend-eagle", lambda path: _save(path, _eagle_config(BLEND_VOCAB), _blend_eagle())),
        Entry("blend-eagle3", lambda path: _save(path, *_blend_eagle3())),
        Entry("blend-dflash", lambda path: _save(path, *_blend_dflash())),
        Entry("blend-dspark", lambda path: _save(path, *_blend_dspark())),
    ]
    return tuple(rows)


def _save(path: Path, config: dict[str, object], weights: Weights) -> None:
    (path / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})


def _normal(generator: torch.Generator, *shape: int, std: float = 0.02) -> torch.Tensor:
    return torch.randn(*shape, generator=generator) * std


def _generator(salt: int) -> torch.Generator:
    return torch.Generator().manual_seed(SEED + salt)


def _common(vocab: int, *, layers: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> dict[str, object]:
    return {
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


def _target_config(family: str, vocab: int) -> dict[str, object]:
    architecture = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]
    return {**_common(vocab, layers=LAYERS), "architectures": [architecture], "model_type": family}


def _block(
    generator: torch.Generator, prefix: str, *, qk_norm: bool, width: int = HIDDEN, std: float = 0.02
) -> Weights:
    """Return one decoder layer; `width` is the input width of q, k and v (2 x hidden in EAGLE-3)."""
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    weights = {
        f"{attention}q_proj.weight": _normal(generator, HEADS * HEAD_DIM, width, std=std),
        f"{attention}k_proj.weight": _normal(generator, KV_HEADS * HEAD_DIM, width, std=std),
        f"{attention}v_proj.weight": _normal(generator, KV_HEADS * HEAD_DIM, width, std=std),
        f"{attention}o_proj.weight": _normal(generator, HIDDEN, HEADS * HEAD_DIM, std=std),
        f"{mlp}gate_proj.weight": _normal(generator, INTERMEDIATE, HIDDEN, std=std),
        f"{mlp}up_proj.weight": _normal(generator, INTERMEDIATE, HIDDEN, std=std),
        f"{mlp}down_proj.weight": _normal(generator, HIDDEN, INTERMEDIATE, std=std),
        f"{prefix}post_attention_layernorm.weight": torch.ones(HIDDEN),
    }
    if qk_norm:
        weights[f"{attention}q_norm.weight"] = torch.ones(HEAD_DIM)
        weights[f"{attention}k_norm.weight"] = torch.ones(HEAD_DIM)
    return weights


def _random_target(path: Path, family: str) -> None:
    generator = _generator(1)
    weights: Weights = {}
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        weights |= _block(generator, prefix, qk_norm=family == "qwen3")
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
    weights["model.embed_tokens.weight"] = _normal(generator, RANDOM_VOCAB, HIDDEN)
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    weights["lm_head.weight"] = _normal(generator, RANDOM_VOCAB, HIDDEN)
    _save(path, _target_config(family, RANDOM_VOCAB), weights)


def _eagle_config(vocab: int) -> dict[str, object]:
    return {**_common(vocab, layers=1), "architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}


def _eagle(vocab: int) -> Weights:
    generator = _generator(2)
    weights = _block(generator, "layers.0.", qk_norm=False)
    weights["embed_tokens.weight"] = _normal(generator, vocab, HIDDEN)
    weights["fc.weight"] = _normal(generator, HIDDEN, 2 * HIDDEN)
    weights["fc.bias"] = torch.zeros(HIDDEN)
    return weights


def _eagle3(vocab: int, draft_vocab: int) -> tuple[dict[str, object], Weights]:
    generator = _generator(3)
    config = {
        **_common(vocab, layers=1),
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": draft_vocab,
        "target_hidden_size": HIDDEN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(TAPS), "use_aux_hidden_state": True},
    }
    weights = _block(generator, "midlayer.", qk_norm=False, width=2 * HIDDEN)
    for norm in ("midlayer.hidden_norm", "midlayer.input_layernorm", "norm"):
        weights[f"{norm}.weight"] = torch.ones(HIDDEN)
    weights["fc.weight"] = _normal(generator, HIDDEN, len(TAPS) * HIDDEN)
    weights["lm_head.weight"] = _normal(generator, draft_vocab, HIDDEN)
    if draft_vocab != vocab:
        step = vocab // draft_vocab
        weights["d2t"] = torch.arange(draft_vocab) * (step - 1)  # offsets: target id = draft id + d2t
        chosen = torch.zeros(vocab, dtype=torch.bool)
        chosen[::step] = True
        weights["t2d"] = chosen
    return config, weights


def _block_config(vocab: int, layers: int) -> dict[str, object]:
    return {
        **_common(vocab, layers=layers),
        "model_type": "qwen3",
        "num_target_layers": LAYERS,
        "layer_types": ["full_attention"] * layers,
    }


def _dflash_config(vocab: int, mask_token_id: int | None = None) -> dict[str, object]:
    return {
        **_block_config(vocab, 2),
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
        "dflash_config": {
            "target_layer_ids": list(TAPS),
            "mask_token_id": vocab - 1 if mask_token_id is None else mask_token_id,
        },
    }


def _block_backbone(layers: int = 2) -> Weights:
    generator = _generator(4)
    weights: Weights = {
        "fc.weight": _normal(generator, HIDDEN, len(TAPS) * HIDDEN),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for i in range(layers):
        weights |= _block(generator, f"layers.{i}.", qk_norm=True)
        weights[f"layers.{i}.input_layernorm.weight"] = torch.ones(HIDDEN)
    return weights


def _dspark_config(vocab: int, head: str, rank: int) -> dict[str, object]:
    return {
        **_block_config(vocab, 2),
        "architectures": ["Qwen3DSparkModel"],
        "block_size": GAMMA,
        "target_layer_ids": list(TAPS),
        "mask_token_id": vocab - 1,
        "markov_rank": rank,
        "markov_head_type": head,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }


def _dspark(vocab: int, head: str) -> tuple[dict[str, object], Weights]:
    generator = _generator(5)
    rank = MARKOV_RANK
    weights = _block_backbone()
    weights["markov_head.markov_w1.weight"] = _normal(generator, vocab, rank)
    weights["markov_head.markov_w2.weight"] = _normal(generator, vocab, rank)
    if head == "gated":
        weights["markov_head.gate_proj.weight"] = _normal(generator, rank, HIDDEN + rank)
        weights["markov_head.gate_proj.bias"] = torch.zeros(rank)
    if head == "rnn":
        weights["markov_head.joint_proj.weight"] = _normal(generator, 3 * rank, 2 * rank + HIDDEN)
        weights["markov_head.joint_proj.bias"] = torch.zeros(3 * rank)
    weights["confidence_head.proj.weight"] = _normal(generator, 1, HIDDEN + rank, std=0.2)
    weights["confidence_head.proj.bias"] = torch.zeros(1)
    return _dspark_config(vocab, head, rank), weights


def _blend_tables() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the target's embedding, rows of unit RMS [V, H], and its head [V, H].

    Every embedding shares one direction, which raises the favourite's logit by about five: it leads for a third of
    the tokens, while the other logits have a standard deviation near 2.5.
    """
    generator = _generator(6)
    shared = _normal(generator, HIDDEN, std=1.0)
    embedding = _normal(generator, BLEND_VOCAB, HIDDEN, std=1.0) + 0.6 * shared
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    head = _normal(generator, BLEND_VOCAB, HIDDEN, std=2.5 / HIDDEN**0.5)
    head -= head @ shared[:, None] * shared / shared.square().sum()
    head[FAVOURITE] += 10.0 * shared / shared.square().sum()
    return embedding, head


def _known_rows(embedding: torch.Tensor) -> torch.Tensor:
    """Return the table that the drafts use: a quarter of the rows replaced, so that drafts there are wrong."""
    generator = _generator(7)
    known = embedding.clone()
    others = [token for token in range(BLEND_VOCAB) if token != FAVOURITE]
    spoiled = torch.tensor(others)[torch.randperm(len(others), generator=generator)[: BLEND_VOCAB // 4]]
    known[spoiled] = _normal(generator, len(spoiled), HIDDEN, std=1.0)
    return known


def _silence(weights: Weights, *suffixes: str) -> Weights:
    """Zero the projections with which a layer writes to the residual stream."""
    return {name: torch.zeros_like(w) if name.endswith(suffixes) else w for name, w in weights.items()}


def _blend_target(path: Path, family: str) -> None:
    embedding, head = _blend_tables()
    weights: Weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    weights["model.norm.weight"] = torch.ones(HIDDEN)
    generator = _generator(8)
    for i in range(LAYERS):
        prefix = f"model.layers.{i}."
        weights |= _block(generator, prefix, qk_norm=family == "qwen3", std=0.03)
        weights[f"{prefix}input_layernorm.weight"] = torch.ones(HIDDEN)
    _save(path, _target_config(family, BLEND_VOCAB), weights)
    _save_tokenizer(path)


def _save_tokenizer(path: Path) -> None:
    """Write a tokenizer of one token a character, with a chat template."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = string.ascii_lowercase + string.digits + " .,?!:;-'()\n" + string.ascii_uppercase[:13]
    tokens = ["<unk>", "<s>", "</s>", *characters]
    tokens = tokens[:BLEND_VOCAB]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token="<unk>"))  # noqa: S106
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"  # noqa: S106
    )
    fast.chat_template = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    fast.save_pretrained(path)


def _blend_eagle() -> Weights:
    """EAGLE reads [embedding ; hidden]: `fc` keeps the embedding and drops a few directions of it."""
    embedding, _ = _blend_tables()
    weights = _silence(_eagle(BLEND_VOCAB), "o_proj.weight", "down_proj.weight")
    keep = torch.eye(HIDDEN)
    keep[: HIDDEN // 8] = 0.0
    weights["fc.weight"] = torch.cat([keep, torch.zeros(HIDDEN, HIDDEN)], 1)
    weights["embed_tokens.weight"] = embedding
    return weights


def _blend_eagle3() -> tuple[dict[str, object], Weights]:
    """EAGLE-3 reaches the embedding through attention only: sharp attention to the token itself."""
    _, head = _blend_tables()
    config, weights = _eagle3(BLEND_VOCAB, BLEND_VOCAB)
    config["num_key_value_heads"] = HEADS
    embedding_half = torch.cat([torch.eye(HIDDEN), torch.zeros(HIDDEN, HIDDEN)], 1)
    weights["midlayer.self_attn.q_proj.weight"] = 8.0 * embedding_half
    weights["midlayer.self_attn.k_proj.weight"] = embedding_half.clone()
    weights["midlayer.self_attn.v_proj.weight"] = embedding_half.clone()
    weights["midlayer.self_attn.o_proj.weight"] = torch.eye(HIDDEN)
    weights["midlayer.mlp.down_proj.weight"] = torch.zeros(HIDDEN, INTERMEDIATE)
    weights["fc.weight"] = torch.zeros_like(weights["fc.weight"])
    weights["lm_head.weight"] = head.clone()
    weights["lm_head.weight"][::4] = 0.0  # never proposes these
    return config, weights


def _blend_dflash() -> tuple[dict[str, object], Weights]:
    """A parallel block without a Markov head guesses from the mask's own embedding, alike at every place.

    The mask is the token after which the favourite is surest, so the guess is the favourite.
    """
    embedding, head = _blend_tables()
    mask = int((embedding @ head.T).log_softmax(-1)[:, FAVOURITE].argmax())
    weights = _silence(_block_backbone(), "o_proj.weight", "down_proj.weight")
    return _dflash_config(BLEND_VOCAB, mask), weights


def _blend_dspark() -> tuple[dict[str, object], Weights]:
    """The Markov head of rank H holds the whole table; the confidence head points at the spoiled rows."""
    embedding, head = _blend_tables()
    known = _known_rows(embedding)
    weights = _silence(_block_backbone(), "o_proj.weight", "down_proj.weight")
    weights["norm.weight"] = torch.zeros(HIDDEN)  # no base logits: the Markov bias is all there is
    weights["markov_head.markov_w1.weight"] = known
    weights["markov_head.markov_w2.weight"] = head
    spoiled = (known != embedding).any(1).float()
    confidence = torch.zeros(1, HIDDEN + HIDDEN)
    direction = torch.linalg.lstsq(known, 4.0 - 8.0 * spoiled[:, None]).solution
    confidence[0, HIDDEN:] = direction[:, 0]
    weights["confidence_head.proj.weight"] = confidence
    weights["confidence_head.proj.bias"] = torch.zeros(1)
    return _dspark_config(BLEND_VOCAB, "vanilla", HIDDEN), weights
