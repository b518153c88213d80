"""Figures of the commands: matplotlib without a display, imported when the first figure is made."""

from pathlib import Path
from typing import Any

from sglang_spec_ext.cli import UsageError


def subplots(rows: int, *, size: tuple[float, float]) -> tuple[Any, Any]:
    """Return a figure of `size` inches and its axes, one or `rows` above each other."""
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise UsageError("plots need matplotlib; pip install 'sglang-spec-ext[plot]', or ask for none") from error
    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, 1, figsize=size, sharex=True, layout="constrained")


def save(figure: Any, path: Path) -> Path:
    """Write a figure and forget it; returns the path."""
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written ({error})") from error
    finally:
        pyplot.close(figure)
    return path
