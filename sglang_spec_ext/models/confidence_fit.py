"""Fits a DSpark draft's confidence head anew on text that the draft was not trained on.

Trained beside the draft, the head learns how often drafts are accepted on text that the draft knows, which is more
often than on other text. The head is linear (SGLang's `Qwen3DSparkModel` reads `confidence_head.proj`), so a ridge
logistic regression over what it reads finds it: features are the draft's normed output and the Markov latent.
"""

import pathlib

import torch
from safetensors.torch import load_file
from torch.nn import functional

from sglang_spec_ext.models.files import write_tensors

Tensor = torch.Tensor
RIDGE = 0.03  # on weights of standardised features; of 1e-4 to 0.3 it erred least on texts that were not fitted
STEPS = 200
HEAD = "confidence_head.proj"


def fit_head(features: Tensor, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Return (weight [f], bias []) whose sigmoid is the chance that a draft is accepted once it is reached.

    `features` [blocks, drafts, f] float32; `accepted` [blocks, drafts] is that chance, 0 to 1. A draft counts by the
    chance that all before it were accepted.
    """
    reached = torch.cat([torch.ones(len(accepted), 1), accepted[:, :-1].cumprod(-1)], -1).flatten()
    rows, wanted = features.flatten(0, 1), accepted.flatten()
    mean, scale = rows.mean(0), rows.std(0) + 1e-3
    rows = (rows - mean) / scale
    weight = torch.zeros(rows.shape[1], requires_grad=True)
    bias = torch.zeros((), requires_grad=True)
    solver = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        solver.zero_grad()
        each = functional.binary_cross_entropy_with_logits(rows @ weight + bias, wanted, reduction="none")
        total = (each * reached).sum() / reached.sum() + RIDGE * weight.square().sum()
        total.backward()
        return total

    solver.step(loss)
    found = weight.detach() / scale
    return found, bias.detach() - found @ mean


def write_head(folder: pathlib.Path, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Replace the confidence head in a draft's folder; return it as it was stored, in the folder's dtype."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    stored = {}
    for name, value in ((f"{HEAD}.weight", weight), (f"{HEAD}.bias", bias)):
        stored[name] = value.to(tensors[name].dtype).reshape(tensors[name].shape)
    write_tensors(path, tensors | stored)
    return stored[f"{HEAD}.weight"].float().flatten(), stored[f"{HEAD}.bias"].float().reshape(())
