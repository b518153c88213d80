"""`sglang.launch_server` in which a step costs what its tokens cost, whatever this machine measures.

Drafts are nearly free and the target pays by the token, so that a budget of tokens always pays. Its processes are
forked, so that they have the hooks below.
"""

import sys
from pathlib import Path

from sglang_spec_ext.hook import Hook
from sglang_spec_ext.hook_install import install

SOURCE = "the prices of a test"


def around(target: str, ours: str) -> Hook:
    """Return the row of a hook around `target`."""
    return Hook(target, "around", ours, "active", "a test", "never")


def cost_table(original, scheduler, fingerprint, context_len):
    """Instead of `cost_source._kept_or_measured`: the prices."""
    from sglang_spec_ext.control.cost import ContextBucket, CostTable
    from sglang_spec_ext.control.curve import Curve

    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    tokens = Curve(sizes, tuple(0.004 + 0.0002 * size for size in sizes))
    tiers = scheduler.draft_worker.spec_ext.controller.settings.tiers
    draft = tuple((k, Curve((1, 8), (0.00005 * k, 0.00005 * k))) for k in sorted({0, *tiers}))
    return CostTable((ContextBucket(context_len, tokens, None, draft),), 0.0, fingerprint), SOURCE


def observe(original, live_cost, **measured):
    """Instead of `LiveCost.observe`: no measured time corrects the prices."""


sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]  # hooks name files here
install(
    (
        around("sglang_spec_ext.workers.cost_source._kept_or_measured", "priced_server:cost_table"),
        around("sglang_spec_ext.control.live_cost.LiveCost.observe", "priced_server:observe"),
    )
)

if __name__ == "__main__":
    import forked_server

    forked_server.launch()
