"""EAGLE and EAGLE-3: our choice in SGLang's own AdaptiveController.

SGLang keeps one set of back ends and graphs for each tier and swaps them; only the policy is ours. At K = 0
the draft still extends over the verified token, so that its K/V stay usable; where it can, over the tokens of several
steps in one pass (eagle_extend.py).
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang_spec_ext import flags
from sglang_spec_ext.workers.backlog import Row
from sglang_spec_ext.workers.eagle_extend import Seeds, extend_together
from sglang_spec_ext.workers.eagle_ragged import ChainMargins, RaggedChainTarget, unserved
from sglang_spec_ext.workers.extended import NotServedError, SpecExtWorker
from sglang_spec_ext.workers.step import Step
from sglang_spec_ext.workers.swap import Swap


class DecidedSteps:
    """SGLang's AdaptiveSpecPolicy: returns what was decided for the step."""

    def __init__(self, tiers: tuple[int, ...]) -> None:
        self.candidate_steps = list(tiers)
        self.steps = tiers[-1]
        self._graph_sizes: list[int] | None = None

    def set_cuda_graph_bs(self, cuda_graph_bs: list[int] | None) -> None:
        """Take in the batch sizes of the graphs."""
        self._graph_sizes = sorted(cuda_graph_bs) if cuda_graph_bs else None

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Return the K of the step about to run."""
        return self.steps

    def on_verify_complete(self, num_correct_drafts_per_req: list[int], batch_size: int) -> None:
        """Decisions are made before a step, not after one."""

    def cuda_graph_bs_for_step(self, step: int) -> list[int] | None:
        """Return the batch sizes to capture at a tier: any tier may be chosen at any size."""
        return self._graph_sizes


class EagleSteps(SpecExtWorker):
    """Mixed in before SGLang's EAGLEWorkerV2."""

    spec_ext_by_margins = True
    adaptive_controller: Any
    _policy: DecidedSteps | None = None
    _drafting_since: Any = None  # stamp
    _first_of_backlog: Any = None  # copy of the batch as its oldest step left it
    _seeds: Seeds | None = None  # of a backlog that was written before a prefill
    _margins: ChainMargins | None = None  # where budgets are verified
    _ragged: RaggedChainTarget | None = None
    _budget: Swap  # of a step with one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        chosen = flags.active_config()
        assert chosen is not None
        if self.adaptive_controller is not None:
            raise NotServedError(
                "--speculative-adaptive and --spec-ext-mode both choose K; leave one of them out"
            )
        if not self._hosts_draft:
            return
        self._whole_steps = int(self.speculative_num_steps)
        loop = self.spec_ext_start(chosen)
        if loop.controller.estimator is not None:
            self._margins = ChainMargins(loop.controller.estimator, self.draft_worker)
            self._ragged = RaggedChainTarget(self._target_worker, self._margins, self._whole_steps + 1)
            self._budget = Swap({"_target_worker": self._ragged})
        if self.spec_ext_unserved() is None:
            from sglang.srt.speculative.adaptive_runtime_state import AdaptiveController

            self._policy = DecidedSteps(loop.controller.settings.tiers)
            self.adaptive_controller = AdaptiveController(self, self._policy)
            if self.spec_ext_backlog is not None:
                from sglang.srt.environ import envs

                # SGLang then asks `_stub_skipped_draft_extend` instead of extending at K = 0
                envs.SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND.set(True)

    def spec_ext_max_k(self) -> int:
        """See SpecExtWorker."""
        return self._whole_steps

    def spec_ext_limits(self) -> Iterator[tuple[bool, str]]:
        """See SpecExtWorker."""
        from sglang.srt.runtime_context import get_parallel

        yield self.topk != 1, f"--speculative-eagle-topk {self.topk}: a tree has one shape; use 1"
        yield (
            get_parallel().pp_size > 1,
            "pipeline parallelism: the next step is drafted before this one is verified",
        )

    def spec_ext_not_ragged(self) -> str | None:
        """See SpecExtWorker."""
        return next((reason for holds, reason in self.spec_ext_limits() if holds), None) or unserved()

    def spec_ext_shape(self, step: Step) -> AbstractContextManager[None]:
        """See SpecExtWorker."""
        self._drafting_since = step.start
        if self._policy is not None:
            self._policy.steps = step.decision.k
        return nullcontext() if step.decision.budget is None else self._budget.on(self)

    def spec_ext_pays_at_once(self) -> bool:
        """See SpecExtWorker."""
        from sglang.srt.runtime_context import get_spec

        draft = self.draft_worker
        return bool(
            super().spec_ext_pays_at_once()
            or get_spec().speculative_use_rejection_sampling  # the next draft needs a row of probabilities, too
            or draft.seed_dsa_topk_from_draft_extend  # each step seeds the draft's sparse attention
            or draft.draft_runner.model_config.model_is_mrope  # positions of images are known to their step alone
        )

    def _stub_skipped_draft_extend(self, batch: Any, batch_output: Any) -> None:
        """Leave the extension over the verified token [R] to the backlog."""
        super()._stub_skipped_draft_extend(batch, batch_output)  # type: ignore[misc]
        backlog = self.spec_ext_backlog
        if backlog is None:  # the user set SGLang's variable, and its cold recovery is meant
            return
        if not backlog.rows:
            self._first_of_backlog = first = copy.copy(batch)
            # SGLang's are freed on another stream than the one on which the backlog's pass reads them
            first.seq_lens, first.req_pool_indices = batch.seq_lens.clone(), batch.req_pool_indices.clone()
        hidden = batch_output.logits_output.hidden_states
        backlog.add(hidden, batch_output.next_token_ids, batch.out_cache_loc)
        self._seeds = None

    def spec_ext_write(self, reqs: Sequence[Any], rows: list[Row]) -> None:
        """See SpecExtWorker."""
        self._seeds = Seeds(reqs, extend_together(self, self._first_of_backlog, rows))
        self._first_of_backlog = None

    def spec_ext_prepare(self, batch: Any, step: Step) -> None:
        """See SpecExtWorker; a draft starts from the seeds of the extend."""
        super().spec_ext_prepare(batch, step)
        if step.decision.k and self._seeds is not None:
            self._seeds.place(batch.spec_info, step.reqs)
            self._seeds = None
        if self._margins is not None and self._ragged is not None:
            self._margins.begin(batch.spec_info if step.decision.k else None)
            self._ragged.expect(step, batch)

    def forward_batch_generation(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Run a batch; requests that are prefilled bring seeds of their own."""
        prefilled = batch.reqs if batch.forward_mode.is_extend() else ()
        result = super().forward_batch_generation(batch, *args, **kwargs)
        if self._seeds is not None:
            self._seeds.forget(prefilled)
        return result

    def verify(self, *args: Any, **kwargs: Any) -> Any:
        """Verify; everything else in a step is drafting."""
        loop = self.spec_ext
        assert loop is not None
        loop.draft_watch.add(self._drafting_since)
        if self._margins is not None:
            self._margins.end()
        result = super().verify(*args, **kwargs)  # type: ignore[misc]
        self._drafting_since = loop.clock.now()
        return result

    def spec_ext_settle(self, step: Step) -> None:
        """See SpecExtWorker."""
        assert self.spec_ext is not None
        self.spec_ext.draft_watch.add(self._drafting_since)  # the draft's extension over the verified tokens
        if self._ragged is not None:
            self._ragged.settle(step)
