"""The head of a DSPARK draft runs for the positions that are verified, wherever no graph holds the whole of it."""

from types import SimpleNamespace

import pytest

pytest.importorskip("sglang")

from sglang_spec_ext.workers.dspark_proposer import TimedProposer


def proposer(*, graphs: bool, sampler: bool) -> TimedProposer:
    runner = SimpleNamespace(decode_cuda_graph_runner=object() if graphs else None)
    upstream = SimpleNamespace(draft_model_runner=runner, _draft_sampler=object() if sampler else None, gamma=7)
    return TimedProposer(upstream, SimpleNamespace())


@pytest.mark.parametrize(
    ("graphs", "sampler", "chosen"),
    [(False, True, 2), (False, False, 2), (True, False, 2), (True, True, 7)],  # a CPU has the sampler and no graph
)
def test_positions_that_are_chosen(graphs: bool, sampler: bool, chosen: int) -> None:
    assert proposer(graphs=graphs, sampler=sampler)._choosing(2).gamma == chosen
    assert proposer(graphs=graphs, sampler=sampler)._choosing(None).gamma == 7
