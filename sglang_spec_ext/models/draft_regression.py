"""Starts a draft's last projection by least squares instead of hundreds of gradient steps.

With everything else at its random start, the last MLP's activations are random features of what the draft
sees; the weights that carry them to the target's next normed state are a linear regression. Its cost is that
of a few dozen training steps without a backward pass, and it leaves the draft where training would be after
several times as many.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
RIDGE = 3e-3  # beside the mean square of a feature


class _Capture:
    """Keeps what goes into a module, once per call."""

    def __init__(self, module: nn.Module) -> None:
        self.values: list[Tensor] = []
        self.handle = module.register_forward_pre_hook(self._keep)

    def _keep(self, _module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.values.append(inputs[0])


@torch.no_grad()
def regress_last_projection(
    runs: Iterable[tuple[Tensor, Tensor]], *, down: nn.Linear, norm: nn.Module, final_norm: Tensor
) -> float:
    """Set `down` and the weight of `norm`; return the share of the target state's variance that is explained.

    `runs` yields, each time after one forward pass of the draft, (valid [...] bool, final [n, hidden]): which
    rows of the last call of `norm` count, and the target's normed last states of those rows in order. The
    draft's output is norm(x + down(a)) for a residual x and activations a.
    """
    features, outputs = _Capture(down), _Capture(norm)
    size, hidden = down.in_features, down.out_features
    gram, cross = torch.zeros(size, size), torch.zeros(size, hidden)
    total, count = torch.zeros(hidden), 0
    squared, kept = torch.zeros(hidden), []
    try:
        for valid, final in runs:
            a, z = features.values[-1][valid], outputs.values[-1][valid]
            features.values.clear()
            outputs.values.clear()
            wanted = final / final_norm
            rest = z - down(a)
            features.values.clear()
            gram.addmm_(a.T, a)
            cross.addmm_(a.T, wanted - rest)
            total += wanted.sum(0)
            squared += wanted.pow(2).sum(0)
            count += len(a)
            kept = [a, rest, wanted]
    finally:
        features.handle.remove()
        outputs.handle.remove()
    gram.diagonal().add_(RIDGE * float(gram.diagonal().mean()))
    down.weight.copy_(torch.linalg.solve(gram, cross).T)
    a, rest, wanted = kept
    predicted = rest + down(a)
    # least squares shrinks what it cannot foresee; the norm would blow it up again
    norm.weight.copy_(final_norm * predicted.pow(2).mean(-1).sqrt().mean())
    spread = (squared / count - (total / count).pow(2)).sum()
    return 1.0 - float((predicted - wanted).pow(2).mean(0).sum() / spread)
