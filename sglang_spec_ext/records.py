"""Records that pass between the workers and the control library.

Pure: standard library and NumPy. K is the number of draft tokens verified per request, the verify width is
K + 1. `accepted` counts draft tokens alone; the bonus token is never in it. Times are seconds that the caller
measured: nothing here reads a clock.
"""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.integer[Any]]
FloatArray = NDArray[np.floating[Any]]
BoolArray = NDArray[np.bool_]


class RequestClass(IntEnum):
    """Requests whose acceptance is estimated together.

    Grammar masks, penalties and temperature act on the target alone, so such requests would spoil the
    estimate of all others (vllm#57533).
    """

    PLAIN = 0
    GRAMMAR = 1
    PENALISED = 2
    HOT = 3


class Mode(StrEnum):
    """`off`: the fixed width; `shadow`: decide, account, change nothing; `adaptive`: act."""

    OFF = "off"
    SHADOW = "shadow"
    ADAPTIVE = "adaptive"


class Reason(StrEnum):
    """Why a decision is what it is; every decision carries one, and metrics count them."""

    BEST = "best"  # the held arm has the highest predicted rate
    SWITCH = "switch"  # a better arm passed margin, dwell and switch cost
    MARGIN = "margin"  # a better arm exists, but its gain is below the margin
    DWELL = "dwell"  # a better arm exists, but the last switch is too recent
    SWITCH_COST = "switch_cost"  # the gain over the expected stay does not pay the switch
    TRIAL = "trial"  # an arm within the profile's error runs for a dwell: its size was never measured in serving
    PROBE = "probe"  # one step above K = 0 to measure acceptance again
    CAPPED = "capped"  # the ladder or the engine forbids the held arm at this batch
    LADDER_FLOOR = "ladder_floor"  # the cap is below the smallest tier, which is then used
    OPTED_OUT = "opted_out"  # every request of the batch asked for no drafts
    PINNED = "pinned"  # a person fixed K
    MODE_OFF = "mode_off"
    SHADOW = "shadow"
    EMPTY = "empty"  # no decode request in the batch
    NO_COST_TABLE = "no_cost_table"  # nothing was measured, so nothing can be chosen
    RANK_MINIMUM = "rank_minimum"  # another rank voted lower
    RANK_ABSENT = "rank_absent"  # a rank could not vote: fixed full width for all
    RANK_MISMATCH = "rank_mismatch"  # ranks hold different tables, ladders or modes: fixed full width
    ALL_IDLE = "all_idle"  # no rank has a decode request


@dataclass(frozen=True, slots=True, kw_only=True)
class StepObservation:
    """What one finished step did; the worker fills it after acceptance is known.

    Rows that are invalid (finished, retracted), negative, NaN or above their verified length are dropped and
    counted by the controller; they never reach an estimate (sgl#23456).
    """

    step: int  # index of the decode step that produced these numbers
    k: int  # K the step was drafted at; accept rates divide by this, never by the K active now
    accepted: NDArray[Any]  # [R] accepted draft tokens, bonus not counted
    verified: IntArray | None = None  # [R] draft tokens verified; None: k in every row
    classes: IntArray | None = None  # [R] RequestClass; None: all PLAIN
    valid: BoolArray | None = None  # [R] False: finished or retracted before the result came
    ragged: bool = False  # the verified lengths were chosen by confidence
    prefill_tokens: int = 0  # prompt tokens that shared the step
    context_len: int = 0  # mean tokens of context per request
    draft_s: float | None = None  # None where the engine cannot tell the parts of a step apart
    verify_s: float | None = None
    step_s: float | None = None
    request_ids: IntArray | None = None  # [R] stable ids; needed for ragged verification
    confidences: FloatArray | None = None  # [R, gamma] acceptance probabilities from the draft's head
    margins: FloatArray | None = None  # [R, drafts made] top-2 logit margins, of a draft without a head


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchState:
    """What the next step looks like before K is chosen; `num_reqs` counts decode requests only."""

    step: int
    num_reqs: int
    classes: IntArray | None = None  # [R] RequestClass; None: all PLAIN
    caps: IntArray | None = None  # [R] largest K of each request, 0 = opted out; None: no caps
    request_ids: IntArray | None = None  # [R]
    prefill_tokens: int = 0
    context_len: int = 0
    max_k: int | None = None  # bound of the engine for this step (memory, positions left)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to run. `budget` is None for one K in the whole batch, else draft tokens to verify in total."""

    k: int
    reason: Reason
    budget: int | None = None
    bypass: bool = False  # full width for all: take the engine's own fixed-width path
    probe: bool = False
    wanted_k: int | None = None  # the K without shadow mode, veto or probe; None: a budget was wanted
    predicted_tok_s: float | None = None
    predicted_step_s: float | None = None

    @property
    def width(self) -> int:
        """Verify width: K draft tokens and the anchor."""
        return self.k + 1
