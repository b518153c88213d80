"""Torch twin of `markov_step`; the implementation on a CPU. It does write the bias as an [R, V] tensor."""

import torch
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
) -> MarkovStep:
    """See `markov_step`; the arguments have been checked there, and R >= 1."""
    num_requests, vocab_size = base_logits.shape
    known = (prev_tokens >= 0) & (prev_tokens < w1.shape[0])
    latent = w1[torch.where(known, prev_tokens, 0)] * known[:, None]
    logits = base_logits.float() + torch.nn.functional.linear(latent, w2).float()
    if logits_out is not None:
        logits_out.copy_(logits)
    features = margin_features_ref(logits)
    tokens, log_sum_exps = features.top_ids, features.log_sum_exps
    chosen = logits.gather(1, tokens[:, None]).squeeze(1)
    if temperatures is not None:
        sampled = temperatures > 0
        scale = torch.where(sampled, temperatures, 1.0)
        if isinstance(gumbel, GumbelKey):
            gumbel = gumbel_noise(
                num_requests, vocab_size, key=gumbel.key, offset=gumbel.offset, step=gumbel.step
            )
        assert gumbel is not None
        scaled = logits / scale[:, None]
        drawn = (scaled + gumbel).max(dim=1).indices
        tokens = torch.where(sampled, drawn, tokens)
        chosen = scaled.gather(1, tokens[:, None]).squeeze(1)
        log_sum_exps = torch.logsumexp(scaled, dim=1)
    return MarkovStep(tokens, chosen - log_sum_exps, features.margins, log_sum_exps)
