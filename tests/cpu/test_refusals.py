"""What the CPU reference platform does not serve, rule by rule, as SGLang's resolved arguments name it."""

from types import SimpleNamespace

import pytest

from sglang_spec_ext.cpu.refusals import _RULES, Refused, refuse_unserved

SERVED = {
    "device": "cpu",
    "dtype": "bfloat16",
    "page_size": 1,
    "pp_size": 1,
    "attn_dp_size": 1,
    "model_path": "absent",
    "speculative_algorithm": "EAGLE3",
    "speculative_eagle_topk": 1,
}


def resolved(**changes: object) -> SimpleNamespace:
    return SimpleNamespace(**{**SERVED, **changes})


@pytest.mark.parametrize("algorithm", [None, "EAGLE", "EAGLE3", "NEXTN", "DFLASH", "DSPARK", "NGRAM", "dspark"])
def test_what_is_served_passes(algorithm: str | None) -> None:
    refuse_unserved(resolved(speculative_algorithm=algorithm))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device", "cuda"),
        ("attention_backend", "flashinfer"),
        ("page_size", 16),
        ("pp_size", 2),
        ("quantization", "fp8"),
        ("kv_cache_dtype", "fp8_e5m2"),
        ("dtype", "float16"),
        ("enable_lora", True),
        ("enable_hierarchical_cache", True),
        ("enable_two_batch_overlap", True),
        ("enable_torch_compile", True),
        ("enable_deterministic_inference", True),
        ("enable_multi_layer_eagle", True),
        ("speculative_use_rejection_sampling", True),
        ("speculative_use_block_verification", True),
        ("speculative_accept_threshold_single", 0.9),
        ("speculative_accept_threshold_acc", 0.9),
        ("speculative_algorithm", "STANDALONE"),
        ("speculative_eagle_topk", 4),
    ],
)
def test_what_is_not_served_is_refused_with_flag_value_and_cure(field: str, value: object) -> None:
    with pytest.raises(Refused) as refusal:
        refuse_unserved(resolved(**{field: value}))
    message = str(refusal.value)
    assert message.startswith(f"--{field.replace('_', '-')} {value} is not served by the CPU reference platform")
    assert len(message.partition("; ")[2]) > 10, "says what to do instead"


@pytest.mark.parametrize("name", ["blend-qwen3", "random-qwen3"])
def test_attention_dp_is_served_where_an_idle_rank_does_not_stop_the_others(checkpoint, name: str) -> None:
    refuse_unserved(resolved(attn_dp_size=2, model_path=str(checkpoint(name))))


def test_attention_dp_with_another_family_is_refused(checkpoint) -> None:
    with pytest.raises(Refused, match=r"--attn-dp-size 2 .*LlamaForCausalLM.*; serve Qwen2ForCausalLM or"):
        refuse_unserved(resolved(attn_dp_size=2, model_path=str(checkpoint("blend-llama"))))
    with pytest.raises(Refused, match="absent"):  # not a folder: what it holds is not known
        refuse_unserved(resolved(attn_dp_size=2))


def test_every_rule_names_a_field_that_sglang_has() -> None:
    """A field that SGLang renames would pass as unset, and its flag would be served wrongly."""
    pytest.importorskip("sglang")
    from sglang.srt.server_args import ServerArgs

    assert [name for name in (*(name for name, *_ in _RULES), "attn_dp_size") if not hasattr(ServerArgs, name)] == []
