"""DFLASH verifying a budget: of each request the prefix of its block that its drafts' margins make likely.

SGLang's DFLASH step verifies one width. Here its target pass is given the rows of a RaggedVerifyLayout alone, as
DSPARK's compact step does (speculative/dspark_components/dspark_verify.py, `run_compact`), and gets logits and hidden
states back in the places of the whole width. The drafts have no confidence head; how likely each is accepted comes from
the margin between its two largest logits, by an online logistic (`control.calibration.MarginEstimator`).
"""

from typing import Any

import numpy as np
import torch
from sglang.kernels.ops.speculative.dspark.dspark_verify_window import ScatterCompactToStrided
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_spec_ext.control.calibration import MarginEstimator
from sglang_spec_ext.kernels.margin_features import margin_features
from sglang_spec_ext.kernels.survival_plan import survival_plan
from sglang_spec_ext.workers.step import Step


class MarginHead:
    """Chooses the drafts of whole blocks and keeps the margins they were chosen by."""

    def __init__(self, estimator: MarginEstimator) -> None:
        self.estimator = estimator
        self.margins: torch.Tensor | None = None  # [R, G] float32, of the block drafted last

    def choose(self, hidden: torch.Tensor, lm_head: Any) -> torch.Tensor:
        """Return the likeliest token of every draft [R, G] int64 from hidden states [R, G, H]."""
        weight = lm_head.weight
        if hasattr(lm_head, "shard_indices"):  # rows of padding follow the vocabulary
            weight = weight[: lm_head.shard_indices.num_org_elements]
        found = margin_features(hidden.flatten(0, 1).to(weight.dtype) @ weight.T)
        self.margins = found.margins.view(hidden.shape[:2])
        return found.top_ids.view(hidden.shape[:2])

    def lengths(self, budget: int) -> torch.Tensor | None:
        """Return how many tokens [R] int32 each request verifies of a budget; None: the whole width.

        The estimator is asked on the host: no other platform than the CPU's runs this (`unserved`).
        """
        if self.margins is None or not self.estimator.warm:
            return None
        confidences = self.estimator.probabilities(self.margins.cpu().numpy())
        return survival_plan(torch.from_numpy(confidences).float(), budget).verify_lens


class RaggedTarget:
    """Takes the place of the target worker in a step with a budget."""

    def __init__(self, target: Any, head: MarginHead, width: int) -> None:
        self._target = target
        self._head = head
        self._width = width
        self._step: Step | None = None
        self._batch: Any = None  # SGLang's, of the step
        self.lengths: torch.Tensor | None = None  # [R] tokens verified in the step, if not the whole width

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    def expect(self, step: Step, batch: Any) -> None:
        """Say which step runs next."""
        self._step, self._batch, self.lengths = step, batch, None

    def forward_batch_generation(self, batch: Any, *, forward_batch: Any, **kwargs: Any) -> Any:
        """Verify the planned prefixes; logits [R * width, V] and hidden states are zero in places behind them."""
        assert self._step is not None
        assert self._step.decision.budget is not None
        self.lengths = lengths = self._head.lengths(self._step.decision.budget)
        if lengths is None:
            return self._target.forward_batch_generation(batch=batch, forward_batch=forward_batch, **kwargs)
        lens: list[int] = lengths.tolist()
        layout = RaggedVerifyLayout.from_verify_lens(
            verify_lens_cpu=lens, device=forward_batch.input_ids.device, grid=(sum(lens),)
        )
        packed = self._packed(forward_batch, layout)
        out = self._target.forward_batch_generation(batch=batch, forward_batch=packed, **kwargs)
        found = out.logits_output
        for name in ("next_token_logits", "hidden_states"):
            rows = ScatterCompactToStrided.execute(
                compact=getattr(found, name), layout=layout, fill_value=0.0, verify_num_draft_tokens=self._width
            )
            setattr(found, name, rows)
        return out

    def _packed(self, whole: Any, layout: RaggedVerifyLayout) -> Any:
        """Return the forward batch of the layout's tokens, from that of the whole width."""
        batch, verify = self._batch, whole.spec_info
        column = torch.arange(self._width, device=layout.verify_lens.device)
        kept = (column < layout.verify_lens[:, None]).flatten().nonzero()[:, 0]
        packed = DFlashVerifyInput(
            draft_token=verify.draft_token[kept],
            positions=verify.positions[kept],
            draft_token_num=self._width,
            custom_mask=None,
            capture_hidden_mode=verify.capture_hidden_mode,
            ragged_verify_layout=layout,
            live_seq_lens_cpu=batch.seq_lens_cpu,
            kv_loc_plan=verify.kv_loc_plan,
            kv_loc_cols=kept,
        )
        before = {name: getattr(batch, name) for name in ("out_cache_loc", "input_ids", "seq_lens_cpu", "seq_lens_sum")}
        batch.out_cache_loc = batch.out_cache_loc[kept]
        batch.seq_lens_cpu = batch.seq_lens_cpu + torch.tensor(layout.verify_lens_cpu, dtype=batch.seq_lens_cpu.dtype)
        batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
        forward_batch, _ = packed.prepare_for_verify(batch, self._target)
        for name, value in before.items():
            setattr(batch, name, value)
        batch.spec_info = verify
        return forward_batch


def cut(
    candidates: torch.Tensor, accepted: torch.Tensor, bonus: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (accepted drafts, bonus) [R] of requests that verified `lengths` [R] of their candidates [R, width].

    The last row that was verified draws the bonus. Where it drew the next candidate, SGLang counts that as accepted and
    goes on in rows that were not run; the draw is the bonus all the same.
    """
    lengths = lengths.to(accepted.dtype)
    beyond = accepted >= lengths
    drawn = candidates.gather(1, lengths.clamp(max=candidates.shape[1] - 1).long()[:, None])[:, 0]
    return torch.where(beyond, lengths - 1, accepted), torch.where(beyond, drawn.to(bonus.dtype), bonus)


def verified_of(lengths: torch.Tensor | None) -> Any:
    """Return draft tokens [R] int64 verified in a step, or None for the whole width."""
    return None if lengths is None else lengths.cpu().numpy().astype(np.int64) - 1


def unserved(worker: Any) -> str | None:
    """Return why this DFLASH worker cannot verify a budget, or None."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.speculative.dflash_utils import is_dense_head_weight

    if not getattr(current_platform, "serves_ragged_dflash", False):
        return "DFLASH verifies a budget on the CPU platform alone; elsewhere its attention back ends were not tried"
    if get_parallel().tp_size > 1:
        return "with tensor parallelism each rank sees a part of a row of logits, and no margin"
    head = getattr(worker.target_worker.model_runner.model, "lm_head", None)
    if not is_dense_head_weight(getattr(head, "weight", None)):
        return "margins need a dense lm_head"
    if hasattr(head, "shard_indices") and head.shard_indices.num_added_elements:
        return "margins are read from the base vocabulary, and this lm_head has added tokens"
    if worker._is_domino or worker.selector is not None or worker.lilicorr is not None:
        return "this draft chooses its tokens otherwise than by its likeliest"
    return None
