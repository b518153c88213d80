"""User messages that the target writes itself."""

import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.models import own_prompts as own  # noqa: E402
from sglang_spec_ext.models.prompts import KINDS, SPLITS  # noqa: E402


class Tokenizer:
    """One character, one token."""

    eos_token_id = 1

    def apply_chat_template(self, messages, *, tokenize):
        assert not tokenize
        return f"<user>{messages[0]['content']}<end>"

    def encode(self, text):
        return [ord(character) for character in text]

    def decode(self, tokens):
        return "".join(chr(token) for token in tokens)


@pytest.fixture
def asked(monkeypatch):
    """Replace the target: it goes on with a number of its own, and every third message is cut by the limit."""
    calls = []

    def answer(_target, prompts, *, temperatures, max_new_tokens, eos_id, seed):
        calls.append((prompts, temperatures, eos_id, seed))
        answers = []
        for row, ids in enumerate(prompts):
            more = [ord("x")] * (max_new_tokens - 1) if row % 3 == 0 else [ord(c) for c in f" about {seed} and {row}"]
            answers.append((torch.tensor(ids + more), None, None))
        return answers

    monkeypatch.setattr(own, "answer_batch", answer)
    return calls


def test_messages_begin_as_a_user_would_are_distinct_and_ended(asked, tmp_path):
    path = tmp_path / "prompts.json"
    *_, prompts = own.own_prompts(None, Tokenizer(), path=path, count=100, seed=3)
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 100
    assert {prompt.kind for prompt in prompts} == set(KINDS)
    assert {prompt.split for prompt in prompts} <= set(SPLITS)
    assert not any("xxx" in prompt.text for prompt in prompts)
    for prompt in prompts:
        assert prompt.text.startswith(("about", *own.OPENINGS[prompt.kind]))
    for ids, temperatures, eos_id, _ in asked:
        assert all("".join(map(chr, row)).startswith("<user>") for row in ids)
        assert not any(chr(0) in "".join(map(chr, row)) for row in ids)
        assert (set(temperatures), eos_id) == ({own.TEMPERATURE}, 1)
    calls = len(asked)
    assert list(own.own_prompts(None, Tokenizer(), path=path, count=100, seed=3)) == [prompts]
    assert len(asked) == calls, "what the file holds is not written again"


def test_a_target_that_ends_no_message_is_an_error(monkeypatch, tmp_path):
    def endless(_target, prompts, *, max_new_tokens, **_):
        return [(torch.tensor(ids + [ord("x")] * (max_new_tokens - 1)), None, None) for ids in prompts]

    monkeypatch.setattr(own, "answer_batch", endless)
    with pytest.raises(own.OwnPromptsError, match="--own-tokens 0"):
        list(own.own_prompts(None, Tokenizer(), path=tmp_path / "p.json", count=10, seed=0))
    assert not (tmp_path / "p.json").exists()
