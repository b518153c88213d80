"""Checks of tensor arguments before anything is launched.

They read attributes only (never values), so they cost about a microsecond each and no synchronisation.
Each message names the argument, the rule, the value found and the cure.
"""

from collections.abc import Collection, Sequence

import torch

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    *,
    shape: Sequence[int | None],
    dtypes: Collection[torch.dtype],
    device: torch.device | None = None,
) -> None:
    """Raise unless `tensor` has this shape (None = any size), dtype, device and a contiguous last dimension.

    Earlier dimensions may be strided: rows of a larger buffer are passed as they are.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")
    found = tuple(tensor.shape)
    if len(found) != len(shape) or any(
        want is not None and want != got for want, got in zip(shape, found, strict=True)
    ):
        wanted = ", ".join("*" if size is None else str(size) for size in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(found)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype) for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {tensor.dtype}; convert it where it is made")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device} like the other arguments, got {tensor.device}")
    if found and found[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(
            f"{name} must be contiguous in its last dimension, got stride {tensor.stride(-1)}; "
            "pass tensor.contiguous()"
        )


def check_present(name: str, value: object, *, because: str) -> None:
    """Raise unless an optional argument was given, saying which choice asks for it."""
    if value is None:
        raise ValueError(f"{name} must be given {because}, got None")


def check_absent(name: str, value: object, *, because: str) -> None:
    """Raise if an argument was given that the chosen mode would not read."""
    if value is not None:
        raise ValueError(f"{name} must be None {because}: it would not be read")
