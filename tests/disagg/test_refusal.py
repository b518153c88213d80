"""Refused rooms: the abort is said again, a bounded number of times, and never to a room that failed by itself."""

import threading

from sglang_spec_ext.disagg import refusal


class Receiver:
    """The part of SGLang's receiver that a repeated abort touches."""

    def __init__(self, wanted):
        self.sent, self.wanted, self.all_sent = 0, wanted, threading.Event()

    def _send_abort_notification(self):
        self.sent += 1
        if self.sent == self.wanted:
            self.all_sent.set()


def test_each_abort_is_repeated_after_each_delay():
    repeater = refusal.AbortRepeater(delays_s=(0.0, 0.001, 0.002))
    receivers = [Receiver(3) for _ in range(20)]
    for receiver in receivers:
        repeater.repeat(receiver)
    assert all(receiver.all_sent.wait(30) for receiver in receivers)


def test_what_waits_is_bounded(monkeypatch):
    monkeypatch.setattr(refusal, "MAX_PENDING", 5)
    repeater = refusal.AbortRepeater(delays_s=(3600.0, 3600.0))
    for _ in range(10):
        repeater.repeat(Receiver(1))
    assert len(repeater._pending) == 5
