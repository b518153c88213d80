"""Speculation never changes a token: each algorithm returns what plain decoding returns, in every situation."""

import concurrent.futures
import json
import random

import pytest

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

VOCAB = 64
LENGTHS = (1, 2, 5, 13, 40, 65, 130, 200)  # the last three take more than one chunk of 64


def prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(3, VOCAB - 1) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(reference) -> list[list[int]]:
    return [reference.greedy(ids, 32) for ids in prompts()]


def test_batch_of_eight_and_one_by_one(served, expected) -> None:
    assert [answer["output_ids"] for answer in served.generate(prompts())] == expected
    for ids, tokens in zip(prompts(), expected, strict=True):
        assert served.generate(ids)[0]["output_ids"] == tokens


def test_drafts_are_both_accepted_and_refused(served) -> None:
    """Without this the tests above would prove nothing about verification."""
    if not served.setup.speculative:
        pytest.skip("plain decoding drafts nothing")
    rounds = [answer["meta_info"] for answer in served.generate(prompts(), max_new_tokens=64)]
    accepted = sum(info["spec_num_correct_drafts"] for info in rounds)
    proposed = sum(info["spec_num_proposed_drafts"] for info in rounds)
    assert 0 < accepted < proposed


def test_prefix_cache_hit(served, expected) -> None:
    ids, tokens = prompts()[-1], expected[-1]
    served.generate(ids)
    again = served.generate(ids)[0]
    assert again["meta_info"]["cached_tokens"] > 100
    assert again["output_ids"] == tokens


def test_one_token(served, expected) -> None:
    answers = served.generate(prompts(), max_new_tokens=1)
    assert [answer["output_ids"] for answer in answers] == [tokens[:1] for tokens in expected]


def test_stop_string_and_stop_token_inside_an_accepted_run(served, expected) -> None:
    ids, tokens = prompts()[3], expected[3]
    stop = tokens[9]
    first = tokens.index(stop)
    found = served.generate(ids, stop_token_ids=[stop], ignore_eos=False)[0]
    assert found["output_ids"] == tokens[: first + 1]
    assert found["meta_info"]["finish_reason"]["type"] == "stop"


def test_stop_string(served) -> None:
    body = {"text": "hello world,\n how are you?", "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    full = served.client.post("/generate", json=body).json()["text"]
    stop = full[17:20]
    body["sampling_params"]["stop"] = [stop]
    cut = served.client.post("/generate", json=body).json()
    assert cut["text"] == full[: full.index(stop)]
    assert cut["meta_info"]["finish_reason"]["matched"] == stop


def test_aborting_one_request_leaves_the_others_alone(served, expected) -> None:
    def ask(index: int) -> list[int]:
        return served.generate(prompts()[index])[0]["output_ids"]

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        body = {
            "input_ids": prompts()[0],
            "sampling_params": {"temperature": 0, "max_new_tokens": 3000, "ignore_eos": True},
            "rid": "to-be-aborted",
        }
        doomed = pool.submit(served.client.post, "/generate", json=body)
        others = [pool.submit(ask, index) for index in range(1, 8)]
        assert served.client.post("/abort_request", json={"rid": "to-be-aborted"}).status_code == 200
        assert [future.result() for future in others] == expected[1:]
        reason = doomed.result().json()["meta_info"]["finish_reason"]["type"]
    assert reason == "abort"
    assert served.generate(prompts()[0])[0]["output_ids"] == expected[0]


def test_streaming_generate_is_the_same(served, expected) -> None:
    body = {
        "input_ids": prompts()[4],
        "sampling_params": {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True},
        "stream": True,
    }
    last = None
    with served.client.stream("POST", "/generate", json=body) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                last = json.loads(line.removeprefix("data: "))
    assert last is not None
    assert last["output_ids"] == expected[4]


def test_chat_completions_streaming_and_not(served, reference) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(served.folder)
    messages = [{"role": "user", "content": "hello world, how are you?"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    text = tokenizer.decode(reference.greedy(ids, 24))
    body = {"model": "default", "messages": messages, "temperature": 0, "max_tokens": 24, "ignore_eos": True}
    whole = served.client.post("/v1/chat/completions", json=body).json()
    assert whole["choices"][0]["message"]["content"] == text
    pieces = []
    with served.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                choices = json.loads(line.removeprefix("data: "))["choices"]
                pieces += [choice["delta"].get("content") or "" for choice in choices]
    assert "".join(pieces) == text


def test_server_info_names_the_worker(served) -> None:
    info = served.client.get("/server_info").json()
    found = info.get("spec_ext")
    if "--spec-ext-mode" not in served.setup.flags:
        assert found is None
    else:
        assert found["mode"] == "shadow"
        assert found["worker"].startswith("SpecExt")
