"""Torch twin of `margin_features`; the implementation on a CPU."""

import torch
from sglang_spec_ext.kernels.first_largest import first_largest
from sglang_spec_ext.kernels.margin_features import MarginFeatures


def margin_features_ref(logits: torch.Tensor) -> MarginFeatures:
    """See `margin_features`; the argument has been checked there, and N, V >= 1."""
    logits = logits.float()
    top_ids = first_largest(logits)
    top = logits.gather(1, top_ids[:, None]).squeeze(1)
    second = logits.scatter(1, top_ids[:, None], -torch.inf).amax(dim=1)
    margins = top - torch.where(top.isnan(), top, second)
    return MarginFeatures(top_ids, margins, torch.logsumexp(logits, dim=1))
