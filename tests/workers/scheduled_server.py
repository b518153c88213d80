"""`sglang.launch_server` in which K follows a schedule while nothing is pinned, and every step is written down.

`$SPEC_EXT_TEST_SCHEDULE` is a JSON list of K, gone through again and again from where something was last pinned.
`$SPEC_EXT_TEST_STEPS` receives a JSON list for each step and request: its id, its tokens with K/V, K, accepted drafts.
"""

import json
import os

from priced_server import around

from sglang_spec_ext.hook_install import install

SCHEDULE = json.loads(os.environ["SPEC_EXT_TEST_SCHEDULE"])


def decide(original, controller, batch):
    """Around `Controller.decide`: pin the next K of the schedule for this step."""
    if controller.pinned is not None or not batch.num_reqs:
        controller.scheduled = 0
        return original(controller, batch)
    place = getattr(controller, "scheduled", 0)
    controller.scheduled, controller.pinned = place + 1, SCHEDULE[place % len(SCHEDULE)]
    try:
        return original(controller, batch)
    finally:
        controller.pinned = None


def begin(original, loop, batch):
    """Around `AdaptiveLoop.begin`: note how many tokens of each request have K/V."""
    step = original(loop, batch)
    step.lengths = batch.seq_lens.tolist()
    return step


def resolve(original, step, accepted):
    """Around `Step.resolve`: write the step down."""
    original(step, accepted)
    rows = zip(step.reqs, step.lengths, accepted, strict=True)
    with open(os.environ["SPEC_EXT_TEST_STEPS"], "a", encoding="utf-8") as log:
        log.writelines(
            json.dumps([req.rid, length, step.decision.k, int(count)]) + "\n" for req, length, count in rows
        )


install(
    (
        around("sglang_spec_ext.control.controller.Controller.decide", "scheduled_server:decide"),
        around("sglang_spec_ext.workers.loop.AdaptiveLoop.begin", "scheduled_server:begin"),
        around("sglang_spec_ext.workers.step.Step.resolve", "scheduled_server:resolve"),
    )
)

if __name__ == "__main__":
    import forked_server

    forked_server.launch()
