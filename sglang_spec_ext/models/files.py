"""Writes a file or a folder so that a reader never sees half of it."""

import os
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def replace_atomically(path: pathlib.Path, write: Callable[[pathlib.Path], object]) -> None:
    """Call `write(temporary)` beside `path`, then rename; on failure the old file stays as it was.

    OSError of a full disk passes through after the partial file is removed.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(temporary)
        temporary.replace(path)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        raise


def write_tensors(
    path: pathlib.Path, tensors: "Mapping[str, torch.Tensor]", *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write one safetensors file, whole or not at all; OSError when the disk refuses it."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        replace_atomically(path, lambda part: save_file(dict(tensors), part, metadata=metadata))
    except SafetensorError as error:  # the library has its own error for a full disk
        raise OSError(f"cannot write {path}: {error}") from error
