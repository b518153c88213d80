"""DSpark's first block: drafted by prefill after the last chunk, verified by decode in its first step.

On prefill the draft's K/V of the block goes to slots that live only for the drafting: the free tail of the
request's last page, then whole pages that are given back at once. On decode, a step in which every request
is fresh skips the draft pass; in any other step the shipped rows replace the drafted ones. A shipped block
counts as drafted with probability one, so sampled requests stay exact too (as SGLang's
`pd_first_draft_proposal` does for EAGLE). Read against 0.5.23:
speculative/dspark_components/{dspark_worker_v2,dspark_draft,dspark_planner}.py.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sglang_spec_ext.disagg.block_rows import pack_blocks, unpack_blocks
from sglang_spec_ext.disagg.builders import FirstBlocks, ShippedBlock
from sglang_spec_ext.disagg.seam_setup import records_wanted
from sglang_spec_ext.disagg.session import current_session

if TYPE_CHECKING:
    import torch

FIRST_BLOCK = "spec_ext_first_block"


def around_prune(original: Any, draft_model: Any) -> None:
    """AROUND DSparkDraftModel.prune_to_ctx_kv_injection: keep the whole draft on a prefill server that drafts.

    SGLang drops the draft's MLPs, output projections and heads there, because it only writes draft K/V.
    """
    if not records_wanted():
        original(draft_model)


def after_forward_prefill(result: Any, worker: Any, batch: Any, *_args: Any, **_kwargs: Any) -> None:
    """AFTER DSparkWorkerV2._forward_prefill: leave the batch's first blocks on the draft input, packed.

    Rows whose prompt is not complete yet are drafted too and not used. Without room for the slots, or with
    a draft whose ranks must act together, there is no block and decode drafts as usual.
    """
    session = current_session()
    if session is None or session.role != "prefill" or batch.forward_mode.is_idle():
        return
    if worker.draft_model.markov_head is None:  # another draft family, which SGLang has pruned
        return
    if worker._draft_is_moe or worker._proposer.deferred_commit is not None or batch.seq_lens_cpu is None:
        return
    slots = BorrowedSlots.take(batch, worker.verify_num_draft_tokens)
    if slots is None:
        return
    try:
        proposal = _propose(worker, batch, result.next_draft_input)
        packed = pack_blocks(session.codec.schema, proposal.draft_block.draft_tokens, proposal.confidence)
        setattr(result.next_draft_input, FIRST_BLOCK, packed)
    finally:
        slots.give_back()


def _propose(worker: Any, batch: Any, draft_input: Any) -> Any:
    from sglang.srt.speculative.dspark_components.dspark_planner import alloc_verify_window

    bs, device = len(batch.seq_lens), worker.device
    window = alloc_verify_window(
        batch=batch,
        bs=bs,
        device=device,
        verify_num_draft_tokens=worker.verify_num_draft_tokens,
        block_pos_offsets=worker._block_pos_offsets,
        model_runner=worker.model_runner,
        seq_lens_cpu=batch.seq_lens_cpu,
    )
    with worker._draft_context():
        return worker._proposer.propose(
            batch=batch,
            draft_input=draft_input,
            verify_window=window,
            bs=bs,
            device=device,
            target_model=worker.target_worker.model_runner.model,
            sampling_info=None,
        )


class BorrowedSlots:
    """K/V slots for the `width` positions after each sequence, for the time of one draft pass."""

    def __init__(self, batch: Any, borrowed: "torch.Tensor", rows: list[int], seq_lens: list[int], width: int) -> None:
        self._batch, self._borrowed, self._rows = batch, borrowed, rows
        self._seq_lens, self._width = seq_lens, width

    @classmethod
    def take(cls, batch: Any, width: int) -> "BorrowedSlots | None":
        """Map the positions of every request, or return None when the pool or a row is too short."""
        import torch

        allocator, table = batch.token_to_kv_pool_allocator, batch.req_to_token_pool.req_to_token
        page = allocator.page_size
        rows = [int(req.kv.req_pool_idx) for req in batch.reqs]
        seq_lens = [int(length) for length in batch.seq_lens_cpu]
        if max(seq_lens) + width > table.shape[1]:
            return None
        tails = [-length % page for length in seq_lens]
        pages = [-(-max(0, width - tail) // page) for tail in tails]
        borrowed = allocator.alloc(sum(pages) * page) if sum(pages) else table.new_zeros(0)
        if borrowed is None:
            return None
        taken = 0
        for row, length, tail, count in zip(rows, seq_lens, tails, pages, strict=True):
            own = table[row, length - 1] + torch.arange(1, tail + 1, device=table.device)
            fresh = borrowed[taken : taken + count * page]
            table[row, length : length + width] = torch.cat([own, fresh])[:width].to(table.dtype)
            taken += count * page
        return cls(batch, borrowed, rows, seq_lens, width)

    def give_back(self) -> None:
        """Unmap the positions and free the pages; later work on the same stream may reuse them."""
        table = self._batch.req_to_token_pool.req_to_token
        for row, length in zip(self._rows, self._seq_lens, strict=True):
            table[row, length : length + self._width] = 0
        if self._borrowed.numel():
            self._batch.token_to_kv_pool_allocator.free(self._borrowed)


def due_blocks(reqs: Sequence[Any], *, num_draft_tokens: int) -> dict[int, ShippedBlock]:
    """Return {batch row: block of K tokens or more} of the requests whose first decode step this is."""
    # exact for the rows in question: their only output token is the anchor
    seq_lens = [len(req.origin_input_ids) + len(req.output_ids) - 1 for req in reqs]
    return FirstBlocks.take(reqs, seq_lens, num_draft_tokens=num_draft_tokens)


def around_propose(original: Any, proposer: Any, **arguments: Any) -> Any:
    """AROUND DraftBlockProposer.propose: shipped blocks replace drafted ones, or the whole draft pass."""
    batch, session = arguments["batch"], current_session()
    if session is None or session.role != "decode":
        return original(proposer, **arguments)
    blocks = due_blocks(batch.reqs, num_draft_tokens=proposer.gamma)
    if not blocks:
        return original(proposer, **arguments)
    if len(blocks) == len(batch.reqs) and proposer.deferred_commit is None and not proposer._dp_moe_sync:
        return _proposal_of(proposer, blocks, **arguments)
    proposal = original(proposer, **arguments)
    _replace_rows(proposal, blocks)
    return proposal


def unpacked(
    blocks: dict[int, ShippedBlock], tokens: int, device: Any
) -> tuple["torch.Tensor", "torch.Tensor | None"]:
    """Return ids [n, tokens] and confidences [n, tokens] (None unless all have them), in row order."""
    session = current_session()
    assert session is not None
    ordered = [blocks[row] for row in sorted(blocks)]
    ids, confidence = unpack_blocks(
        session.codec.schema, [block.row for block in ordered], tokens=tokens, device=device
    )
    return ids.long(), confidence if all(block.has_confidence for block in ordered) else None


def _proposal_of(proposer: Any, blocks: dict[int, Any], **arguments: Any) -> Any:
    """Return a proposal made of shipped blocks alone; no draft pass runs."""
    from sglang.srt.speculative.dspark_components.dspark_draft import (
        DraftBlockResult,
        DraftProposal,
        resolve_draft_params,
    )

    bs, device = arguments["bs"], arguments["device"]
    ids, confidence = unpacked(blocks, proposer.gamma, device)
    block_ids = proposer.draft_block_ids_view(bs=bs, device=ids.device)
    if not arguments.get("anchor_prepared", False):
        block_ids[:, 0].copy_(arguments["draft_input"].bonus_tokens.view(-1))
    params = resolve_draft_params(sampling_info=arguments["sampling_info"], bs=bs, device=device)
    return DraftProposal(
        draft_block_ids=block_ids[:, : proposer.gamma].contiguous(),
        draft_block=DraftBlockResult(
            draft_tokens=ids,
            corrected_logits=None,
            greedy_mask=params.greedy_mask,
            temperatures=params.temperatures,
            greedy_draft=True,
        ),
        confidence=confidence if proposer.draft_model.confidence_head is not None else None,
    )


def _replace_rows(proposal: Any, blocks: dict[int, Any]) -> None:
    """Overwrite the shipped rows in place (a captured graph's outputs are read in place by the verify)."""
    import torch

    block = proposal.draft_block
    device = block.draft_tokens.device
    rows = torch.tensor(sorted(blocks), device=device)
    ids, confidence = unpacked(blocks, block.draft_tokens.shape[1], device)
    block.draft_tokens[rows] = ids.to(block.draft_tokens.dtype)
    if proposal.verify_ids is not None:
        proposal.verify_ids[rows, 1:] = ids.to(proposal.verify_ids.dtype)
    if block.corrected_logits is not None:  # a distribution with all its mass on the shipped token
        one_hot = torch.full_like(block.corrected_logits[rows], -torch.inf)
        block.corrected_logits[rows] = one_hot.scatter_(-1, ids.unsqueeze(-1), 0.0)
    if proposal.confidence is not None and confidence is not None:
        proposal.confidence[rows] = confidence.to(proposal.confidence.dtype)
