"""Which draft tokens a DSPARK step verifies, as SGLang's RaggedVerifyLayout.

The budget was decided before the draft from confidences of a fixed age; the live confidences only rank
positions (kernels/survival_plan.py has the rule and why), where they lie: nothing is read on the host before the plan.
"""

from typing import Any

import numpy as np
import torch
from sglang.srt.speculative.dspark_components.dspark_planner import (
    ragged_layout_exceeds_captured_grid,
    verify_layout_grid,
)
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout, RaggedVerifyMode
from sglang.srt.speculative.spec_tp_sync import SpecTpSyncSite

from sglang_spec_ext.kernels.survival_plan import survival_plan
from sglang_spec_ext.records import IntArray
from sglang_spec_ext.workers.step import Step


class LayoutPlanner:
    """Takes the place of SGLang's verify planner; while `acts` is false it asks that one."""

    def __init__(self, planner: Any, *, tp_sync: Any) -> None:
        self._planner = planner
        self._tp_sync = tp_sync
        self._step: Step | None = None
        self.acts = False
        self.verified: IntArray | None = None  # [R] draft tokens of the last layout

    def __getattr__(self, name: str) -> Any:
        return getattr(self._planner, name)

    def plan(self, step: Step | None) -> None:
        """Say what the next layout is for; None: every request verifies the whole width."""
        self._step = step
        self.verified = None

    def resolve_verify_token_budget(self, **kwargs: Any) -> int | None:
        """Return SGLang's own budget; ours is in the step."""
        return None if self.acts else self._planner.resolve_verify_token_budget(**kwargs)

    def should_run_compact(self, *, layout: RaggedVerifyLayout | None) -> bool:
        """Return whether only the tokens of a layout are run."""
        return layout is not None if self.acts else self._planner.should_run_compact(layout=layout)

    def schedule_layout(
        self, *, req_pool_indices: torch.Tensor, device: Any, confidence: torch.Tensor | None, **kwargs: Any
    ) -> RaggedVerifyLayout | None:
        """Return the layout of the step, or None for the whole width in every request."""
        if not self.acts:
            return self._planner.schedule_layout(
                req_pool_indices=req_pool_indices, device=device, confidence=confidence, **kwargs
            )
        step = self._step
        if step is None:
            return None
        bs = len(req_pool_indices)
        width = _widths(step, confidence, bs, device)
        self._tp_sync.sync(SpecTpSyncSite.DSPARK_PLAN, width)
        verify_lens = width.tolist()
        self.verified = np.asarray(verify_lens, np.int64) - 1
        runner = self._planner.model_runner
        if ragged_layout_exceeds_captured_grid(
            num_reqs=bs,
            verify_num_draft_tokens=self._planner.verify_num_draft_tokens,
            model_runner=runner,
            tier_tokens_hint=sum(verify_lens),
        ):
            self.verified = None
            return None
        grid = verify_layout_grid(
            verify_lens_cpu=verify_lens, ragged_verify_mode=RaggedVerifyMode.COMPACT, model_runner=runner
        )
        return RaggedVerifyLayout.from_verify_lens(verify_lens_cpu=verify_lens, device=device, grid=grid)


def _widths(step: Step, confidence: torch.Tensor | None, bs: int, device: Any) -> torch.Tensor:
    """Return how many tokens [R] int32 each request verifies, on the device of the draft."""
    decision = step.decision
    if decision.budget is None or confidence is None:
        return torch.full((bs,), decision.k + 1, dtype=torch.int32, device=device)
    return survival_plan(confidence.detach().float(), decision.budget).verify_lens
