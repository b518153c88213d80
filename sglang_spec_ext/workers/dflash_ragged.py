"""DFLASH verifying a budget: of each request the prefix of its block that its drafts' margins make likely."""

from typing import Any

import torch
from sglang.srt.speculative.dflash_info import DFlashVerifyInput
from sglang.srt.speculative.ragged_verify import RaggedVerifyLayout

from sglang_spec_ext.kernels.margin_features import margin_features
from sglang_spec_ext.workers.margin_budget import Margins, RaggedTarget, refused
from sglang_spec_ext.workers.swap import Swap


class MarginHead(Margins):
    """Chooses the drafts of whole blocks and keeps the margins [R, G] they were chosen by."""

    def choose(self, hidden: torch.Tensor, lm_head: Any) -> torch.Tensor:
        """Return the likeliest token of every draft [R, G] int64 from hidden states [R, G, H]."""
        weight = lm_head.weight
        if hasattr(lm_head, "shard_indices"):  # rows of padding follow the vocabulary
            weight = weight[: lm_head.shard_indices.num_org_elements]
        found = margin_features(hidden.flatten(0, 1).to(weight.dtype) @ weight.T)
        self.margins = found.margins.view(hidden.shape[:2])
        return found.top_ids.view(hidden.shape[:2])


class RaggedBlockTarget(RaggedTarget):
    """The target pass over prefixes of blocks."""

    def packed(self, whole: Any, layout: RaggedVerifyLayout, kept: torch.Tensor) -> Any:
        """See RaggedTarget."""
        batch, verify = self._batch, whole.spec_info
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
        ends = batch.seq_lens_cpu + torch.tensor(layout.verify_lens_cpu, dtype=batch.seq_lens_cpu.dtype)
        lent = Swap(
            {
                "spec_info": packed,
                "input_ids": packed.draft_token,
                "out_cache_loc": batch.out_cache_loc[kept],
                "seq_lens_cpu": ends,
                "seq_lens_sum": int(ends.sum()),
            }
        )
        with lent.on(batch):
            forward_batch, _ = packed.prepare_for_verify(batch, self._target)
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


def unserved(worker: Any) -> str | None:
    """Return why this DFLASH worker cannot verify a budget, or None."""
    from sglang.srt.speculative.dflash_utils import is_dense_head_weight

    if (reason := refused("DFLASH")) is not None:
        return reason
    head = getattr(worker.target_worker.model_runner.model, "lm_head", None)
    if not is_dense_head_weight(getattr(head, "weight", None)):
        return "margins need a dense lm_head"
    if hasattr(head, "shard_indices") and head.shard_indices.num_added_elements:
        return "margins are read from the base vocabulary, and this lm_head has added tokens"
    if worker._is_domino or worker.selector is not None or worker.lilicorr is not None:
        return "this draft chooses its tokens otherwise than by its likeliest"
    return None
