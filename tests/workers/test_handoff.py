"""The workers' side of the handoff: what is asked for, what is told to the controller, what Prometheus gets."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_spec_ext.disagg import first_block, seam_setup  # noqa: E402
from sglang_spec_ext.disagg.builders import FirstBlocks  # noqa: E402
from sglang_spec_ext.disagg.counters import PdCounters  # noqa: E402
from sglang_spec_ext.disagg.metrics import PdMetrics  # noqa: E402
from sglang_spec_ext.disagg.record import DraftRecord, Expectation, RecordCodec  # noqa: E402
from sglang_spec_ext.disagg.schema import RecordShape, Schema  # noqa: E402

from sglang_spec_ext.config import ConfigError, SpecExtConfig  # noqa: E402
from sglang_spec_ext.control.controller import Controller  # noqa: E402
from sglang_spec_ext.control.settings import ControllerSettings  # noqa: E402
from sglang_spec_ext.workers import handoff  # noqa: E402
from sglang_spec_ext.workers.dflash_first_block import FirstBlockRunner  # noqa: E402

BLOCK = 4
CODEC = RecordCodec(Schema(RecordShape(max_block=BLOCK)))


@pytest.fixture
def wish(monkeypatch):
    monkeypatch.setattr(seam_setup, "_wish", [])
    return seam_setup._wish


def test_the_key_is_read_once_at_start(wish, tmp_path) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"0123456789abcdef")
    key.chmod(0o600)
    chosen = SpecExtConfig(mode="shadow", pd_transport="sidecar", pd_mismatch="refuse", pd_key_file=str(key))
    handoff.ask_for_records(chosen)
    ((options, _, on_open),) = wish
    assert (options.transport, options.policy, options.key) == ("sidecar", "refuse", b"0123456789abcdef")
    assert on_open is handoff.connect


@pytest.mark.parametrize(("content", "mode"), [(b"short", 0o600), (b"0123456789abcdef", 0o644), (None, 0o600)])
def test_a_key_that_cannot_serve_is_refused_by_name(wish, tmp_path, content, mode) -> None:
    key = tmp_path / "key"
    if content is not None:
        key.write_bytes(content)
        key.chmod(mode)
    with pytest.raises(ConfigError, match="--spec-ext-pd-key-file"):
        handoff.ask_for_records(SpecExtConfig(mode="shadow", pd_transport="sidecar", pd_key_file=str(key)))
    assert not wish


def test_a_session_asks_the_controller_in_use_and_tells_it(monkeypatch) -> None:
    settings = ControllerSettings(tiers=(0, 1, 3))
    loop = SimpleNamespace(controller=Controller(settings, None))
    session = SimpleNamespace()
    handoff.connect(session, SimpleNamespace(draft_worker=SimpleNamespace(spec_ext=loop)))
    loop.controller = Controller(settings, None)  # as the start-up profile does
    state = session.controller_state({})
    assert state.active_k == 3
    assert state.accept_prior.size == 0
    for _ in range(200):
        state = session.controller_state({"block_confidence": np.array([0.9, 0.6, 0.3], np.float32)})
    assert state.accept_prior == pytest.approx([0.9, 0.6, 0.3], abs=0.1)
    record = DraftRecord(
        bootstrap_room=1, generation=1, seq_len=1, prompt_crc=0, anchor_token=1, active_k=1,
        accept_prior=np.array([0.2, 0.1, 0.1], np.float32),
    )  # fmt: skip
    loop.controller = Controller(settings, None)
    session.absorb(record)
    assert loop.controller.hysteresis.arm == 1
    assert loop.controller.acceptance.classes[0].rates()[0] < 0.5


def test_metrics_gain_what_the_counters_gain() -> None:
    from prometheus_client import REGISTRY

    counters = PdCounters()
    metrics = PdMetrics({"model_name": "handoff-test"}, counters)

    def value(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"sglang:spec_ext_pd_{name}_total", {"model_name": "handoff-test", **labels})

    counters.records_received = 3
    counters.records_refused["crc32"] = 2
    counters.note_first_step(4, warm=True)
    metrics.update()
    metrics.update()
    counters.records_refused["crc32"] += 1
    metrics.update()
    assert value("records_received") == 3
    assert value("records_refused", field="crc32") == 3
    assert value("first_accept_len_with_bonus_warm", length="4") == 1
    assert value("records_refused", field="magic") is None


def request(ids=None):
    req = SimpleNamespace(origin_input_ids=[1, 2], output_ids=[9])
    if ids is not None:
        known = {"bootstrap_room": 1, "seq_len": 2, "prompt_crc": 0, "anchor_token": 9}
        row = CODEC.encode(DraftRecord(**known, generation=1, block_ids=np.array(ids, np.int32)))
        FirstBlocks.put(req, CODEC.decode(row, Expectation(**known)))
    return req


@pytest.fixture
def on_decode(monkeypatch):
    monkeypatch.setattr(first_block, "current_session", lambda: SimpleNamespace(role="decode", codec=CODEC))


def runner(*, sampler=None, graph=False):
    """A runner of a draft that always says 50, and how often it ran."""
    calls = []

    def forward(batch):
        calls.append(batch)
        if sampler is not None:
            sampler.out[:] = 50
        return SimpleNamespace(can_run_graph=graph)

    worker = SimpleNamespace(_draft_sampler=sampler, block_size=BLOCK)
    return FirstBlockRunner(SimpleNamespace(forward=forward), worker), calls


def test_a_step_of_shipped_blocks_alone_is_not_drafted(on_decode) -> None:
    ours, calls = runner()
    ours.expect([request([4, 5, 6]), request([7, 8, 9])], num_draft_tokens=3)
    assert ours.all_shipped
    embeds = torch.zeros(2 * BLOCK, 8)
    assert ours.forward(SimpleNamespace(input_embeds=embeds)).logits_output.hidden_states is embeds
    assert not calls
    assert ours.replace(torch.zeros(6, dtype=torch.long)).tolist() == [4, 5, 6, 7, 8, 9]
    assert ours.replace(torch.zeros(4, dtype=torch.long)).tolist() == [4, 5, 7, 8], "a step at a smaller K"
    assert ours.replace(torch.zeros(0, dtype=torch.long)).tolist() == [], "a step at K = 0"


@pytest.mark.parametrize("graph", [False, True])
def test_in_a_mixed_step_only_the_rows_of_shipped_blocks_are_replaced(on_decode, graph) -> None:
    sampler = SimpleNamespace(out=torch.zeros(9, dtype=torch.long))
    ours, calls = runner(sampler=sampler, graph=graph)
    ours.expect([request(), request([4, 5, 6]), request()], num_draft_tokens=3)
    ours.forward(SimpleNamespace())
    assert len(calls) == 1
    drafted = sampler.out if graph else ours.replace(torch.full((9,), 50))
    assert drafted.tolist() == [50] * 3 + [4, 5, 6] + [50] * 3


def test_a_block_serves_one_step(on_decode) -> None:
    ours, calls = runner()
    req = request([4, 5, 6])
    ours.expect([req], num_draft_tokens=3)
    ours.expect([req], num_draft_tokens=3)
    assert not ours.all_shipped
    ours.forward(SimpleNamespace())
    assert len(calls) == 1
    assert ours.replace(torch.full((3,), 50)).tolist() == [50] * 3
