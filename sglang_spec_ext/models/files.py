"""Writes a file or a folder so that a reader never sees half of it."""

import os
import pathlib
import shutil
from collections.abc import Callable


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
