"""Random arguments for each op, built so that every implementation must return the same integers.

The tests and the correctness check of `spec-ext bench kernels` both draw from here. Probabilities are
multiples of 2**-12, so their sums are exact in float32 in any order and a CDF has no rounding. Tensors are
views of wider buffers whose unused parts hold NaN: a kernel that reads past its row shows it.
"""

from typing import Any

import torch
from sglang_spec_ext.kernels.markov_step import GumbelKey
from sglang_spec_ext.kernels.row_layout import FieldLayout, RowLayout

GRAIN = 4096


def dyadic_rows(num_rows: int, vocab_size: int, *, generator: torch.Generator) -> torch.Tensor:
    """[num_rows, V] float32 rows of multiples of 1/4096 that sum to one, with many zeros."""
    weights = torch.rand(num_rows, vocab_size, generator=generator) ** 4
    weights[torch.rand(num_rows, vocab_size, generator=generator) < 0.3] = 0.0
    weights[:, vocab_size // 2] += 1e-3
    counts = (weights / weights.sum(1, keepdim=True) * GRAIN).floor()
    counts[:, vocab_size // 2] += GRAIN - counts.sum(1)
    return counts / GRAIN


def chain_case(
    num_requests: int, num_drafts: int, vocab_size: int, *, mode: str, layout: str, seed: int
) -> dict[str, Any]:
    """Arguments of `chain_accept` for one call; layout is "dense", "capped" or "ragged"."""
    generator = torch.Generator().manual_seed(seed)

    def integers(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=generator)

    width = num_drafts + 1
    case: dict[str, Any] = {"mode": mode, "row_starts": None, "verify_lens": None}
    num_rows = num_requests * width
    if layout != "dense":
        case["verify_lens"] = integers(width + 1, num_requests).int()  # 0 marks padding
    if layout == "ragged":
        lens = case["verify_lens"].long()
        case["row_starts"] = (lens.cumsum(0) - lens + 2).int()
        num_rows = int(lens.sum()) + 4
    p = dyadic_rows(num_rows, vocab_size, generator=generator)
    starts = torch.arange(num_requests) * width if case["row_starts"] is None else case["row_starts"].long()
    rows = (starts[:, None] + torch.arange(num_drafts)).clamp(max=num_rows - 1)
    likely = p.argmax(1)[rows]
    unlikely = integers(vocab_size + 2, num_requests, num_drafts) - 1  # some outside the vocabulary
    keep = torch.rand(num_requests, num_drafts, generator=generator) < 0.75
    drafts = torch.where(keep, likely, unlikely)
    wide_drafts = torch.full((num_requests, num_drafts + 3), 1_000_003)
    wide_drafts[:, :num_drafts] = drafts
    case["drafts"] = wide_drafts[:, :num_drafts]
    if mode == "greedy":
        return case | {"target_ids": p.argmax(1)}
    pitched = torch.full((num_rows, vocab_size + 5), float("nan"))
    pitched[:, :vocab_size] = p
    coins = integers(GRAIN, num_requests, num_drafts + 1).float() / GRAIN
    case |= {
        "target_probs": pitched[:, :vocab_size],
        "uniforms": coins[:, :num_drafts],
        "final_uniforms": coins[:, num_drafts].contiguous(),
    }
    if mode == "rejection":
        q = torch.full((num_requests, num_drafts + 1, vocab_size + 3), float("nan"))
        flat = dyadic_rows(num_requests * num_drafts, vocab_size, generator=generator)
        q[:, :num_drafts, :vocab_size] = flat.view(num_requests, num_drafts, vocab_size)
        case["draft_probs"] = q[:, :num_drafts, :vocab_size]
    return case


def confidence_case(num_requests: int, num_positions: int, *, seed: int) -> dict[str, Any]:
    """Arguments of `survival_plan`: coarse confidences (many ties), bad rows, caps with padding requests."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_requests, num_positions + 3), float("nan"))
    steps = torch.randint(0, 5, (num_requests, num_positions), generator=generator)
    wide[:, :num_positions] = torch.tensor([0.0, 0.5, 0.75, 0.9, 1.0])[steps]
    confidences = wide[:, :num_positions]
    if num_positions:
        for row, bad in zip(range(3, num_requests, 5), (float("nan"), 1.5, -0.1, float("inf")), strict=False):
            confidences[row, row % num_positions] = bad
    caps = torch.randint(-1, num_positions + 2, (num_requests,), generator=generator).int()
    return {"confidences": confidences, "caps": caps}


def logits_case(num_rows: int, vocab_size: int, *, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """[num_rows, V] coarse logits (many ties), pitched; rows with NaN, one finite logit, none."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.full((num_rows, vocab_size + 7), float("nan"), dtype=dtype)
    logits = wide[:, :vocab_size]
    logits.copy_((torch.randn(num_rows, vocab_size, generator=generator) * 8).round() / 4)
    if num_rows > 4:
        logits[1, vocab_size // 3 :: 2] = float("nan")
        logits[2] = -float("inf")
        logits[3] = -float("inf")
        logits[3, vocab_size // 2] = 1.25
    return logits


def markov_case(
    num_requests: int, vocab_size: int, rank: int, *, dtype: torch.dtype, noise: str, seed: int
) -> dict[str, Any]:
    """Arguments of `markov_step` with exact biases; noise is "greedy", "given" or "philox"."""
    generator = torch.Generator().manual_seed(seed)

    def small(*shape: int) -> torch.Tensor:
        return torch.randint(-1, 2, shape, generator=generator).to(dtype)

    case: dict[str, Any] = {
        "base_logits": logits_case(num_requests, vocab_size, dtype=dtype, seed=seed),
        "prev_tokens": torch.randint(-1, 12, (num_requests,), generator=generator),
        "w1": small(11, rank),
        "w2": small(vocab_size, rank),
        "temperatures": None,
        "gumbel": None,
        "logits_out": torch.full((num_requests, vocab_size), float("nan")),
    }
    if noise == "greedy":
        return case | {"logits_out": None}
    case["temperatures"] = torch.tensor([0.7, 0.0, 1.0, 2.5]).repeat(num_requests)[:num_requests]
    if noise == "given":
        case["gumbel"] = -torch.empty(num_requests, vocab_size).exponential_(generator=generator).log()
    else:
        case["gumbel"] = GumbelKey(key=0x1234_5678_9ABC + seed, offset=torch.tensor([2**33 + 5]), step=3)
    return case


def record_layout(*, hidden_width: int, hidden_dtype: torch.dtype, topk: int, block: int) -> RowLayout:
    """A layout shaped like a PD record's: two hidden rows, top-k, block ids and confidences."""
    fields, offset = [], 64
    for name, width, dtype, entry_width in (
        ("hidden", 2 * hidden_width, hidden_dtype, hidden_width),
        ("topk_p", topk, torch.float32, 1),
        ("topk_index", topk, torch.int64, 1),
        ("block_ids", block, torch.int32, 1),
        ("block_confidence", block, torch.float32, 1),
    ):
        fields.append(FieldLayout(name, offset, width, dtype, max(entry_width, 1)))
        offset += -(-fields[-1].nbytes // 64) * 64
    return RowLayout(row_bytes=offset, fields=tuple(fields), reserved_bytes=64)


def record_case(layout: RowLayout, num_requests: int, *, seed: int) -> dict[str, Any]:
    """Arguments of `record_pack` but the rows: scattered, short, missing sources, counts, skipped slots."""
    generator = torch.Generator().manual_seed(seed)
    sources, source_rows, counts = {}, {}, {}
    for i, field in enumerate(layout.fields):
        entries = field.width // field.entry_width
        width = max(entries - i % 2, 0) * field.entry_width  # every other source is one entry short
        raw = torch.randint(-1000, 1000, (2 * num_requests + 1, width + 4), generator=generator)
        sources[field.name] = raw.to(field.dtype)[:, :width]
        source_rows[field.name] = torch.randperm(2 * num_requests + 1, generator=generator)[:num_requests]
        counts[field.name] = torch.randint(0, entries + 1, (num_requests,), generator=generator).int()
    first, second = layout.fields[0].name, layout.fields[1].name
    del source_rows[second], counts[first]
    if seed % 2:
        del sources[second], counts[second]
    slots = torch.randperm(num_requests + 3, generator=generator)[:num_requests]
    slots[4::5] = -1
    return {"slots": slots, "sources": sources, "source_rows": source_rows, "counts": counts}
