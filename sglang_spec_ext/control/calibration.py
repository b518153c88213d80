"""Acceptance probabilities for single tokens: scaled heads, and margins for drafts without a head.

`TemperatureScaling` is sequential temperature scaling (DSpark paper, 4.3): one temperature per position,
fitted left to right so that the running product is calibrated. `MarginEstimator` maps the draft's top-2
logit margin to a probability by one logistic per position, refitted online. The margin is a statistic of
the whole distribution, so it does not depend on the token that was drawn.
"""

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from sglang_spec_ext.records import BoolArray, FloatArray, IntArray, RequestClass

_EPS = 1e-6
_GRID = np.geomspace(0.125, 8.0, 49)
_ECE_BINS = 20


@dataclass(frozen=True, slots=True)
class TemperatureScaling:
    """One temperature > 0 per position of the block."""

    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0.0 < t < float("inf") for t in self.temperatures):
            raise ValueError(
                f"temperatures: one finite value > 0 per position, got {list(self.temperatures)}; fit again"
            )

    def apply(self, confidences: FloatArray) -> FloatArray:
        """Return scaled confidences [R, G]; NaN and values outside 0..1 stay as they are."""
        if confidences.shape[1] != len(self.temperatures):
            raise ValueError(
                f"temperatures: {len(self.temperatures)} positions, the block has {confidences.shape[1]}; "
                "use the file that was fitted for this draft"
            )
        inside = (confidences >= 0.0) & (confidences <= 1.0)
        logits = _logit(np.where(inside, confidences, 0.5))
        return np.where(inside, _sigmoid(logits / np.asarray(self.temperatures)), confidences)

    @classmethod
    def from_json(cls, text: str | bytes, gamma: int) -> "TemperatureScaling":
        """Read SGLang's STS file (`temperatures` and notes on the fit) for blocks of `gamma` tokens."""
        raw = json.loads(text)
        values = raw.get("temperatures") if isinstance(raw, dict) else None
        if not isinstance(values, list) or any(type(v) not in (int, float) for v in values):
            raise ValueError("temperatures: an STS file has a list of numbers under this key; fit it again")
        if len(values) != gamma:
            raise ValueError(f"temperatures: needs {gamma} values, one per draft position, got {len(values)}")
        return cls(tuple(float(v) for v in values))

    @classmethod
    def fit(cls, confidences: FloatArray, accepted: IntArray) -> "TemperatureScaling":
        """Fit on held-out blocks: confidences [N, G] and accepted draft tokens [N] of full verification."""
        logits = _logit(confidences)
        product = np.ones(len(confidences))
        temperatures = []
        for j in range(confidences.shape[1]):
            reached = accepted > j
            candidates = product * _sigmoid(logits[:, j] / _GRID[:, None])  # [grid, N]
            errors = [calibration_error(candidate, reached) for candidate in candidates]
            best = int(np.argmin(errors))
            temperatures.append(float(_GRID[best]))
            product = candidates[best]
        return cls(tuple(temperatures))


def calibration_error(predicted: FloatArray, happened: BoolArray) -> float:
    """Expected calibration error of probabilities [N] against events [N], in bins of equal width."""
    bins = np.minimum((predicted * _ECE_BINS).astype(np.int64), _ECE_BINS - 1)
    gap = np.bincount(bins, predicted - happened, minlength=_ECE_BINS)
    return float(np.abs(gap).sum() / len(predicted))


