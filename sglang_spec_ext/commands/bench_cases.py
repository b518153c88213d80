"""What `spec-ext bench kernels` runs: inputs of a real server's sizes and the implementations of each op.

An implementation binds one set of inputs and returns the call to time, which returns a dictionary of tensors;
the twin's are the truth that all others are compared with.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from sglang_spec_ext.commands import bench_peers
from sglang_spec_ext.kernels.chain_accept_ref import chain_accept_ref
from sglang_spec_ext.kernels.margin_features_ref import margin_features_ref
from sglang_spec_ext.kernels.markov_step import GumbelKey
from sglang_spec_ext.kernels.markov_step_ref import markov_step_ref
from sglang_spec_ext.kernels.record_pack_ref import record_pack_ref, record_unpack_ref
from sglang_spec_ext.kernels.row_layout import FieldLayout, RowLayout
from sglang_spec_ext.kernels.survival_plan_ref import survival_plan_ref

Inputs = dict[str, Any]
Outputs = dict[str, torch.Tensor]
# binds one set of inputs, returns what is timed
Implementation = Callable[[Inputs], Callable[[], Outputs]]

# Probabilities are multiples of this, so that float32 sums are exact in any order (cases.py).
_GRAIN = 2.0**-22


@dataclass(frozen=True, kw_only=True)
class Case:
    """One op at one size."""

    op: str
    sizes: dict[str, int | str]
    make: Callable[[int], Inputs]  # seed -> inputs
    implementations: dict[str, Implementation]  # "twin" is the truth, "ours" the subject
    bytes_moved: int  # least traffic of the op
    compiled: bool = False  # time torch.compile of the twin as well
    # share of integer entries that may differ: a draw at the edge of a float32 CDF
    slack: dict[str, float] | None = None


def all_cases(device: str, *, dry_run: bool) -> Iterator[Case]:
    """Yield every case; a dry run takes the smallest sizes that still have several blocks."""
    plan_sizes = [(3, 5)] if dry_run else [(1, 7), (64, 7), (512, 5), (512, 7), (512, 15), (1024, 15)]
    for num_requests, gamma in plan_sizes:
        yield survival_plan_case(device, num_requests, gamma)
    margin_sizes = [(3, 5003)] if dry_run else [(8, 151_936), (512, 32_000), (512, 128_256), (4096, 151_936)]
    for num_rows, vocab_size in margin_sizes:
        yield margin_features_case(device, num_rows, vocab_size)
    markov_sizes = [(3, 307)] if dry_run else [(1, 151_936), (32, 32_000), (64, 151_936), (512, 128_256)]
    for num_requests, vocab_size in markov_sizes:
        for noise in ("greedy", "philox"):
            yield markov_step_case(device, num_requests, vocab_size, noise)
    accept_sizes = [(3, 5003)] if dry_run else [(1, 151_936), (64, 32_000), (64, 128_256), (256, 151_936)]
    for num_requests, vocab_size in accept_sizes:
        for mode in ("greedy", "target_only", "rejection"):
            yield chain_accept_case(device, num_requests, vocab_size, mode)
    record_sizes = [(3, 48)] if dry_run else [(1, 4096), (64, 4096), (512, 4096), (512, 7168)]
    for num_requests, hidden_width in record_sizes:
        yield record_pack_case(device, num_requests, hidden_width)
        yield record_unpack_case(device, num_requests, hidden_width)


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def survival_plan_case(device: str, num_requests: int, gamma: int) -> Case:
    """Half of all positions wanted."""
    from sglang_spec_ext.kernels.survival_plan_triton import survival_plan_triton

    def make(seed: int) -> Inputs:
        shape = (num_requests, gamma)
        return {
            "confidences": torch.rand(shape, generator=_generator(device, seed), device=device) ** 0.3,
            "budget": num_requests * gamma // 2,
        }

    def plan(implementation: Callable[..., Any]) -> Implementation:
        def call(inputs: Inputs) -> Outputs:
            result = implementation(inputs["confidences"], inputs["budget"], caps=None)
            return {"verify_lens": result.verify_lens, "offsets": result.offsets}

        return lambda inputs: lambda: call(inputs)

    return Case(
        op="survival_plan",
        sizes={"R": num_requests, "G": gamma},
        make=make,
        implementations={
            "ours": plan(survival_plan_triton),
            "twin": plan(survival_plan_ref),
            **bench_peers.survival_plan(gamma),
        },
        bytes_moved=4 * (num_requests * gamma + 2 * num_requests + 1),
        compiled=num_requests == 512 and gamma == 7,
    )


def margin_features_case(device: str, num_rows: int, vocab_size: int) -> Case:
    """bfloat16 logits, as a draft model leaves them."""
    from sglang_spec_ext.kernels.margin_features_triton import margin_features_triton

    def make(seed: int) -> Inputs:
        logits = torch.randn(num_rows, vocab_size, generator=_generator(device, seed), device=device) * 3
        return {"logits": logits.bfloat16()}

    def features(implementation: Callable[..., Any]) -> Implementation:
        def call(inputs: Inputs) -> Outputs:
            result = implementation(inputs["logits"])
            return {"ids": result.top_ids, "margins": result.margins, "log_sum_exps": result.log_sum_exps}

        return lambda inputs: lambda: call(inputs)

    return Case(
        op="margin_features",
        sizes={"N": num_rows, "V": vocab_size},
        make=make,
        implementations={"ours": features(margin_features_triton), "twin": features(margin_features_ref)},
        bytes_moved=num_rows * (2 * vocab_size + 16),
        compiled=vocab_size == 128_256,
    )


def markov_step_case(device: str, num_requests: int, vocab_size: int, noise: str) -> Case:
    """Rank 256, bfloat16 weights and base logits; bias exact in bfloat16, so that products round alike."""
    from sglang_spec_ext.kernels.markov_step_triton import markov_step_triton

    rank = 256
    # the interpreter multiplies bfloat16 by its bit patterns
    half = torch.float16 if device == "cpu" else torch.bfloat16

    def make(seed: int) -> Inputs:
        generator = _generator(device, seed)

        def small(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=generator, device=device).to(half)

        base = torch.randn(num_requests, vocab_size, generator=generator, device=device) * 3
        # base logits differ in every row's maximum, which ties between exact biases would not
        inputs: Inputs = {
            "base_logits": base.float(),
            "prev_tokens": torch.randint(0, 64, (num_requests,), generator=generator, device=device),
            "w1": small(64, rank),
            "w2": small(vocab_size, rank),
            "temperatures": None,
            "gumbel": None,
            "logits_out": None,
        }
        if noise == "philox":
            inputs["temperatures"] = torch.full((num_requests,), 0.8, device=device)
            inputs["gumbel"] = GumbelKey(key=7, offset=torch.tensor([seed], device=device), step=1)
        return inputs

    def step(implementation: Callable[..., Any]) -> Implementation:
        def call(inputs: Inputs) -> Outputs:
            result = implementation(**inputs)
            return {"tokens": result.tokens, "margins": result.margins, "log_probs": result.log_probs}

        return lambda inputs: lambda: call(inputs)

    return Case(
        op="markov_step",
        sizes={"R": num_requests, "V": vocab_size, "r": rank, "noise": noise},
        make=make,
        implementations={
            "ours": step(markov_step_triton),
            "twin": step(markov_step_ref),
            **bench_peers.markov_step(),
        },
        bytes_moved=2 * vocab_size * rank + 4 * num_requests * vocab_size,
        compiled=num_requests == 64,
        slack={"tokens": 0.02},
    )


def chain_accept_case(device: str, num_requests: int, vocab_size: int, mode: str) -> Case:
    """K = 7, dense; about three quarters of the drafts are the target's favourite."""
    from sglang_spec_ext.kernels.chain_accept_triton import chain_accept_triton

    num_drafts = 7

    def rows(count: int, generator: torch.Generator) -> torch.Tensor:
        weights = torch.rand(count, vocab_size, generator=generator, device=device) ** 16
        counts = (weights / weights.sum(1, keepdim=True) / _GRAIN).floor_()
        counts[:, 0] += 1 / _GRAIN - counts.sum(1, dtype=torch.float64).float()
        return counts.mul_(_GRAIN)

    def make(seed: int) -> Inputs:
        generator = _generator(device, seed)
        p = rows(num_requests * (num_drafts + 1), generator)
        favourite = p.argmax(1).view(num_requests, -1)[:, :num_drafts]
        coins = torch.rand(num_requests, num_drafts + 1, generator=generator, device=device)
        drafts = torch.where(coins[:, 1:] < 0.75, favourite, 1)
        inputs: Inputs = dict.fromkeys(
            (
                "target_ids",
                "target_probs",
                "draft_probs",
                "uniforms",
                "final_uniforms",
                "row_starts",
                "verify_lens",
            )
        )
        inputs |= {"drafts": drafts, "mode": mode}
        if mode == "greedy":
            return inputs | {"target_ids": p.argmax(1)}
        inputs |= {
            "target_probs": p,
            "uniforms": coins[:, :num_drafts].contiguous(),
            "final_uniforms": coins[:, num_drafts].contiguous(),
        }
        if mode == "rejection":
            q = rows(num_requests * num_drafts, generator)
            inputs["draft_probs"] = q.view(num_requests, num_drafts, vocab_size)
        return inputs

    def accept(implementation: Callable[..., Any]) -> Implementation:
        def call(inputs: Inputs) -> Outputs:
            result = implementation(**inputs)
            return {"num_accepted": result.num_accepted, "bonus": result.bonus}

        return lambda inputs: lambda: call(inputs)

    row_bytes = {"greedy": 8, "target_only": 4 * vocab_size, "rejection": 8 * vocab_size}[mode]
    return Case(
        op="chain_accept",
        sizes={"R": num_requests, "K": num_drafts, "V": vocab_size, "mode": mode},
        make=make,
        implementations={
            "ours": accept(chain_accept_triton),
            "twin": accept(chain_accept_ref),
            **bench_peers.chain_accept(mode),
        },
        bytes_moved=num_requests * (row_bytes + 16 * num_drafts),
        compiled=num_requests == 64 and vocab_size == 128_256,
        slack={"bonus": 0.02},
    )


