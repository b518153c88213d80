"""Seams of the handshake: prefill publishes, decode judges, and a refused peer's requests fail at once."""

import logging
import time
from typing import Any

from sglang_spec_ext.disagg import peers
from sglang_spec_ext.disagg.aux import peer_pointers
from sglang_spec_ext.disagg.handshake import PeerVerdict, Standing
from sglang_spec_ext.disagg.refusal import refuse
from sglang_spec_ext.disagg.session import PdSession, current_session

from sglang_spec_ext.errors import Fatal

logger = logging.getLogger("sglang.spec_ext.disagg")

PUBLISH_ATTEMPTS = 8
PUBLISH_DELAY_S = 0.5  # doubles with each attempt: one minute in all, as SGLang's own registration


def after_setup_routes(_result: None, server: Any) -> None:
    """AFTER CommonKVBootstrapServer._setup_routes: add our route, in prefill's main process."""
    peers.add_routes(server)


def around_register(original: Any, manager: Any) -> None:
    """AROUND CommonKVManager.register_to_bootstrap: publish our capability before the rank becomes visible.

    So a decode server that sees a complete prefill server also sees its capability. A failure ends the
    process: records were asked for, and the peer would take this server for a stock one.
    """
    session = current_session()
    if session is not None and session.role == "prefill":
        if session.options.transport == "sidecar":
            session.open_publisher(manager.local_ip)
        _publish(session, manager)
    original(manager)


def _publish(session: PdSession, manager: Any) -> None:
    from sglang.srt.utils.network import NetworkAddress

    if manager.dist_init_addr:  # the same choice of host as in register_to_bootstrap
        host = NetworkAddress.parse(manager.dist_init_addr).resolved().host
    else:
        host = manager.bootstrap_host
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - connected to, not bound
    url = NetworkAddress(host, manager.bootstrap_port).to_url()
    dp = manager.attn_dp_rank if manager.system_dp_size == 1 else manager.system_dp_rank
    rank = peers.rank_key(dp, manager.attn_cp_rank, manager.attn_tp_rank, manager.pp_rank)
    for attempt in range(PUBLISH_ATTEMPTS):
        try:
            peers.publish_answer(url, rank, session.answer())
        except peers.PeerUnavailableError as error:
            if attempt == PUBLISH_ATTEMPTS - 1:
                raise Fatal(f"the bootstrap server does not take our capability: {error}") from error
            time.sleep(PUBLISH_DELAY_S * 2**attempt)
        else:
            return


def around_ensure_info(original: Any, manager: Any, bootstrap_addr: str) -> bool:
    """AROUND CommonKVManager.try_ensure_parallel_info: judge a prefill server when SGLang first meets it.

    The verdict lives on SGLang's own entry, so it is forgotten with it when the server goes away. A server
    that cannot be asked now is not ready, and SGLang asks again.
    """
    if not original(manager, bootstrap_addr):
        return False
    session = current_session()
    info = manager.prefill_info_table.get(bootstrap_addr)
    if session is None or info is None or verdict_of(info) is not None:
        return True
    try:
        answer = peers.fetch_answer(f"http://{bootstrap_addr}")
    except peers.PeerUnavailableError as error:
        logger.warning("PD peer %s: %s; asking again", bootstrap_addr, error)
        manager.prefill_info_table.pop(bootstrap_addr, None)
        return False
    info.spec_ext_verdict = session.judge(answer, bootstrap_addr)
    return True


def around_receiver_init(original: Any, receiver: Any, prefill_dp_rank: int) -> None:
    """AROUND CommonKVReceiver.init: fail a refused peer's request at once, ask the sidecar of a warm one."""
    original(receiver, prefill_dp_rank)
    session = current_session()
    if session is None:
        return
    verdict = verdict_of(getattr(receiver, "prefill_info", None))
    if verdict is None:
        return
    if verdict.standing is Standing.REFUSED:
        session.counters.requests_refused += 1
        session.counted()
        refuse(receiver, verdict.message)
    elif verdict.standing is Standing.WARM and session.subscriber is not None:
        endpoint = _sidecar_endpoint(receiver)
        if endpoint:
            session.subscriber.want(endpoint, receiver.bootstrap_room)


def _sidecar_endpoint(receiver: Any) -> str:
    """Return where the prefill rank that feeds this receiver listens; asked once per rank."""
    info = receiver.prefill_info
    known: dict[str, str] = info.__dict__.setdefault("spec_ext_endpoints", {})
    tp = receiver.target_tp_rank if receiver.target_tp_rank is not None else receiver.target_tp_ranks[0]
    rank = peers.rank_key(receiver.prefill_dp_rank, receiver.target_cp_ranks[0], tp, receiver.target_pp_ranks[-1])
    if rank not in known:
        try:
            answer = peers.fetch_answer(f"http://{receiver.bootstrap_addr}", rank)
        except peers.PeerUnavailableError as error:
            logger.warning("PD peer %s: %s; its record is missing", receiver.bootstrap_addr, error)
            return ""
        known[rank] = peers.sidecar_endpoint(answer) if answer is not None else ""
    return known[rank]


def around_register_kv_args(original: Any, receiver: Any) -> bool:
    """AROUND CommonKVReceiver._register_kv_args: tell a peer only the buffers that it may write."""
    session = current_session()
    if session is None or session.rows is None or session.stock_rows is None:
        return bool(original(receiver))
    verdict = verdict_of(receiver.prefill_info) or PeerVerdict(standing=Standing.COLD)
    kv_args = receiver.kv_mgr.kv_args
    pointers = kv_args.aux_data_ptrs
    hidden_index = session.stock_rows.hidden_index
    try:
        kv_args.aux_data_ptrs = peer_pointers(pointers, verdict, hidden_index=hidden_index, rows=session.rows)
        return bool(original(receiver))
    finally:
        kv_args.aux_data_ptrs = pointers


def around_buffer_count(original: Any, manager: Any, peer: str, num_remote: int) -> None:
    """AROUND CommonKVManager.check_peer_aux_buffer_count: one buffer less is ours, hidden on purpose."""
    session = current_session()
    ours = 1 if session is not None and session.rows is not None else 0
    if num_remote != len(manager.kv_args.aux_data_ptrs) - ours:
        original(manager, peer, num_remote)


def verdict_of(info: Any) -> PeerVerdict | None:
    """Return the verdict on a PrefillServerInfo, None if it has not been judged."""
    return getattr(info, "spec_ext_verdict", None)
