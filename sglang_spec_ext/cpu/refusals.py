"""What the CPU reference platform does not serve, refused by name before anything is built."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sglang_spec_ext.errors import SpecExtError

ALGORITHMS = frozenset({"EAGLE", "EAGLE3", "NEXTN", "DFLASH", "DSPARK", "NGRAM"})

# field of ServerArgs -> (does this value pass?, what is served instead)
_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("device", lambda v: v in (None, "cpu"), "use --device cpu"),
    ("attention_backend", lambda v: v in (None, "torch_spec", "torch_native"), "use torch_spec or leave it out"),
    ("page_size", lambda v: v in (None, 1), "use --page-size 1"),
    ("pp_size", lambda v: v in (None, 1), "use --pp-size 1"),
    ("quantization", lambda v: v is None, "serve an unquantised checkpoint"),
    ("kv_cache_dtype", lambda v: v in (None, "auto", "bfloat16", "bf16"), "leave it out"),
    ("dtype", lambda v: v in (None, "auto", "float32", "float", "bfloat16"), "use float32 or bfloat16"),
    ("enable_lora", lambda v: not v, "serve without LoRA"),
    ("enable_hierarchical_cache", lambda v: not v, "serve without a hierarchical cache"),
    ("enable_two_batch_overlap", lambda v: not v, "leave it out"),
    ("enable_torch_compile", lambda v: not v, "leave it out"),
    ("enable_deterministic_inference", lambda v: not v, "leave it out: batches of other sizes round differently"),
    ("enable_multi_layer_eagle", lambda v: not v, "use a draft of one layer"),
    ("speculative_use_rejection_sampling", lambda v: not v, "leave it out: target-only sampling is exact"),
    ("speculative_use_block_verification", lambda v: not v, "leave it out"),
    ("speculative_accept_threshold_single", lambda v: v in (None, 1.0), "leave it out: it changes the output"),
    ("speculative_accept_threshold_acc", lambda v: v in (None, 1.0), "leave it out: it changes the output"),
)


# Families whose embedding stays within an attention group. Others shard it over all ranks: an idle rank takes no part
# in that reduction, and the ranks then wait for different ones.
ATTENTION_DP_FAMILIES = ("Qwen2ForCausalLM", "Qwen3ForCausalLM")


class Refused(SpecExtError):
    """The configuration asks for something that this platform does not serve."""


def refuse_unserved(server_args: Any) -> None:
    """Raise `Refused` naming the first flag whose value is not served."""
    for name, passes, cure in _RULES:
        value = getattr(server_args, name, None)
        if not passes(value):
            raise Refused(f"--{name.replace('_', '-')} {value} is not served by the CPU reference platform; {cure}")
    _refuse_attention_dp(server_args)
    algorithm = (server_args.speculative_algorithm or "").upper()
    if algorithm and algorithm not in ALGORITHMS:
        raise Refused(
            f"--speculative-algorithm {algorithm} is not served by the CPU reference platform; "
            f"use one of {', '.join(sorted(ALGORITHMS))}"
        )
    topk = server_args.speculative_eagle_topk
    if algorithm in ("EAGLE", "EAGLE3", "NEXTN") and topk not in (None, 1):
        raise Refused(
            f"--speculative-eagle-topk {topk} is not served by the CPU reference platform, which drafts chains; "
            "use --speculative-eagle-topk 1"
        )


def _refuse_attention_dp(server_args: Any) -> None:
    """Raise `Refused` for attention data parallelism with a target that would wait for ever."""
    size = server_args.attn_dp_size  # into which SGLang has turned --enable-dp-attention by now
    if size in (None, 1):
        return
    config = Path(server_args.model_path) / "config.json"
    found = json.loads(config.read_text(encoding="utf-8")).get("architectures", []) if config.exists() else []
    if not set(found) & set(ATTENTION_DP_FAMILIES):
        raise Refused(
            f"--attn-dp-size {size} (--enable-dp-attention) with {', '.join(found) or server_args.model_path} is not "
            f"served by the CPU reference platform; serve {' or '.join(ATTENTION_DP_FAMILIES)}, or use --tp or --dp "
            "alone"
        )
