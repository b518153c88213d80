"""The folder check: every kind of good draft passes, every kind of damage is named."""

import json
import pathlib
import shutil

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from sglang_spec_ext.commands import models_check  # noqa: E402
from sglang_spec_ext.models import tiny  # noqa: E402
from sglang_spec_ext.models.check import check_draft, report_draft  # noqa: E402

DRAFTS = {entry.name: entry for entry in tiny.entries() if not entry.name.endswith(("llama", "qwen3"))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Every tiny checkpoint, built once: name -> folder."""
    root = tmp_path_factory.mktemp("tiny")
    for entry in tiny.entries():
        (root / entry.name).mkdir()
        entry.build(root / entry.name)
    return {entry.name: root / entry.name for entry in tiny.entries()}


@pytest.fixture
def damaged(folders, tmp_path):
    """A function that copies a draft, changes its config or tensors, and returns the copy."""

    def make(name, *, config=None, tensors=None) -> pathlib.Path:
        folder = shutil.copytree(folders[name], tmp_path / name)
        if config:
            path = folder / "config.json"
            path.write_text(json.dumps(config(json.loads(path.read_text()))))
        if tensors:
            stored = load_file(folder / "model.safetensors")
            save_file(tensors(stored), folder / "model.safetensors")
        return folder

    return make


@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_a_good_draft_has_no_problem_with_its_own_target(folders, name):
    target = "random-llama" if name.startswith("random") else "blend-llama"
    assert check_draft(folders[name], folders[target]) == []


@pytest.mark.parametrize("name", sorted(DRAFTS))
def test_each_tensor_the_loader_would_miss_is_named(damaged, folders, name):
    """Dropping any one tensor is either reported by its name or allowed by the loader's own rules."""
    optional = ("embed_tokens.weight", "t2d", "confidence_head", "lm_head", "d2t")
    stored = sorted(load_file(folders[name] / "model.safetensors"))
    for dropped in stored:
        folder = damaged(
            name, tensors=lambda table, dropped=dropped: {k: v for k, v in table.items() if k != dropped}
        )
        reported = " ".join(check_draft(folder)).replace("layers.0.", "midlayer.")
        shown = dropped.removeprefix("model.").replace("layers.0.", "midlayer.")
        assert shown in reported or any(part in dropped for part in optional), dropped
        shutil.rmtree(folder)


def test_a_reduced_vocabulary_needs_its_map_and_head(damaged):
    folder = damaged(
        "random-eagle3-reduced",
        tensors=lambda t: {k: v for k, v in t.items() if k not in ("d2t", "lm_head.weight")},
    )
    problems = check_draft(folder)
    assert len(problems) == 2
    assert any("d2t" in text for text in problems)
    assert any("lm_head" in text for text in problems)


def test_a_map_of_target_ids_in_place_of_offsets_is_caught(damaged):
    def ids_instead(table):
        size = len(table["d2t"])
        return table | {"d2t": table["d2t"] + torch.arange(size) + tiny.RANDOM_VOCAB - size}

    (problem,) = check_draft(damaged("random-eagle3-reduced", tensors=ids_instead))
    assert "offsets" in problem


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            lambda t: t | {"layers.0.mlp.extra.weight": torch.zeros(2)},
            ["layers.0.mlp.extra.weight", "unexpected"],
        ),
        (lambda t: t | {"norm.weight": torch.ones(7)}, ["norm.weight", "[7]"]),
        (lambda t: t | {"fc.weight": t["fc.weight"].to(torch.int32)}, ["fc.weight", "I32"]),
    ],
)
def test_a_wrong_tensor_is_named_with_what_was_found(damaged, change, words):
    (problem,) = check_draft(damaged("random-dflash", tensors=change))
    assert all(word in problem for word in words), problem


@pytest.mark.parametrize("keep", [4, 40, 5000, -1])
def test_a_truncated_file_is_one_clear_problem(damaged, keep):
    folder = damaged("random-dspark-vanilla")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    (problem,) = check_draft(folder)
    assert "truncated" in problem
    assert "model.safetensors" in problem


@pytest.mark.parametrize(
    ("name", "config", "words"),
    [
        (
            "random-dflash",
            lambda c: c | {"architectures": ["LlamaForCausalLM"]},
            ["architectures", "LlamaForCausalLM"],
        ),
        ("random-dflash", lambda c: {k: v for k, v in c.items() if k != "head_dim"}, ["head_dim"]),
        (
            "random-eagle3",
            lambda c: {k: v for k, v in c.items() if k != "draft_vocab_size"},
            ["draft_vocab_size", "null"],
        ),
        ("random-dspark-rnn", lambda c: c | {"markov_head_type": "lstm"}, ["markov_head_type", "lstm"]),
    ],
)
def test_a_config_that_sglang_misreads_is_named(damaged, name, config, words):
    problems = check_draft(damaged(name, config=config))
    assert any(all(word in text for word in words) for text in problems), problems


def test_keys_nested_where_the_model_build_does_not_look_are_named(damaged):
    def nest(config):
        inner = {key: config.pop(key) for key in ("markov_rank", "markov_head_type")}
        return config | {"dflash_config": (config.get("dflash_config") or {}) | inner}

    problems = check_draft(damaged("random-dspark-vanilla", config=nest))
    assert any("markov_rank" in text and "top level" in text for text in problems)


def test_a_target_of_another_size_is_refused(folders, damaged):
    target = damaged(
        "random-llama", config=lambda c: c | {"hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 5}
    )
    problems = check_draft(folders["random-dspark-vanilla"], target)
    for words in (
        ["hidden_size", "64"],
        ["vocab_size", "100"],
        ["tap layer", "layer 4"],
        ["mask_token_id", "100"],
    ):
        assert any(all(word in text for word in words) for text in problems), (words, problems)


def test_a_missing_folder_is_a_problem_and_no_exception(tmp_path):
    assert check_draft(tmp_path / "nowhere")


def test_the_report_states_taps_and_mask(folders):
    report = report_draft(folders["random-dspark-vanilla"])
    assert report.tap_layers == tiny.TAPS
    assert report.mask_token_id is not None
    assert report.block_size == tiny.GAMMA


def test_the_command_prints_one_json_object_and_fails_on_a_problem(damaged, capsys):
    import argparse

    folder = damaged("random-eagle", tensors=lambda t: {k: v for k, v in t.items() if k != "fc.bias"})
    parser = argparse.ArgumentParser()
    models_check.configure(parser)
    assert models_check.run(parser.parse_args([str(folder), "--json"])) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["ok"] is False
    assert "fc.bias" in printed["problems"][0]
