"""Torch twin of `margin_features`; the implementation on a CPU."""

import torch
from sglang_spec_ext.kernels.margin_features import MarginFeatures


def margin_features_ref(logits: torch.Tensor) -> MarginFeatures:
    """See `margin_features`; the argument has been checked there, and N, V >= 1."""
    logits = logits.float()
    top, top_ids = logits.max(dim=1)  # NaN counts as largest
    second = logits.scatter(1, top_ids[:, None], -torch.inf).amax(dim=1)
    margins = top - torch.where(top.isnan(), top, second)
    return MarginFeatures(top_ids, margins, torch.logsumexp(logits, dim=1))
