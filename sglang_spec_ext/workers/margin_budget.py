"""Verifying a budget with a draft that has no confidence head: what DFLASH and EAGLE share.

How likely each draft is accepted comes from the margin between its two largest logits, by an online logistic
(`control.calibration.MarginEstimator`). SGLang's step verifies one width; here its target pass is given the rows of a
RaggedVerifyLayout alone, as DSPARK's compact step does (speculative/dspark_components/dspark_verify.py,
`run_compact`), and gets logits and hidden states back in the places of the whole width.
"""

from typing import Any

import numpy as np
import torch
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import ScatterCompactToStrided
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_spec_ext.control.calibration import MarginEstimator
from sglang_spec_ext.kernels.survival_plan import survival_plan
from sglang_spec_ext.workers.step import Step


class Margins:
    """The margins that the drafts of a step were chosen by, and how they share a budget out."""

    def __init__(self, estimator: MarginEstimator) -> None:
        self.estimator = estimator
        self.margins: torch.Tensor | None = None  # [R, k] float32, of the drafts made last

    def lengths(self, budget: int) -> torch.Tensor | None:
        """Return how many tokens [R] int32 each request verifies of a budget; None: the whole width.

        The estimator is asked on the host: no other platform than the CPU's runs this (`refused`).
        """
        if self.margins is None or not self.estimator.warm:
            return None
        confidences = self.estimator.probabilities(self.margins.cpu().numpy())
        return survival_plan(torch.from_numpy(confidences).float(), budget).verify_lens


class RaggedTarget:
    """Takes the place of the target worker in a step with a budget."""

    def __init__(self, target: Any, margins: Margins, width: int) -> None:
        self._target = target
        self._margins = margins
        self._width = width
        self._step: Step | None = None
        self._batch: Any = None  # SGLang's, of the step
        self.lengths: torch.Tensor | None = None  # [R] tokens verified in the step, if not the whole width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def expect(self, step: Step, batch: Any) -> None:
        """Say which step runs next."""
        self._step, self._batch, self.lengths = step, batch, None

    def forward_batch_generation(self, batch: Any, *, forward_batch: Any, **kwargs: Any) -> Any:
        """Verify the planned prefixes; logits [R * width, V] and hidden states are zero in places behind them."""
        assert self._step is not None
        assert self._step.decision.budget is not None
        self.lengths = lengths = self._margins.lengths(self._step.decision.budget)
        if lengths is None:
            return self._target.forward_batch_generation(batch=batch, forward_batch=forward_batch, **kwargs)
        lens: list[int] = lengths.tolist()
        layout = RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=lens, device=forward_batch.input_ids.device, grid=(sum(lens),)
        )
        column = torch.arange(self._width, device=layout.verify_lens.device)
        kept = (column < layout.verify_lens[:, None]).flatten().nonzero()[:, 0]
        packed = self.packed(forward_batch, layout, kept)
        out = self._target.forward_batch_generation(batch=batch, forward_batch=packed, **kwargs)
        found = out.logits_output
        for name in ("next_token_logits", "hidden_states"):
            rows = ScatterCompactToStrided.execute(
                compact=getattr(found, name), layout=layout, fill_value=0.0, verify_num_draft_tokens=self._width
            )
            setattr(found, name, rows)
        return out

    def settle(self, step: Step) -> None:
        """Note in a step the margins of its drafts, and how many of them were verified where that is not all."""
        margins, self._margins.margins = self._margins.margins, None
        step.margins = None if margins is None else margins.cpu().numpy()
        step.verified = None if self.lengths is None else self.lengths.cpu().numpy().astype(np.int64) - 1

    def packed(self, whole: Any, layout: RaggedVerifyLayout, kept: torch.Tensor) -> Any:
        """Return the forward batch of the layout's tokens, rows `kept` of that of the whole width."""
        raise NotImplementedError


def refused(algorithm: str) -> str | None:
    """Return why this machine or this group of ranks cannot verify a budget by margins, or None."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel

    if not getattr(current_platform, "serves_margin_budgets", False):
        return f"{algorithm} verifies a budget on the CPU platform alone; its attention elsewhere was not tried"
    if get_parallel().tp_size > 1:
        return "with tensor parallelism each rank sees a part of a row of logits, and no margin"
    return None
