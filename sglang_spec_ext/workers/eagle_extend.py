"""EAGLE's draft extend over the tokens of several steps at K = 0, in one pass.

To SGLang it looks like the extend after one wide verify step in which every request accepted as many tokens as
steps are held, so it runs with the back ends and graphs of the narrowest tier that is wide enough.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.moe.utils import speculative_moe_a2a_backend_context, speculative_moe_backend_context
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_spec_ext.workers.backlog import Row
from sglang_spec_ext.workers.swap import Swap

_SEEDS = ("topk_p", "topk_index", "hidden_states")


class Seeds:
    """What an extend hands to the next draft [R], kept until that draft: a prefill may come before it."""

    def __init__(self, reqs: Sequence[Any], found: Any) -> None:
        self._reqs = reqs  # held, so that their ids stay theirs
        self._rows = {id(req): row for row, req in enumerate(reqs)}
        self._found = found  # has the tensors _SEEDS

    def forget(self, reqs: Sequence[Any]) -> None:
        """Drop requests that are prefilled (again): their own seeds come with that."""
        for req in reqs:
            self._rows.pop(id(req), None)

    def place(self, draft_input: Any, reqs: Sequence[Any]) -> None:
        """Put the seeds into SGLang's EagleDraftInput of these requests; others keep theirs."""
        known = [(row, self._rows[id(req)]) for row, req in enumerate(reqs) if id(req) in self._rows]
        if not known:
            return
        to, of = torch.tensor(known, device=draft_input.topk_index.device).unbind(1)
        for name in _SEEDS:
            old, new = getattr(draft_input, name), getattr(self._found, name)
            setattr(draft_input, name, old.index_copy(0, to, new[of].to(old.dtype)))


def extend_together(worker: Any, batch: Any, rows: list[Row]) -> Any:
    """Run the draft over the rows (hidden [R, H], token [R], slot [R]) of one step each; return the seeds.

    `batch` is SGLang's batch as the oldest of the steps left it to its own extend.
    """
    steps, reqs = len(rows), len(rows[0][1])
    state = _narrowest(worker.adaptive_controller, steps)
    width = state.speculative_num_draft_tokens
    hidden, tokens, slots = (_side_by_side(parts, width) for parts in zip(*rows, strict=True))
    slots[:, steps:] = 0  # SGLang's slot for padding
    batch.out_cache_loc = slots.flatten()
    accepted = torch.full((reqs,), steps, dtype=torch.int32, device=tokens.device)
    output = GenerationBatchResult(
        logits_output=SimpleNamespace(hidden_states=hidden.flatten(0, 1)),
        next_token_ids=tokens.flatten(),
        accept_lens=accepted,
        new_seq_lens=batch.seq_lens + accepted,
        next_draft_input=SimpleNamespace(),
    )
    draft = worker.draft_worker
    with (
        draft_tp_context(draft.parallel_layout),
        speculative_moe_backend_context(),
        speculative_moe_a2a_backend_context(),
        _at(state).on(draft),
        _backend(state, draft.draft_runner).on(draft.draft_runner),
    ):
        draft._draft_extend_for_decode(batch, output)
    return output.next_draft_input


def _side_by_side(parts: Sequence[torch.Tensor], width: int) -> torch.Tensor:
    """Return [R, width, ...] from tensors [R, ...] of one step each; columns past the last repeat it."""
    return torch.stack([*parts, *[parts[-1]] * (width - len(parts))], dim=1)


def _narrowest(controller: Any, steps: int) -> Any:
    """Return SGLang's state of the smallest K whose verify width holds that many tokens."""
    return controller._states[min(k for k in controller.candidate_steps if k + 1 >= steps)]


def _at(state: Any) -> Swap:
    return Swap(
        {
            "speculative_num_draft_tokens": state.speculative_num_draft_tokens,
            "draft_extend_attn_backend": state.draft_extend_attn_backend,
            "cuda_graph_runner_for_draft_extend": state.cuda_graph_runner_for_draft_extend,
        }
    )


def _backend(state: Any, runner: Any) -> Swap:
    return Swap({"attn_backend": state.draft_extend_attn_backend or runner.attn_backend})
