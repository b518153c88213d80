"""The part that every extended worker shares: it runs decode steps through the loop.

The built-in worker class follows in the method resolution order. SGLang's workers hand unknown attributes on
to the target worker, so everything of ours has a class-level default.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import msgspec

from sglang_spec_ext.config import SpecExtConfig
from sglang_spec_ext.control.calibration import MarginEstimator
from sglang_spec_ext.control.controller import Controller
from sglang_spec_ext.control.settings import Verify
from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.metrics import NoMetrics
from sglang_spec_ext.workers.backlog import STEPS, Backlog, Row, others_write
from sglang_spec_ext.workers.clock import clock_for
from sglang_spec_ext.workers.loop import AdaptiveLoop
from sglang_spec_ext.workers.settings import controller_settings
from sglang_spec_ext.workers.step import Step
from sglang_spec_ext.workers.votes import ranks_of

logger = logging.getLogger(__name__)

SIMULATED = "SGLANG_SIMULATE_ACC_LEN forces accepted lengths that a narrower step does not have"
RECURRENT = "the target keeps recurrent state, which is committed for one verify width"


class NotServedError(SpecExtError):
    """The configuration asks for something that this worker cannot do."""


class SpecExtWorker:
    """Decode steps of a speculative worker, run as the controller decides."""

    spec_ext_by_margins = False  # its drafts have no confidence head: margins share a budget out
    spec_ext: AdaptiveLoop | None = None
    spec_ext_config: SpecExtConfig | None = None
    spec_ext_profile: str = "not run"  # where the cost table came from, or why there is none
    spec_ext_uniform: str | None = None  # why one K runs for the whole batch although a budget was asked for
    spec_ext_backlog: Backlog | None = None  # rows that steps at K = 0 owe the draft; None: each step pays at once

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Attributes of the built-in worker."""

    def spec_ext_max_k(self) -> int:
        """Return how many tokens the draft makes."""
        raise NotImplementedError

    def spec_ext_limits(self) -> Iterator[tuple[bool, str]]:
        """Yield (holds, reason) for what allows the fixed width alone; asked after graph capture."""
        raise NotImplementedError

    def spec_ext_unserved(self) -> str | None:
        """Return why this worker can only run its fixed width, or None."""
        from sglang.srt.runtime_context import get_disagg, get_parallel

        role = get_disagg().disaggregation_mode
        if role == "prefill":
            return "a prefill server runs no decode step"
        if get_parallel().attn_dp_enabled and role != "null":
            return "attention data parallelism on a decode server: a step may hold requests that have just arrived"
        return next((reason for holds, reason in self.spec_ext_limits() if holds), None)

    def spec_ext_not_ragged(self) -> str | None:
        """Return why this worker cannot verify a budget shared out by request, or None."""
        raise NotImplementedError

    def spec_ext_shape(self, step: Step) -> AbstractContextManager[None]:
        """Return a context in which the built-in worker runs the step as decided."""
        return nullcontext()

    def spec_ext_settle(self, step: Step) -> None:
        """Note in the step what is known now that it was launched."""

    def spec_ext_pays_at_once(self) -> bool:
        """Return whether no step at K = 0 may leave its draft K/V to a later one."""
        return others_write()

    def spec_ext_write(self, reqs: Sequence[Any], rows: list[Row]) -> None:
        """Write the draft K/V of a backlog's rows, oldest step first."""
        raise NotImplementedError

    def spec_ext_start(self, chosen: SpecExtConfig) -> AdaptiveLoop:
        """Set up the loop and return it; called once, when the built-in worker has been built."""
        from sglang.srt.runtime_context import get_disagg, get_parallel

        parallel, role = get_parallel(), get_disagg().disaggregation_mode
        independent = bool(parallel.attn_dp_enabled)
        votes = role == "null" or not independent  # else the fixed width runs (spec_ext_unserved)
        ranks = ranks_of(parallel.tp_group, parallel.tp_size if votes else 1, independent=independent)
        reason = "ranks with attention data parallelism" if independent else self.spec_ext_not_ragged()
        if chosen.verify == "ragged" and reason is not None:
            logger.warning("sglang-spec-ext: --spec-ext-verify ragged runs as uniform: %s", reason)
            self.spec_ext_uniform = f"--spec-ext-verify ragged runs as uniform: {reason}"
            chosen = msgspec.structs.replace(chosen, verify="uniform")
        settings = controller_settings(chosen, max_k=self.spec_ext_max_k(), ranks=ranks.size)
        learns = self.spec_ext_by_margins and settings.verify is Verify.RAGGED
        self.spec_ext_config = chosen
        self.spec_ext = AdaptiveLoop(
            Controller(settings, None, estimator=MarginEstimator(settings.max_k) if learns else None),
            clock=clock_for(self.device),
            ranks=ranks,
            metrics=NoMetrics(),
        )
        if not self.spec_ext_pays_at_once():
            self.spec_ext_backlog = Backlog(min(STEPS, settings.tiers[-1] + 1))
        return self.spec_ext

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch: prefill as it is, decode steps as decided, an idle one as part of the step of other ranks.

        `is_extend_in_batch` is known of all ranks, so either all of them decide or none.
        """
        forward = super().forward_batch_generation  # type: ignore[misc]
        loop = self.spec_ext
        if loop is None or batch.forward_mode.is_extend() or batch.is_extend_in_batch:
            if loop is not None:
                loop.interrupt()
                self.spec_ext_catch_up()
            return forward(batch, *args, **kwargs)
        if batch.forward_mode.is_idle():
            with self.spec_ext_shape(loop.join()):
                return forward(batch, *args, **kwargs)
        step = loop.begin(batch)
        self.spec_ext_prepare(batch, step)
        with self.spec_ext_shape(step):
            result = forward(batch, *args, **kwargs)
        self.spec_ext_settle(step)
        loop.end(step)
        if loop.forced is not None and self.spec_ext_backlog is not None:
            self.spec_ext_backlog.drop()  # the profiler runs this step again and again
        return result

    def spec_ext_prepare(self, batch: Any, step: Step) -> None:
        """Make ready for a decided step: write the backlog unless the step's row may join it."""
        backlog = self.spec_ext_backlog
        if backlog is None:
            return
        if step.decision.k or not backlog.takes(step.reqs):
            self.spec_ext_catch_up()
        backlog.expect(step.reqs)

    def spec_ext_catch_up(self) -> None:
        """Write the rows that steps at K = 0 left; counted as drafting."""
        loop, backlog = self.spec_ext, self.spec_ext_backlog
        if loop is None or backlog is None or not backlog.rows:
            return
        start = loop.clock.now()
        self.spec_ext_write(backlog.reqs, backlog.take())
        loop.draft_watch.add(start)

    def clear_cache_pool(self) -> None:
        """Forget the backlog with the pool that its slots were in."""
        if self.spec_ext_backlog is not None:
            self.spec_ext_backlog.drop()
        super().clear_cache_pool()  # type: ignore[misc]

    def on_verify_complete_cpu(self, num_correct_drafts_per_req: list[int], batch_size: int = 0) -> None:
        """Take in how many draft tokens of a step were accepted."""
        if self.spec_ext is not None:
            self.spec_ext.resolve(num_correct_drafts_per_req)

    def spec_ext_snapshot(self) -> dict[str, Any]:
        """Return what /server_info shows."""
        assert self.spec_ext is not None
        found = self.spec_ext.snapshot()
        reasons = (self.spec_ext_unserved(), self.spec_ext_uniform)
        found["inactive"] = [*(reason for reason in reasons if reason is not None), *found["inactive"]]
        cost = self.spec_ext.controller.cost
        return {
            "worker": type(self).__name__,
            "profile": self.spec_ext_profile,
            "cost_table": None if cost is None else cost.table.as_dict(),
            "backlog": None if self.spec_ext_backlog is None else self.spec_ext_backlog.snapshot(),
            **found,
        }


@cache
def extend(base: type) -> type:
    """Return the extended form of a built-in worker class."""
    from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2
    from sglang.srt.speculative.dspark_components.dspark_worker_v2 import DSparkWorkerV2
    from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2

    from sglang_spec_ext.workers.dflash import DFlashSteps
    from sglang_spec_ext.workers.dspark import DSparkSteps
    from sglang_spec_ext.workers.eagle import EagleSteps

    for builtin, steps in (
        (DSparkWorkerV2, DSparkSteps),
        (DFlashWorkerV2, DFlashSteps),
        (EAGLEWorkerV2, EagleSteps),
    ):
        if issubclass(base, builtin):
            return type(f"SpecExt{base.__name__}", (steps, base), {})
    raise NotServedError(
        f"--spec-ext-mode does not extend the worker {base.__module__}.{base.__name__}; it extends the built-in "
        "workers of EAGLE, EAGLE3, DFLASH and DSPARK (not the multi-layer one); leave --spec-ext-mode out"
    )
