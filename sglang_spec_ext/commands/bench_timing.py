"""Device time of a call: captured graphs over rotating inputs, medians by device events. Needs a GPU."""

import statistics
from collections.abc import Callable, Sequence

import torch

_WARM_UP = 3
_REPLAYS = 25
_COPY_BYTES = 1 << 30


def median_seconds(calls: Sequence[Callable[[], object]]) -> tuple[float, str]:
    """Return the median time of one call, and how it was launched: "graph", or "eager" where capture is
    refused.

    `calls` do the same on different inputs, so that none finds its data in the cache; all of them make one
    graph.
    """
    for call in list(calls) * _WARM_UP:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
        launch, how = graph.replay, "graph"
    except RuntimeError:
        # e.g. a twin that reads a value on the host: timed with its launches, and marked
        torch.cuda.synchronize()

        def launch() -> None:
            for call in calls:
                call()

        how = "eager"
    return statistics.median(_timed(launch) for _ in range(_REPLAYS)) / len(calls), how


def _timed(launch: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    launch()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def copy_bytes_per_second() -> float:
    """Bytes read plus written per second by a large device copy: the roof that the table measures against."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    seconds, _ = median_seconds([lambda: target.copy_(source)])
    return 2 * _COPY_BYTES / seconds
