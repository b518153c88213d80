"""Starts a draft's last projections by least squares instead of hundreds of gradient steps.

With everything else at its random start, the last MLP's activations are random features of what the draft
sees; the weights that carry them to the target's next normed state are a linear regression. Its cost is that
of a few dozen training steps without a backward pass, and it leaves the draft where training would be after
several times as many.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Tensor = torch.Tensor
RIDGE = 3e-3  # beside the mean square of a feature


class Capture:
    """Keeps what goes into a module, once per call, until `stop`."""

    def __init__(self, module: nn.Module) -> None:
        self.values: list[Tensor] = []
        self.handle = module.register_forward_pre_hook(self._keep)

    def stop(self) -> None:
        """Keep nothing more."""
        self.handle.remove()

    def _keep(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.values.append(inputs[0])


@dataclass(frozen=True)
class Regression:
    """The share of the target state's variance that is explained, and the scale of what was predicted."""

    explained: float
    scale: float


@torch.no_grad()
def regress_projection(
    runs: Iterable[tuple[Tensor, Tensor]], *, projection: nn.Linear, reader: nn.Module, final_norm: Tensor
) -> Regression:
    """Set the weight of `projection` so that x + projection(a) is near the target's state before its last norm.

    `runs` yields, each time after one forward pass of the draft, (valid [...] bool, final [n, hidden]): which
    rows count, and the target's normed last states of those rows in order. x are residuals and a activations
    of that pass; `reader` is the module whose first call in a pass reads the sum.
    """
    features, outputs = Capture(projection), Capture(reader)
    size, hidden = projection.in_features, projection.out_features
    gram, cross = torch.zeros(size, size), torch.zeros(size, hidden)
    total, squared, count = torch.zeros(hidden), torch.zeros(hidden), 0
    kept: list[Tensor] = []
    try:
        for valid, final in runs:
            a = features.values[0].reshape(*valid.shape, -1)[valid]
            rest = outputs.values[0].reshape(*valid.shape, -1)[valid] - functional.linear(a, projection.weight)
            features.values.clear()
            outputs.values.clear()
            wanted = final / final_norm
            gram.addmm_(a.T, a)
            cross.addmm_(a.T, wanted - rest)
            total += wanted.sum(0)
            squared += wanted.pow(2).sum(0)
            count += len(a)
            kept = [a, rest, wanted]
    finally:
        features.stop()
        outputs.stop()
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    projection.weight.copy_(torch.linalg.solve(gram, cross).T)
    a, rest, wanted = kept
    predicted = rest + functional.linear(a, projection.weight)
    spread = (squared / count - (total / count).pow(2)).sum()
    explained = 1.0 - float((predicted - wanted).pow(2).mean(0).sum() / spread)
    return Regression(explained, float(predicted.pow(2).mean(-1).sqrt().mean()))