def _pd_layout(hidden_width: int) -> RowLayout:
    fields, offset = [], 64
    for name, width, dtype in (
        ("hidden", hidden_width, torch.bfloat16),
        ("topk_p", 8, torch.float32),
        ("topk_index", 8, torch.int64),
        ("block_ids", 16, torch.int32),
        ("block_confidence", 16, torch.float32),
    ):
        fields.append(FieldLayout(name, offset, width, dtype))
        offset += -(-fields[-1].nbytes // 64) * 64
    return RowLayout(row_bytes=offset, fields=tuple(fields), reserved_bytes=64)


def _record_inputs(device: str, num_requests: int, layout: RowLayout, seed: int) -> Inputs:
    generator = _generator(device, seed)

    def scattered(field: FieldLayout) -> torch.Tensor:
        shape = (8 * num_requests, field.width)
        return torch.randint(-99, 99, shape, generator=generator, device=device).to(field.dtype)

    index = torch.randperm(8 * num_requests, generator=generator, device=device)[:num_requests]
    return {
        "rows": torch.zeros((2 * num_requests, layout.row_bytes), dtype=torch.uint8, device=device),
        "slots": torch.randperm(2 * num_requests, generator=generator, device=device)[:num_requests],
        "sources": {field.name: scattered(field) for field in layout.fields},
        "source_rows": {field.name: index for field in layout.fields},
    }


def record_pack_case(device: str, num_requests: int, hidden_width: int) -> Case:
    """One hidden row, top-k 8 and a block of 16 per request."""
    from sglang_spec_ext.kernels.record_pack_triton import record_pack_triton

    layout = _pd_layout(hidden_width)

    def pack(implementation: Callable[..., Any]) -> Implementation:
        def call(inputs: Inputs) -> Outputs:
            rows, arguments = (
                inputs["rows"],
                {name: inputs[name] for name in ("slots", "sources", "source_rows")},
            )
            implementation(rows, layout, **arguments, counts={})
            return {"rows": rows}

        return lambda inputs: lambda: call(inputs)

    return Case(
        op="record_pack",
        sizes={"R": num_requests, "hidden": hidden_width},
        make=lambda seed: _record_inputs(device, num_requests, layout, seed),
        implementations={"ours": pack(record_pack_triton), "twin": pack(record_pack_ref)},
        bytes_moved=2 * num_requests * (layout.row_bytes - layout.reserved_bytes),
        compiled=num_requests == 512 and hidden_width == 4096,
    )


def record_unpack_case(device: str, num_requests: int, hidden_width: int) -> Case:
    """Every field of the same rows."""
    from sglang_spec_ext.kernels.record_pack_triton import record_unpack_triton

    layout = _pd_layout(hidden_width)

    def make(seed: int) -> Inputs:
        inputs = _record_inputs(device, num_requests, layout, seed)
        record_pack_ref(
            inputs["rows"],
            layout,
            slots=inputs["slots"],
            sources=inputs["sources"],
            source_rows=inputs["source_rows"],
            counts={},
        )
        return {"rows": inputs["rows"], "slots": inputs["slots"]}

    def unpack(implementation: Callable[..., Any]) -> Implementation:
        def call(inputs: Inputs) -> Outputs:
            fields, word_bytes = layout.fields, layout.word_bytes
            got: Outputs = implementation(
                inputs["rows"], fields, slots=inputs["slots"], word_bytes=word_bytes
            )
            return got

        return lambda inputs: lambda: call(inputs)

    return Case(
        op="record_unpack",
        sizes={"R": num_requests, "hidden": hidden_width},
        make=make,
        implementations={"ours": unpack(record_unpack_triton), "twin": unpack(record_unpack_ref)},
        bytes_moved=2 * num_requests * (layout.row_bytes - layout.reserved_bytes),
        compiled=num_requests == 512 and hidden_width == 4096,
    )
