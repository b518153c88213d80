"""Prompts, the plain-torch target against transformers, and the text that it writes."""

import resource

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from sglang_spec_ext.models import prompt_templates, prompt_topics, text  # noqa: E402
from sglang_spec_ext.models.features import common_tokens, draw_batch, load_samples  # noqa: E402
from sglang_spec_ext.models.prompts import HELD_OUT_MODULES, KINDS, TRAIN_MODULES, build_prompts  # noqa: E402
from sglang_spec_ext.models.target import KVCache, Target  # noqa: E402

TAPS = (0, 2, 5)
NEVER = 511  # a token that these answers do not reach; it also fills the padding


@pytest.fixture(scope="module")
def folder(checkpoint):
    return checkpoint("random-llama")


@pytest.fixture(scope="module")
def target(folder) -> Target:
    return Target(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(autouse=True)
def _taps(monkeypatch):
    monkeypatch.setattr(text, "STORED_TAPS", TAPS)
    monkeypatch.setattr("sglang_spec_ext.models.features.STORED_TAPS", TAPS)


def test_held_out_prompts_share_no_template_topic_or_source_with_training():
    for name in vars(prompt_topics):
        if name.startswith("TRAIN_"):
            held_out = getattr(prompt_topics, name.replace("TRAIN_", "HELD_OUT_"))
            assert not set(getattr(prompt_topics, name)) & set(held_out), name
    for name in vars(prompt_templates):
        if name.startswith("TRAIN_"):
            assert not set(getattr(prompt_templates, name)) & set(
                getattr(prompt_templates, name.replace("TRAIN_", "TEST_"))
            )
    assert not set(TRAIN_MODULES) & set(HELD_OUT_MODULES)


def test_prompts_are_distinct_seeded_and_balanced():
    prompts = build_prompts(3, per_kind=40, test_per_kind=10)
    assert prompts == build_prompts(3, per_kind=40, test_per_kind=10)
    assert prompts != build_prompts(4, per_kind=40, test_per_kind=10)
    assert len({prompt.text for prompt in prompts}) == len(prompts) == 4 * 50
    for start in (0, 40, 160):
        assert {prompt.kind for prompt in prompts[start : start + 4]} == set(KINDS)


@torch.inference_mode()
def test_states_equal_transformers_with_padding_and_cache(target, reference):
    rows = [torch.randint(1, 500, (length,)) for length in (9, 5)]
    wanted = [reference(row[None], output_hidden_states=True).hidden_states for row in rows]
    pad = torch.tensor([0, 4])
    ids = torch.stack([rows[0], torch.cat([torch.zeros(4, dtype=torch.int64), rows[1]])])
    cache = KVCache(target.config, batch=2, capacity=12, dtype=torch.float32)
    parts = [target.forward(ids[:, part], pad=pad, cache=cache, taps=TAPS) for part in (slice(0, 7), slice(7, 9))]
    final = torch.cat([part[0] for part in parts], 1)
    for number, layer in enumerate(TAPS):
        tapped = torch.cat([part[1][number] for part in parts], 1)
        for row, padding in ((0, 0), (1, 4)):
            torch.testing.assert_close(tapped[row, padding:], wanted[row][layer + 1][0], rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(final[row, padding:], wanted[row][-1][0], rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_greedy_answers_equal_transformers_and_carry_the_states_of_their_tokens(target, reference):
    prompts = [[5, 17, 200, 31], [7, 9], [44, 3, 8]]
    answers = text.answer_batch(target, prompts, temperatures=[0.0] * 3, max_new_tokens=12, eos_id=NEVER, seed=0)
    for prompt, (tokens, taps, final) in zip(prompts, answers, strict=True):
        wanted = reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        assert tokens.tolist() == wanted[0][:-1].tolist()  # the last token was never fed
        states = reference(tokens[None], output_hidden_states=True).hidden_states
        assert taps.shape == (len(tokens), len(TAPS), 128)
        torch.testing.assert_close(final.float(), states[-1][0], rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(taps[:, 1].float(), states[TAPS[1] + 1][0], rtol=2e-2, atol=2e-2)


def test_rows_that_end_leave_the_others_as_they_were(target):
    prompts = [[5, 17], [7, 9], [44, 3], [2, 2], [90, 91]]
    heat = [0.0] * 5
    free = text.answer_batch(target, prompts, temperatures=heat, max_new_tokens=10, eos_id=NEVER, seed=0)
    eos = int(free[1][0][5])
    ended = text.answer_batch(target, prompts, temperatures=heat, max_new_tokens=10, eos_id=eos, seed=0)
    for (tokens, *_), (shorter, *_) in zip(free, ended, strict=True):
        stop = [i for i, token in enumerate(tokens.tolist()) if token == eos and i >= 2]
        assert shorter.tolist() == tokens.tolist()[: stop[0] if stop else None]


def test_drawn_tokens_follow_their_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    generator = torch.Generator().manual_seed(1)
    for temperature in (0.5, 1.0):
        drawn = text.draw_tokens(logits, torch.full((20_000,), temperature), generator=generator)
        found = torch.bincount(drawn, minlength=4) / 20_000
        assert float((found - (logits[0] / temperature).softmax(-1)).abs().max()) < 0.015
    cold = text.draw_tokens(logits, torch.zeros(20_000), generator=generator)
    assert torch.equal(cold, torch.full((20_000,), 2))


def test_only_repeating_text_counts_as_a_loop():
    rng = np.random.default_rng(0)
    assert text.looped([4, 9, 2] * 40)
    assert not text.looped([4, 9, 2] * 20)
    assert not text.looped(rng.integers(0, 50, 200).tolist())


def test_a_shard_that_does_not_fit_is_named_and_the_others_stay(tmp_path):
    taps, final = torch.zeros(4, 5, 64).bfloat16(), torch.zeros(4, 64).bfloat16()
    sample = text.Sample(torch.arange(4), taps, final, 2, 0.0, "chat", "train")
    text.write_shard(tmp_path / "shard-0000.safetensors", [sample])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(text.TextWriteError, match=r"shard-0001.*are kept"):
            text.write_shard(tmp_path / "shard-0001.safetensors", [sample])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in tmp_path.iterdir()] == ["shard-0000.safetensors"]


def test_shards_resume_and_batches_come_from_seed_and_step(target, tmp_path):
    class Tokenizer:
        eos_token_id = 1

        def apply_chat_template(self, messages, **_):
            return [3 + byte % 200 for byte in messages[0]["content"].encode()][:20]

    prompts = build_prompts(0, per_kind=6, test_per_kind=1)

    def make():
        return text.make_text(target, Tokenizer(), prompts, folder=tmp_path, batch_size=8, max_new_tokens=12)

    first = [next(make())]
    made = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    rest = list(make())
    assert [report.new_tokens > 0 for report in rest] == [False, True, True]
    assert all((tmp_path / name).stat().st_mtime_ns == time for name, time in made.items())
    assert text.count_new_tokens(tmp_path) == sum(report.new_tokens for report in first + rest)

    samples = load_samples(tmp_path, "train")
    batches = [draw_batch(samples, (0, 5), size=3, rng=np.random.default_rng([7, 1])) for _ in range(2)]
    assert torch.equal(batches[0].tokens, batches[1].tokens)
    assert batches[0].taps.shape[-1] == 2 * 128
    common = common_tokens(samples, size=16, vocab_size=512)
    assert common.tolist() == sorted(set(common.tolist()))
    new = torch.cat([s.tokens[s.prompt_len :] for s in samples])
    assert int(torch.isin(new.mode().values, common))
