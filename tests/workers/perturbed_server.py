"""`sglang.launch_server` in which the confidences of rank 1 are off, and every rank writes down its steps.

Steps cost what `priced_server` says. They go to `$SPEC_EXT_TEST_STEPS`.<rank>, one JSON list a line.
"""

import json
import os

from priced_server import around

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


install(
    (
        around(
            "sglang.srt.speculative.dspark_components.dspark_draft.DraftBlockProposer.propose",
            "perturbed_server:propose",
        ),
        around("sglang_spec_ext.workers.loop.AdaptiveLoop._decide", "perturbed_server:decide"),
        around("sglang_spec_ext.workers.loop.AdaptiveLoop.end", "perturbed_server:end"),
    )
)

if __name__ == "__main__":
    import forked_server

    forked_server.launch()
