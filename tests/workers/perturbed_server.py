"""`sglang.launch_server` in which the confidences of rank 1 are off, and every rank writes down its steps.

A step costs what its tokens cost, whatever this machine measures: so a budget of tokens always pays.

Its processes are forked, so that they have the hooks below. Steps go to `$SPEC_EXT_TEST_STEPS`.<rank>, one JSON list a
line.
"""

import json
import os
import sys
from pathlib import Path

from sglang_spec_ext.hook import Hook
from sglang_spec_ext.hook_install import install


def propose(original, proposer, **kwargs):
    """Around `DraftBlockProposer.propose`: on rank 1 every second request looks lost, and the others certain."""
    import msgspec
    from sglang.srt.runtime_context import get_parallel

    proposal = original(proposer, **kwargs)
    if get_parallel().tp_rank == 0 or proposal.confidence is None:
        return proposal
    wrong = proposal.confidence.clone()
    wrong[0::2] = 0.999
    wrong[1::2] = 0.0
    return msgspec.structs.replace(proposal, confidence=wrong)


def cost_table(original, scheduler, fingerprint, context_len):
    """Instead of `cost_source._kept_or_measured`: drafts are nearly free and the target pays by the token."""
    from sglang_spec_ext.control.cost import ContextBucket, CostTable
    from sglang_spec_ext.control.curve import Curve

    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    tokens = Curve(sizes, tuple(0.004 + 0.0002 * size for size in sizes))
    draft = tuple((k, Curve((1, 8), (0.0005 * k, 0.0005 * k))) for k in (0, 7))
    return CostTable((ContextBucket(context_len, tokens, None, draft),), 0.0, fingerprint), "a test"


def decide(original, loop, state):
    """Around `AdaptiveLoop._decide`: write down what runs, also on a rank that is idle."""
    from sglang.srt.runtime_context import get_parallel

    decision = original(loop, state)
    with open(f"{os.environ['SPEC_EXT_TEST_STEPS']}.decided.{get_parallel().tp_rank}", "a", encoding="utf-8") as log:
        log.write(json.dumps([decision.k, decision.budget]) + "\n")
    return decision


def end(original, loop, step):
    """Around `AdaptiveLoop.end`: write the step down."""
    from sglang.srt.runtime_context import get_parallel

    original(loop, step)
    if loop.forced is None:
        verified = None if step.verified is None else step.verified.tolist()
        row = [len(step.reqs), step.decision.k, step.decision.budget, str(step.decision.reason), verified]
        with open(f"{os.environ['SPEC_EXT_TEST_STEPS']}.{get_parallel().tp_rank}", "a", encoding="utf-8") as log:
            log.write(json.dumps(row) + "\n")


def _around(target: str, ours: str) -> Hook:
    return Hook(target, "around", f"perturbed_server:{ours}", "active", "a test", "never")


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # the hooks name this file
install(
    (
        _around("sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose", "propose"),
        _around("sglang_spec_ext.workers.cost_source._kept_or_measured", "cost_table"),
        _around("sglang_spec_ext.workers.loop.AdaptiveLoop._decide", "decide"),
        _around("sglang_spec_ext.workers.loop.AdaptiveLoop.end", "end"),
    )
)

if __name__ == "__main__":
    import forked_server

    forked_server.launch()
