"""DSPARK: the block is drafted whole, and a prefix of it is verified.

A uniform K runs SGLang's own step at a verify width of K + 1; K = 0 leaves the draft pass out and still projects the
target's hidden state into the draft's K/V, several steps together where it can (backlog.py). Ragged steps go through
SGLang's RaggedVerifyLayout with our planner.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from sglang_spec_ext import flags
from sglang_spec_ext.workers.backlog import Row, joined
from sglang_spec_ext.workers.dspark_inject import DeferringInjector
from sglang_spec_ext.workers.dspark_planner import LayoutPlanner
from sglang_spec_ext.workers.dspark_proposer import BlockProposer, TimedProposer
from sglang_spec_ext.workers.extended import RECURRENT, SIMULATED, SpecExtWorker
from sglang_spec_ext.workers.step import Step
from sglang_spec_ext.workers.swap import Swap


class DSparkSteps(SpecExtWorker):
    """Mixed in before SGLang's DSparkWorkerV2."""

    _swaps: dict[int, Swap]
    _proposer: Any
    _verify_planner: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = flags.active_config()
        assert chosen is not None
        if not self._hosts_draft:  # a pipeline's stage without the draft runs the target alone
            return
        loop = self.spec_ext_start(chosen)
        self._swaps = {}
        self._proposer = TimedProposer(self._proposer, loop)
        self._verify_planner = LayoutPlanner(self._verify_planner, tp_sync=self._tp_sync)

    def spec_ext_max_k(self) -> int:
        """See SpecExtWorker."""
        return int(self.gamma)

    def spec_ext_not_ragged(self) -> str | None:
        """See SpecExtWorker."""
        planner = self._verify_planner
        if planner.carries_confidence:
            return None
        return (
            "this draft has no confidence head"
            if planner.mode_value == "compact"
            else f"SGLANG_RAGGED_VERIFY_MODE is {planner.mode_value}; leave it unset, or set compact"
        )

    @cached_property
    def _graphed_fixed_width(self) -> bool:
        runner = self.model_runner.decode_cuda_graph_runner
        return runner is not None and not runner.ragged_verify_mode

    @cached_property
    def _graphed_ragged(self) -> bool:
        runner = self.model_runner.decode_cuda_graph_runner
        return runner is not None and bool(runner.ragged_verify_mode)

    def spec_ext_limits(self) -> Iterator[tuple[bool, str]]:
        """See SpecExtWorker."""
        yield self._simulate_acc_len > 0, SIMULATED
        yield self._target_is_mambaish, RECURRENT
        yield (
            self._graphed_fixed_width,
            "decode graphs hold one verify width; set SGLANG_RAGGED_VERIFY_MODE=compact to capture all",
        )

    def spec_ext_shape(self, step: Step) -> AbstractContextManager[None]:
        """See SpecExtWorker."""
        decision = step.decision
        assert self.spec_ext is not None
        self._verify_planner.acts = self.spec_ext.acts
        self._verify_planner.plan(step if decision.budget is not None or self._graphed_ragged else None)
        if decision.k == self.gamma:
            return nullcontext()
        if decision.k not in self._swaps:
            self._swaps[decision.k] = self._swap(decision.k)
        return self._swaps[decision.k].on(self)

    def _swap(self, k: int) -> Swap:
        """Return the parts of a step at K; with ragged graphs the width stays and the layout cuts."""
        from sglang.srt.speculative.draft_worker_common import build_block_pos_offsets

        assert self.spec_ext_config is not None
        whole = self.spec_ext_config.verify == "ragged"
        proposer = BlockProposer(self._proposer, self, k, keep_width=self._graphed_ragged, whole=whole)
        if self._graphed_ragged:
            return Swap({"_proposer": proposer})
        width = k + 1
        return Swap(
            {
                "_proposer": proposer,
                "_verify_executor": self._executor(width, self._injector(k)),
                "verify_num_draft_tokens": width,
                "_block_pos_offsets": build_block_pos_offsets(length=width, device=self.device),
            }
        )

    def _injector(self, k: int) -> Any:
        pool = self.draft_model_runner.token_to_kv_pool
        windowed = hasattr(pool, "full_to_swa_index_mapping")  # its slots are given away while requests run
        if k or windowed or self.spec_ext_backlog is None:
            return self._kv_injector
        return DeferringInjector(self._kv_injector, self.spec_ext_backlog)

    def _executor(self, width: int, injector: Any) -> Any:
        from sglang.srt.runtime_context import get_spec
        from sglang.srt.speculative.dspark_components.dspark_verify import TargetVerifyExecutor

        return TargetVerifyExecutor(
            target_worker=self.target_worker,
            gamma=width - 1,
            verify_num_draft_tokens=width,
            model_runner=self.model_runner,
            kv_injector=injector,
            tp_sync=self._tp_sync,
            block_verification=get_spec().speculative_use_block_verification,
            rejection_noise=self._rejection_noise,
        )

    def spec_ext_write(self, reqs: Sequence[Any], rows: list[Row]) -> None:
        """See SpecExtWorker."""
        hidden, locs, positions = joined(rows)
        with self._draft_context():
            self._kv_injector.inject_target_hidden(target_hidden=hidden, cache_loc=locs, positions=positions)

    def spec_ext_settle(self, step: Step) -> None:
        """See SpecExtWorker."""
        step.verified = self._verify_planner.verified
        confidence = self._proposer.confidence
        assert self.spec_ext_config is not None
        if confidence is not None and self.spec_ext_config.verify == "ragged":
            step.confidences = confidence.detach().to("cpu", non_blocking=True)
