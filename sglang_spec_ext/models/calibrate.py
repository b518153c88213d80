"""Fits and judges the confidence of a DSpark draft: sequential temperature scaling, ECE, AUC, a plot.

Source: DSpark paper, section on calibration. Confidence c_k is the chance that draft k is accepted given
that the earlier ones were; the survival of position k is the product of c_1..c_k. Position by position, from
the left, one temperature is chosen that makes the survival up to there match how often it happens.
"""

import json
import pathlib
from dataclasses import dataclass

import numpy as np

Array = np.ndarray
NUM_BINS = 10
TEMPERATURES = np.geomspace(0.25, 4.0, 81)


@dataclass(frozen=True)
class Calibration:
    """Temperatures per position, with the expected calibration error of the survival before and after."""

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    auc: tuple[float, ...]
    num_samples: int


def sigmoid(logits: Array) -> Array:
    """Return 1 / (1 + exp(-x)) without overflow."""
    return 0.5 * (1.0 + np.tanh(0.5 * logits))


def expected_calibration_error(predicted: Array, happened: Array, *, num_bins: int = NUM_BINS) -> float:
    """Return the mean of |predicted - happened| over equally filled bins of `predicted`, both [n].

    Equally filled bins: survival of late positions crowds near 0, where bins of equal width would hold
    almost everything.
    """
    order = np.argsort(predicted, kind="stable")
    parts = np.array_split(order, min(num_bins, len(order)))
    gaps = [abs(predicted[part].mean() - happened[part].mean()) * len(part) for part in parts]
    return float(sum(gaps) / len(order))


def area_under_curve(score: Array, happened: Array) -> float:
    """Return the chance that a case that happened scores above one that did not; nan when one is missing.

    `happened` [n] may be a probability: each case then counts as both, by its weight.
    """
    order = np.argsort(score, kind="stable")
    yes, no = happened[order].astype(float), 1.0 - happened[order]
    if yes.sum() == 0 or no.sum() == 0:
        return float("nan")
    # ties share their place: walk groups of equal score
    _, first = np.unique(score[order], return_index=True)
    yes_in, no_in = np.add.reduceat(yes, first), np.add.reduceat(no, first)
    no_below = np.cumsum(no_in) - no_in
    return float((yes_in * (no_below + 0.5 * no_in)).sum() / (yes.sum() * no.sum()))


def fit_temperatures(logits: Array, survived: Array) -> Calibration:
    """Fit one temperature per position, left to right.

    `logits` [n, positions] are the raw confidences; `survived` [n, positions] is whether, or how probably,
    drafts 1..k were all accepted. AUC is per position over the cases that reached it.
    """
    num_positions = logits.shape[1]
    prefix_before = np.cumprod(sigmoid(logits), 1)
    survival = np.ones(len(logits))
    temperatures, after = [], []
    for k in range(num_positions):
        errors = [
            expected_calibration_error(survival * sigmoid(logits[:, k] / t), survived[:, k])
            for t in TEMPERATURES
        ]
        best = int(np.argmin(errors))
        temperatures.append(float(TEMPERATURES[best]))
        after.append(errors[best])
        survival = survival * sigmoid(logits[:, k] / TEMPERATURES[best])
    reached = np.concatenate([np.ones((len(logits), 1)), survived[:, :-1]], 1)
    auc = []
    for k in range(num_positions):
        rows = reached[:, k] > 0
        given = survived[rows, k] / reached[rows, k]
        auc.append(area_under_curve(logits[rows, k], given))
    return Calibration(
        temperatures=tuple(temperatures),
        ece_before=tuple(
            expected_calibration_error(prefix_before[:, k], survived[:, k]) for k in range(num_positions)
        ),
        ece_after=tuple(after),
        auc=tuple(auc),
        num_samples=len(logits),
    )


def judge(calibration: Calibration, logits: Array, survived: Array) -> Calibration:
    """Return the same temperatures with errors and AUC measured on other data."""
    scaled = logits / np.asarray(calibration.temperatures)
    fitted = fit_temperatures(logits, survived)
    after = np.cumprod(sigmoid(scaled), 1)
    return Calibration(
        temperatures=calibration.temperatures,
        ece_before=fitted.ece_before,
        ece_after=tuple(
            expected_calibration_error(after[:, k], survived[:, k]) for k in range(logits.shape[1])
        ),
        auc=fitted.auc,
        num_samples=len(logits),
    )


def write_sts(calibration: Calibration, path: pathlib.Path, *, dataset: str) -> None:
    """Write SGLang's file for `--speculative-dspark-confidence-sts-path` (keys of DSparkStsCalibration)."""
    facts = {
        "temperatures": [round(t, 4) for t in calibration.temperatures],
        "dataset": dataset,
        "num_samples": calibration.num_samples,
        "ece_before": [round(e, 5) for e in calibration.ece_before],
        "ece_after": [round(e, 5) for e in calibration.ece_after],
    }
    path.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def plot_reliability(calibration: Calibration, logits: Array, survived: Array, *, path: pathlib.Path) -> None:
    """Save predicted against observed survival of every position, before and after scaling, as PNG."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 4.5), sharex=True, sharey=True)
    scales = (("before", np.ones(logits.shape[1])), ("after", np.asarray(calibration.temperatures)))
    for axis, (label, temperatures) in zip(axes, scales, strict=True):
        survival = np.cumprod(sigmoid(logits / temperatures), 1)
        for k in range(logits.shape[1]):
            parts = np.array_split(np.argsort(survival[:, k], kind="stable"), NUM_BINS)
            predicted = [survival[part, k].mean() for part in parts]
            observed = [survived[part, k].mean() for part in parts]
            axis.plot(predicted, observed, marker="o", markersize=3, linewidth=1, label=f"position {k + 1}")
        axis.plot([0, 1], [0, 1], color="grey", linewidth=0.8, linestyle="--")
        axis.set(title=f"{label} temperature scaling", xlabel="predicted survival", xlim=(0, 1), ylim=(0, 1))
    axes[0].set_ylabel("observed survival")
    axes[1].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)
