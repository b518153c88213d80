"""What the acceptance estimator reads from a row of logits, in one pass over memory.

A draft without a confidence head is judged by the margin between its two largest logits (an online logistic
in `control.calibration`); the log-sum-exp turns a logit into a log-probability. Margin and log-sum-exp are
statistics of the whole row, so using them to schedule verification of sampled drafts is lossless: they do not
depend on which token was drawn.

Twin: `margin_features_ref`. Kernel: `margin_features_triton`.
"""

from dataclasses import dataclass

import torch
from sglang_spec_ext.kernels.contracts import FLOAT_DTYPES, check_tensor
from sglang_spec_ext.kernels.dispatch import runs_on_triton


@dataclass(frozen=True, slots=True)
class MarginFeatures:
    """One entry per row of logits, on their device."""

    top_ids: torch.Tensor  # [N] int64, the argmax; the lowest id among equals, the first NaN if there is one
    margins: torch.Tensor  # [N] float32, largest minus second largest logit, in logits (nats)
    log_sum_exps: torch.Tensor  # [N] float32, log of the sum of exp(logit), in nats


def margin_features(logits: torch.Tensor) -> MarginFeatures:
    """Return argmax, top-2 margin and log-sum-exp of each row. One launch, nothing read on the host.

    Args:
        logits: [N, V] float32, bfloat16 or float16, V at least 1. Row stride free. Not changed.

    A margin is infinite where only one logit is above -inf (V = 1 is such a row), 0 for a tie. A row holding
    NaN, or nothing above -inf, has margin NaN; its neighbours are unaffected.

    Returns: MarginFeatures; for N = 0 its tensors are empty and nothing is launched.
    Raises: ValueError or TypeError on a wrong shape, dtype or stride.
    """
    check_tensor("logits", logits, shape=(None, None), dtypes=FLOAT_DTYPES)
    num_rows, vocab_size = logits.shape
    if vocab_size == 0:
        raise ValueError("logits must have at least one column (the vocabulary), got 0")
    if num_rows == 0:
        empty = torch.empty(0, dtype=torch.float32, device=logits.device)
        return MarginFeatures(torch.empty(0, dtype=torch.int64, device=logits.device), empty, empty)
    if runs_on_triton(logits):
        from sglang_spec_ext.kernels.margin_features_triton import margin_features_triton as implementation
    else:
        from sglang_spec_ext.kernels.margin_features_ref import margin_features_ref as implementation
    return implementation(logits)
