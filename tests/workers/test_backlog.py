"""What steps at K = 0 leave to a later pass is written in time: a draft knows every token as if each step had paid."""

import concurrent.futures
import json
import random
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

import torch

from sglang_spec_ext.workers.backlog import Backlog, joined
from sglang_spec_ext.workers.eagle_extend import Seeds

from .conftest import SETUPS

PROMPTS = [[random.Random(length).randrange(3, 63) for _ in range(length)] for length in (2, 9, 21, 33, 40, 50, 61, 70)]
UNIFORM = [setup for setup in SETUPS if setup.name in ("dspark", "dflash", "eagle3")]
TOKENS = 45  # of plain decoding; no multiple of what a backlog holds


def test_rows_of_other_requests_or_too_many_do_not_join() -> None:
    backlog = Backlog(2)
    reqs, others = [object(), object()], [object()]
    assert backlog.takes(reqs)
    buffer = torch.tensor([1, 2])
    backlog.expect(reqs)
    backlog.add(buffer)
    buffer.fill_(9)  # SGLang's next step
    assert backlog.takes(list(reqs))
    assert not backlog.takes(others)
    backlog.add(torch.tensor([3, 4]))
    assert not backlog.takes(reqs), "it is full"
    assert joined(backlog.take())[0].tolist() == [1, 2, 3, 4]
    assert backlog.takes(others)
    assert backlog.take() == []
    assert backlog.snapshot() == {"capacity": 2, "deferred_steps": 2, "passes": 1}


def test_seeds_find_their_requests_in_another_batch() -> None:
    a, b, c, new = (object() for _ in range(4))
    found = SimpleNamespace(
        topk_p=torch.ones(3, 1),
        topk_index=torch.tensor([[10], [20], [30]]),
        hidden_states=torch.tensor([[1.0], [2.0], [3.0]]),
    )
    seeds = Seeds([a, b, c], found)
    seeds.forget([b])  # prefilled again, its seeds came with that
    info = SimpleNamespace(
        topk_p=torch.zeros(3, 1), topk_index=torch.zeros(3, 1, dtype=torch.long), hidden_states=torch.zeros(3, 1)
    )
    before = info.topk_index
    seeds.place(info, [new, c, b])
    assert info.topk_index.tolist() == [[0], [30], [0]]
    assert info.hidden_states.tolist() == [[0.0], [3.0], [0.0]]
    assert info.topk_p.tolist() == [[0.0], [1.0], [0.0]]
    assert before.tolist() == [[0], [0], [0]], "SGLang's own tensor is left as it was"


def steps_taken(answers: list[dict]) -> list[int]:
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


@pytest.mark.engine
@pytest.mark.timeout(900)
def test_what_plain_decoding_left_in_the_cache_serves_drafts_as_a_prefill_does(adaptive) -> None:
    """Answers made at K = 0 become prompts whose K/V are all cached."""
    control = adaptive.control
    control.pin(0)
    before = control.state()["backlog"]
    plain = adaptive.generate(PROMPTS, tokens=TOKENS)
    for number, ids in enumerate(PROMPTS[:3]):  # alone, and ended at other places between two passes
        adaptive.generate(ids, tokens=TOKENS - number)
    after = control.state()["backlog"]
    deferred = after["deferred_steps"] - before["deferred_steps"]
    assert 0 < after["passes"] - before["passes"] <= deferred / after["capacity"] + 10
    longer = [ids + answer["output_ids"] for ids, answer in zip(PROMPTS, plain, strict=True)]

    control.pin(max(control.state()["tiers"]))
    cached = adaptive.generate(longer)
    assert all(
        answer["meta_info"]["cached_tokens"] >= len(ids) - 2 for answer, ids in zip(cached, longer, strict=True)
    )
    assert adaptive.client.post("/flush_cache").status_code == 200
    prefilled = adaptive.generate(longer)
    control.unpin()
    assert prefilled[0]["meta_info"]["cached_tokens"] == 0
    assert [answer["output_ids"] for answer in cached] == [answer["output_ids"] for answer in prefilled]
    assert steps_taken(cached) == steps_taken(prefilled)


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize("setup", UNIFORM, ids=lambda setup: setup.name)
def test_every_draft_is_as_good_as_without_plain_steps_before_it(setup, adaptive_on, tmp_path) -> None:
    """K follows a schedule through runs at K = 0 of every length, and other requests are prefilled in between."""
    full = 3 if "--speculative-num-steps" in setup.flags else 7
    schedule = [k for plain in (1, 2, 3, 5, 8, 9, 21) for k in [0] * plain + [full] * (1 + plain % 2)]
    log = tmp_path / "steps"
    launcher = (sys.executable, str(Path(__file__).with_name("scheduled_server.py")))
    environment = {"SPEC_EXT_TEST_SCHEDULE": json.dumps(schedule), "SPEC_EXT_TEST_STEPS": str(log)}
    with adaptive_on(setup.draft, setup.flags, environment, launcher) as served:
        alone, beside = PROMPTS[2], PROMPTS[4]
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            long = pool.submit(served.ask, {"input_ids": alone, "rid": "alone"}, 150)
            visits = [served.ask({"input_ids": [*beside, n], "rid": f"visit-{n}"}, 3 + n % 5) for n in range(3, 23)]
            tokens = long.result()[0]["output_ids"]
        served.control.pin(full)
        assert served.client.post("/flush_cache").status_code == 200
        prefixes = [alone + tokens[:count] for count in range(1, len(tokens) - full)]
        served.ask({"input_ids": prefixes, "rid": [f"prefix-{len(ids)}" for ids in prefixes]}, full + 2)
        backlog = served.control.state()["backlog"]
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    prefilled = {length: accepted for rid, length, _, accepted in rows if rid == f"prefix-{length}"}
    drafted = [(length, accepted) for rid, length, k, accepted in rows if rid == "alone" and k and length in prefilled]
    assert len(visits) == 20
    assert len(drafted) > 10
    assert any(accepted for _, accepted in drafted), "drafts of which none is accepted show nothing"
    assert drafted == [(length, prefilled[length]) for length, _ in drafted]
    assert 0 < backlog["passes"] < backlog["deferred_steps"]
