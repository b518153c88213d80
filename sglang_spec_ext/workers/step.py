"""One decode step, from the decision to the observation."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sglang_spec_ext.records import Decision, FloatArray, IntArray, StepObservation
from sglang_spec_ext.workers.batch_view import alive
from sglang_spec_ext.workers.clock import Clock


@dataclass
class Step:
    """What a step was asked to do and what is known of it so far; filled in the order of the fields."""

    index: int
    decision: Decision
    reqs: Sequence[Any]
    classes: IntArray | None
    request_ids: IntArray
    context_len: int
    launched: float  # host seconds
    start: Any  # stamp of the clock
    verified: IntArray | None = None  # [R] draft tokens verified, where that differs by request
    confidences: Any = None  # tensor [R, gamma] on the host, perhaps still in flight
    margins: FloatArray | None = None  # [R, drafts made], without a confidence head
    draft: list[tuple[Any, Any]] = field(default_factory=list)  # stamps around each piece of drafting
    end: Any = None
    accepted: Sequence[int] | None = None  # [R]
    valid: Any = None  # [R] bool
    seconds: float | None = (
        None  # from launch to the launch of the next step; None when that was not the next thing
    )

    def resolve(self, accepted: Sequence[int]) -> None:
        """Take in how many draft tokens of each request were accepted."""
        self.accepted = accepted
        self.valid = alive(self.reqs)

    def parts(self, clock: Clock) -> tuple[float, float]:
        """Return the seconds of drafting and of everything else in the worker."""
        draft = sum(clock.seconds(start, end) for start, end in self.draft)
        return draft, clock.seconds(self.start, self.end) - draft

    def observation(self, draft_s: float, verify_s: float) -> StepObservation:
        """Return what the controller learns from this step."""
        assert self.accepted is not None
        confidences = None if self.confidences is None else self.confidences.float().numpy()
        return StepObservation(
            step=self.index,
            k=self.decision.k,
            accepted=np.asarray(self.accepted, np.int64),
            verified=self.verified,
            classes=self.classes,
            valid=self.valid,
            ragged=self.decision.budget is not None,
            context_len=self.context_len,
            draft_s=draft_s or None,
            verify_s=verify_s,
            step_s=self.seconds,
            request_ids=self.request_ids,
            confidences=confidences,
            margins=self.margins,
        )
