"""Which implementation serves a call: Triton for tensors on a GPU, the torch twin for everything else.

The choice is made by where the tensors live and by nothing else (no environment variable, no global), and the
Triton module of an op is imported inside the branch that needs it: a machine without Triton runs every op.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Device types for which a Triton module is launched. ROCm builds of torch call their devices "cuda" as well.
_TRITON_DEVICE_TYPES = frozenset({"cuda", "xpu"})


def runs_on_triton(anchor: "torch.Tensor") -> bool:
    """Return True when a call whose main input is `anchor` goes to Triton.

    The other tensors of the call have been checked to sit on the same device (`contracts.check_tensor`).
    """
    return anchor.device.type in _TRITON_DEVICE_TYPES
