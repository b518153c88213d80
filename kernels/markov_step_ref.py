"""Torch twin of `markov_step`; the implementation on a CPU. It does write the bias as an [R, V] tensor."""

import torch
from sglang_spec_ext.kernels.first_largest import first_largest
from sglang_spec_ext.kernels.gumbel import gumbel_noise
from sglang_spec_ext.kernels.margin_features_ref import margin_features_ref
from sglang_spec_ext.kernels.markov_step import GumbelKey, MarkovStep


def markov_step_ref(
    base_logits: torch.Tensor,
    prev_tokens: torch.Tensor,
    *,
    w1: torch.Tensor,
    w2: torch.Tensor,
    temperatures: torch.Tensor | None,
    gumbel: "GumbelKey | torch.Tensor | None",
    logits_out: torch.Tensor | None,
    statistics: bool = True,
) -> MarkovStep:
    """See `markov_step`; the arguments have been checked there, and R >= 1."""
    known = (prev_tokens >= 0) & (prev_tokens < w1.shape[0])
    latent = w1[torch.where(known, prev_tokens, 0)] * known[:, None]
    logits = base_logits.float() + torch.nn.functional.linear(latent, w2)
    if logits_out is not None:
        logits_out.copy_(logits)
        logits = logits_out.float()
    scaled = keys = logits
    if temperatures is not None:
        sampled = temperatures > 0
        scaled = logits / torch.where(sampled, temperatures, 1.0)[:, None]
        keys = scaled + torch.where(sampled[:, None], _noise(gumbel, logits), 0.0)
    tokens = first_largest(keys)
    if not statistics:
        return MarkovStep(tokens, None, None, None)
    features = margin_features_ref(logits)
    log_sum_exps = features.log_sum_exps if temperatures is None else torch.logsumexp(scaled, dim=1)
    log_probs = scaled.gather(1, tokens[:, None]).squeeze(1) - log_sum_exps
    return MarkovStep(tokens, log_probs, features.margins, log_sum_exps)


def _noise(gumbel: "GumbelKey | torch.Tensor | None", logits: torch.Tensor) -> torch.Tensor:
    if isinstance(gumbel, GumbelKey):
        rows, columns = logits.shape
        return gumbel_noise(rows, columns, key=gumbel.key, offset=gumbel.offset, step=gumbel.step)
    assert gumbel is not None
    return gumbel