class MarginEstimator:
    """Online logistic of acceptance on the top-2 logit margin, one per position.

    Samples are summed up against the coefficients in use (gradient and 2x2 curvature per position), and
    each `refit_steps` one damped Newton step is taken from the sums: the cost is independent of how much
    was seen. During warm-up only steps with one K for the whole batch count: a length chosen by confidence
    would censor the labels. Only plain requests train it (vllm#57533). Positions with fewer than
    `min_samples` keep theirs.
    """

    def __init__(self, gamma: int, *, refit_steps: int = 100, warmup_refits: int = 3) -> None:
        self.gamma = gamma
        self.refit_steps = refit_steps
        self.warmup_refits = warmup_refits
        self.min_samples = 50
        self.margin_cap = 40.0
        self.ridge = 1e-3
        self.coefficients = np.tile([0.0, 1.5], (gamma, 1))  # [G, 2]: slope >= 0, bias
        self.samples = np.zeros(gamma)
        self.steps = 0
        self.refits = 0
        self.refused_slopes = 0
        self._gradient = np.zeros((gamma, 2))
        self._curvature = np.zeros((gamma, 2, 2))

    @property
    def warm(self) -> bool:
        """Whether its probabilities may steer a budget."""
        return self.refits >= self.warmup_refits

    def probabilities(self, margins: FloatArray) -> FloatArray:
        """Return acceptance probabilities of margins, both [R, k] of the first k <= G positions; NaN stays NaN."""
        slope, bias = self.coefficients[: margins.shape[1]].T
        return _sigmoid(np.minimum(margins, self.margin_cap) * slope + bias)

    def observe(
        self,
        margins: FloatArray,
        reached: IntArray,
        accepted: IntArray,
        *,
        classes: IntArray | None,
        ragged: bool,
    ) -> None:
        """Add one step: margins [R, k] of k <= G drafts; positions [R] reached and verified; accepted drafts [R]."""
        if ragged and not self.warm:
            return
        if margins.shape[1] < self.gamma:  # what was not drafted is not reached
            margins = np.pad(margins, ((0, 0), (0, self.gamma - margins.shape[1])))
        plain: BoolArray = np.logical_and.reduce(np.isfinite(margins) & (margins >= 0.0), axis=1)
        if classes is not None:
            plain &= classes == RequestClass.PLAIN
        position = np.arange(self.gamma)
        seen = (position < reached[:, None]) & plain[:, None]
        x = np.where(seen, np.minimum(margins, self.margin_cap), 0.0)
        p = self.probabilities(x)
        residual = np.where(seen, (position < accepted[:, None]) - p, 0.0)
        weight = np.where(seen, p * (1.0 - p), 0.0)
        self._gradient += np.stack([(x * residual).sum(0), residual.sum(0)], axis=1)
        cross = (weight * x).sum(0)
        square = (weight * x * x).sum(0)
        self._curvature += np.stack([square, cross, cross, weight.sum(0)], axis=1).reshape(-1, 2, 2)
        self.samples += seen.sum(0)
        self.steps += 1
        if self.steps % self.refit_steps == 0:
            self._refit()

    def _refit(self) -> None:
        ready = self.samples >= self.min_samples
        self.refits += int(ready[0])
        curvature = self._curvature + self.ridge * np.eye(2)
        step = np.linalg.solve(curvature, self._gradient[:, :, None])[:, :, 0]
        proposed = self.coefficients + np.clip(step, -2.0, 2.0)  # a full step far from the optimum overshoots
        negative = proposed[:, 0] < 0.0
        self.refused_slopes += int(np.count_nonzero(negative & ready))
        # a wider margin cannot mean a worse draft: fit the bias alone there
        bias_step = self._gradient[:, 1] / (self._curvature[:, 1, 1] + self.ridge)
        bias = self.coefficients[:, 1] + np.clip(bias_step, -2.0, 2.0)
        level = np.stack([np.zeros(self.gamma), bias], axis=1)
        proposed = np.where(negative[:, None], level, proposed)
        self.coefficients = np.where(ready[:, None], proposed, self.coefficients)
        self._gradient[ready] = 0.0
        self._curvature[ready] = 0.0
        self.samples[ready] = 0.0

    def snapshot(self) -> dict[str, Any]:
        """Plain facts; the coefficients may be averaged over ranks."""
        return {
            "warm": self.warm,
            "refits": self.refits,
            "refused_slopes": self.refused_slopes,
            "coefficients": self.coefficients.tolist(),
        }


def _logit(p: FloatArray) -> FloatArray:
    clipped = np.clip(p, _EPS, 1.0 - _EPS)
    result: FloatArray = np.log(clipped) - np.log1p(-clipped)
    return result


def _sigmoid(x: FloatArray) -> FloatArray:
    result: FloatArray = 1.0 / (1.0 + np.exp(-np.clip(x, -60.0, 60.0)))
    return result
