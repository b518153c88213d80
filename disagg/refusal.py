"""Fails the requests of a refused peer at once, on both servers.

The abort that SGLang sends may reach prefill before prefill has opened the room, and is then ignored:
prefill would hold the request until its bootstrap timeout (300 s). So it is repeated a few times. Repeating
is harmless: an unknown or finished room ignores it.
"""

import heapq
import itertools
import threading
import time
from typing import Any

REPEAT_AFTER_S = (0.05, 0.25, 1.0, 4.0)
MAX_PENDING = 4096


class AbortRepeater:
    """Repeats abort notifications from one daemon thread; the oldest news is dropped beyond MAX_PENDING."""

    def __init__(self, delays_s: tuple[float, ...] = REPEAT_AFTER_S) -> None:
        self._delays_s = delays_s
        self._pending: list[tuple[float, int, Any]] = []
        self._order = itertools.count()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    def repeat(self, receiver: Any) -> None:
        """Send `receiver`'s abort again after each delay."""
        now = time.monotonic()
        with self._changed:
            for delay in self._delays_s:
                if len(self._pending) < MAX_PENDING:
                    heapq.heappush(self._pending, (now + delay, next(self._order), receiver))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="spec-ext-abort", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending:
                    self._changed.wait()
                due = self._pending[0][0] - time.monotonic()
                if due > 0:
                    self._changed.wait(due)
                    continue
                receiver = heapq.heappop(self._pending)[2]
            receiver._send_abort_notification()  # SGLang's: best effort, never raises


_repeater = AbortRepeater()


def refuse(receiver: Any, message: str) -> None:
    """Fail a decode-side receiver with `message` and tell prefill, now and again.

    Follows SGLang's own pattern for a policy mismatch (common/conn.py, CommonKVReceiver.init): raising here
    would kill the scheduler. The room's infos are resolved already, so the notification has somewhere to
    go.
    """
    from sglang.srt.disaggregation.base import KVPoll

    if receiver.conclude_state == KVPoll.Failed:
        return
    receiver.kv_mgr.record_failure(receiver.bootstrap_room, message)
    receiver.kv_mgr.update_status(receiver.bootstrap_room, KVPoll.Failed)
    receiver.conclude_state = KVPoll.Failed
    receiver.ensure_abort_notified()
    if receiver.abort_notified:
        _repeater.repeat(receiver)
