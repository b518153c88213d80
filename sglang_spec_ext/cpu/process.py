"""Process-wide settings of the CPU reference platform."""

import os

import torch


def prepare_process() -> None:
    """Set what holds for the whole process: no just-in-time compilation, no streams.

    SGLang decorates small functions with `torch.compile`; on a CPU each would start a C++ compiler in the middle
    of a request, for a function that runs in microseconds. `Tensor.record_stream` refuses the stream object of
    the CPU, which has no streams to record.
    """
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[assignment,method-assign,misc]
