"""PD disaggregation in the scheduler: asks for records, and joins their session to the controller and metrics."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_spec_ext.config import ConfigError, SpecExtConfig
from sglang_spec_ext.control import handed_state
from sglang_spec_ext.disagg.counters import PdCounters
from sglang_spec_ext.disagg.handshake import MismatchPolicy
from sglang_spec_ext.disagg.metrics import PdMetrics
from sglang_spec_ext.disagg.record import DraftRecord
from sglang_spec_ext.disagg.seam_setup import configure
from sglang_spec_ext.disagg.session import ControllerState, PdOptions, PdSession, current_session
from sglang_spec_ext.disagg.sidecar import read_key_file
from sglang_spec_ext.workers.loop import AdaptiveLoop


def ask_for_records(chosen: SpecExtConfig) -> None:
    """Let SGLang's disaggregation open a session when it makes its buffers; pd_transport is not off."""
    assert chosen.pd_transport != "off"
    key = None
    if chosen.pd_key_file != "none":
        try:
            key = read_key_file(chosen.pd_key_file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"--spec-ext-pd-key-file: {error}") from error
    options = PdOptions(transport=chosen.pd_transport, policy=MismatchPolicy(chosen.pd_mismatch), key=key)
    configure(options, PdCounters(), on_open=connect)


def connect(session: PdSession, scheduler: Any) -> None:
    """Join a session that has just been opened to the controller of its scheduler."""
    loop: AdaptiveLoop = scheduler.draft_worker.spec_ext

    def state(arrays: Mapping[str, NDArray[Any]]) -> ControllerState:
        confidence = arrays.get("block_confidence")
        if confidence is not None:
            handed_state.foresee(loop.controller, confidence)
        k, rates = handed_state.state_of(loop.controller)
        return ControllerState(active_k=k, accept_prior=np.array(rates, np.float32))

    def absorb(record: DraftRecord) -> None:
        handed_state.absorb(loop.controller, record.active_k, record.accept_prior.tolist())

    session.controller_state = state
    session.absorb = absorb


def switch_metrics_on(labels: Mapping[str, str]) -> None:
    """Count in SGLang's registry from here on."""
    session = current_session()
    if session is not None:
        session.counted = PdMetrics(labels, session.counters).update


def snapshot(scheduler: Any) -> dict[str, Any] | None:
    """Return what /server_info shows of the handoff."""
    session = current_session()
    if session is None:
        return None
    counters = {f"{name}{{{label}}}" if label else name: value for name, label, value in session.counters.rows()}
    slots = scheduler.req_to_metadata_buffer_idx_allocator
    return {
        "role": session.role,
        "transport": session.options.transport,
        "row_bytes": session.codec.row_bytes,
        "slots": {"size": slots.size, "free": slots.available_size(), "errors": slots.errors},
        "peers": dict(session.peers),
        "counters": counters,
    }
