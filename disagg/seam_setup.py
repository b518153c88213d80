"""Seams at start-up: the session opens with SGLang's metadata buffers and registers as the last of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_spec_ext.disagg import describe
from sglang_spec_ext.disagg.counters import PdCounters
from sglang_spec_ext.disagg.session import PdOptions, PdSession, current_session, install_session

from sglang_spec_ext.errors import Fatal


class _Setup(NamedTuple):
    """What `before_init_disaggregation` leaves for the buffers that are made next."""

    scheduler: Any
    wish: "_Wish"


class _Wish(NamedTuple):
    """What `configure` was given."""

    options: PdOptions
    counters: PdCounters
    on_open: Callable[[PdSession, Any], None]


_setup: list[_Setup] = []
_wish: list[_Wish] = []


def configure(options: PdOptions, counters: PdCounters, on_open: Callable[[PdSession, Any], None]) -> None:
    """Ask for records in this process, before SGLang's set-up; `on_open` gets each session and its scheduler."""
    _wish[:] = [_Wish(options, counters, on_open)]


def records_wanted() -> bool:
    """Return whether this process was asked for records; known before a session opens."""
    return bool(_wish)


def before_init_disaggregation(scheduler: Any) -> None:
    """BEFORE Scheduler.init_disaggregation: note who is about to make its metadata buffers."""
    _setup.clear()
    if not _wish:
        return
    reason = describe.unsupported_reason()
    if reason is None:
        _setup.append(_Setup(scheduler, _wish[0]))
    elif reason != "the server is not disaggregated":
        raise Fatal(f"no PD records: {reason}; or start with --spec-ext-pd-transport off")


def after_buffers_init(_result: None, buffers: Any, size: int, *_args: Any, **_kwargs: Any) -> None:
    """AFTER MetadataBuffers.__init__: open the session with as many slots as SGLang's own rows."""
    if not _setup:
        return
    scheduler, (options, counters, on_open) = _setup.pop()
    capability = describe.capability_of(scheduler, buffers, transport=options.transport)
    role = scheduler.disaggregation_mode.value
    session = PdSession(capability, role=role, num_slots=size, options=options, counters=counters)
    install_session(session)
    on_open(session, scheduler)


def after_buf_infos(infos: tuple[list[int], list[int], list[int]], buffers: Any) -> None:
    """AFTER MetadataBuffers.get_buf_infos: learn SGLang's row lengths, append our buffer last."""
    session = current_session()
    if session is None:
        return
    pointers, lens, item_lens = infos
    session.stock_rows = describe.stock_rows_of(buffers, pointers, item_lens)
    if session.rows is not None:
        pointers.append(session.rows.pointer)
        lens.append(session.rows.nbytes)
        item_lens.append(session.rows.row_bytes)


def after_clear_slot(_result: None, _buffers: Any, slot: int) -> None:
    """AFTER MetadataBuffers.clear_slot: blank our row too."""
    session = current_session()
    if session is not None:
        session.clear(slot)
