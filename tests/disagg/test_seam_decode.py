"""Decode's seams without an engine: warm and cold starts, and what is counted of the first step."""

from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from sglang_spec_ext.disagg import seam_decode  # noqa: E402
from sglang_spec_ext.disagg.builders import FirstBlocks  # noqa: E402
from sglang_spec_ext.disagg.counters import PdCounters  # noqa: E402
from sglang_spec_ext.disagg.record import DraftRecord  # noqa: E402

RECORD = DraftRecord(
    bootstrap_room=1,
    generation=1,
    seq_len=3,
    prompt_crc=0,
    anchor_token=5,
    hidden=np.ones((1, 8), np.float32),
    topk_p=np.full(2, 0.5, np.float32),
    topk_index=np.array([3, 4]),
    block_ids=np.array([6, 7], np.int32),
)


def session_of(algorithm, *, topk_entries=2):
    capability = SimpleNamespace(algorithm=algorithm, topk_entries=topk_entries, vocab_size=10)
    absorbed = []
    return SimpleNamespace(
        capability=capability,
        counters=PdCounters(),
        counted=lambda: None,
        absorb=absorbed.append,
        absorbed=absorbed,
        subscriber=None,
    )


def stock_request():
    """As SGLang leaves it after the transfer: whatever lay in the slot."""
    return SimpleNamespace(
        hidden_states_tensor=torch.full((8,), 7.0),
        output_topk_p=torch.full((16,), 0.1),
        output_topk_index=torch.full((16,), 9),
    )


def test_warm_eagle_takes_the_record_and_tells_the_controller():
    session, req = session_of("EAGLE3"), stock_request()
    seam_decode.start_warm(session, req, RECORD)
    assert req.spec_ext_warm
    assert req.hidden_states_tensor.tolist() == [1.0] * 8
    assert req.output_topk_index.tolist() == [3, 4]
    assert session.absorbed == [RECORD]


def test_warm_dspark_waits_with_its_block():
    session, req = session_of("DSPARK"), stock_request()
    seam_decode.start_warm(session, req, RECORD)
    assert list(FirstBlocks.take([req], [3], num_draft_tokens=2)) == [0]


@pytest.mark.parametrize(
    ("keeps_stock", "topk_entries", "kept"), [(True, 2, True), (False, 2, False), (True, 20, False)]
)
def test_cold_eagle_keeps_only_what_a_stock_peer_can_have_sent(keeps_stock, topk_entries, kept):
    session, req = session_of("EAGLE", topk_entries=topk_entries), stock_request()
    seam_decode.start_cold(session, req, keeps_stock=keeps_stock)
    assert not req.spec_ext_warm
    assert bool(req.hidden_states_tensor.any()) is kept
    assert req.output_topk_p.numel() == (16 if kept else topk_entries)
    assert session.absorbed == []


def test_the_first_step_is_counted_once_warm_and_cold_apart(monkeypatch):
    session = session_of("EAGLE3")
    monkeypatch.setattr(seam_decode, "current_session", lambda: session)
    warm, cold, running = stock_request(), stock_request(), stock_request()
    seam_decode.start_warm(session, warm, RECORD)
    seam_decode.start_cold(session, cold, keeps_stock=False)
    batch = SimpleNamespace(reqs=[warm, running, cold])
    result = SimpleNamespace(accept_lens=torch.tensor([4, 2, 1]))
    for _ in range(2):
        seam_decode.after_resolve_tokens(None, None, result, batch)
    assert session.counters.first_accept_len_with_bonus_warm == {"4": 1}
    assert session.counters.first_accept_len_with_bonus_cold == {"1": 1}
