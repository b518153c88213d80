"""The start-up profile: what a step costs at each K and batch size, measured on the real path.

Every rank runs the same steps; the first one's clock counts, and its table is every rank's table. The K take turns: a
machine that is slower for a while, or a clock that rises, would else make one K look dear beside another.
"""

import time
from collections.abc import Callable, Iterable
from typing import Any

from sglang_spec_ext.control.cost import CostTable
from sglang_spec_ext.control.cost_fit import MIN_REPEATS, DraftSample, VerifySample, fit_cost_table
from sglang_spec_ext.records import Decision, Reason
from sglang_spec_ext.workers.probe_batch import ProbeBatch

WARM_UP = 1  # steps of each shape that are not counted
ROUNDS = WARM_UP + MIN_REPEATS  # of one step at each K
BUDGET_S = 55.0
LARGEST_BATCH = 64

Report = Callable[[int, int, str], None]  # (rounds done, rounds in all, what was measured)


class Profiler:
    """Measures one worker before it serves."""

    def __init__(self, scheduler: Any, *, context_len: int, report: Report) -> None:
        self._scheduler = scheduler
        self._worker = scheduler.draft_worker
        self._loop = self._worker.spec_ext
        self._report = report
        settings = self._loop.controller.settings
        self._ks = settings.tiers
        self._full_k = settings.full_k
        self._context_len = self._fitting_context(context_len)
        self.verify: list[VerifySample] = []
        self.draft: list[DraftSample] = []

    def _fitting_context(self, wanted: int) -> int:
        room = self._scheduler.model_config.context_len - 4 * (self._full_k + 1)
        pool = self._scheduler.max_total_num_tokens // 2 - 4 * (self._full_k + 1)
        return int(max(1, min(wanted, room, pool)))

    def sizes(self) -> list[int]:
        """Return the batch sizes to measure: powers of two that requests, memory and time allow."""
        scheduler = self._scheduler
        each = self._context_len + 4 * (self._full_k + 1)
        largest = min(scheduler.max_running_requests, LARGEST_BATCH, scheduler.max_total_num_tokens // each)
        found = [1]
        while found[-1] * 2 <= largest:
            found.append(found[-1] * 2)
        return found

    def measure(self, fingerprint: dict[str, str]) -> CostTable:
        """Return the table; CostTableError when the samples do not make one."""
        import torch

        with torch.no_grad():  # as the scheduler's loop does: a draft's own layers would record for autograd
            return self._measure(fingerprint)

    def _measure(self, fingerprint: dict[str, str]) -> CostTable:
        sizes = self.sizes()
        began = time.perf_counter()
        last = 0.0
        for number, size in enumerate(sizes):
            # the next size takes up to twice the time of the last one; ranks must stop together
            if self._loop.ranks.first(time.perf_counter() - began + 2.0 * last > BUDGET_S):
                break
            before = time.perf_counter()
            self._measure_size(size, number * ROUNDS, len(sizes) * ROUNDS)
            last = time.perf_counter() - before
        self.verify, self.draft = self._loop.ranks.first((self.verify, self.draft))
        return fit_cost_table(self.verify, self.draft, fingerprint=fingerprint)

    def _measure_size(self, size: int, done: int, total: int) -> None:
        batch = ProbeBatch(self._scheduler, size=size, context_len=self._context_len)
        try:
            for number in range(ROUNDS):
                for k in self._ks:
                    self._run(batch, size, k, counted=number >= WARM_UP)
                self._report(done + number + 1, total, f"batch {size}")
        finally:
            self._loop.forced = None
            batch.release()

    def _run(self, batch: ProbeBatch, size: int, k: int, *, counted: bool) -> None:
        self._loop.forced = Decision(k=k, reason=Reason.PINNED, bypass=k == self._full_k)
        result = batch.run()
        result.next_token_ids.cpu()  # wait for the device
        if not counted:
            return
        draft_s, verify_s = self._loop.last_parts()
        context_len = self._context_len
        self.verify.append(
            VerifySample(batch=size, tokens=size * (k + 1), seconds=verify_s, context_len=context_len)
        )
        if draft_s > 0.0:
            self.draft.append(DraftSample(batch=size, k=k, seconds=draft_s, context_len=context_len))


def fingerprint_of(scheduler: Any, *, context_len: int, tiers: Iterable[int]) -> dict[str, str]:
    """Return what a table depends on: two servers with equal fingerprints may share one."""
    import torch
    from sglang.srt.runtime_context import get_parallel, get_spec

    from sglang_spec_ext import __version__

    runner = scheduler.tp_worker.model_runner
    device = str(runner.device)
    name = "cpu" if device.startswith("cpu") else torch.get_device_module(device).get_device_name()
    return {
        "algorithm": str(get_spec().speculative_algorithm),
        "target": str(runner.model_config.model_path),
        "draft": str(get_spec().speculative_draft_model_path),
        "dtype": str(runner.dtype),
        "device": f"{name} x{torch.get_num_threads()}" if name == "cpu" else str(name),
        "attention": type(runner.attn_backend).__name__,
        "tp": str(get_parallel().tp_size),
        "attention_dp": str(get_parallel().attn_dp_size),
        "max_running_requests": str(scheduler.max_running_requests),
        "tiers": ",".join(str(k) for k in tiers),
        "context_len": str(context_len),
        "torch": torch.__version__,
        "spec_ext": __version__,
    }
