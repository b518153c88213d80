"""What a decode step should cost on a GPU that nobody has at hand: bytes over bandwidth or FLOP over FLOP/s.

A step reads the weights once and the K/V of every request, and computes 2 FLOP per active parameter and token; it
takes as long as the slower of the two. That is a plan, not a measurement: attention FLOP, communication and kernel
launches enter through `efficiency` and `overhead_s` alone. `spec-ext profile` measures the real thing.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec


class Gpu(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One GPU: peak figures, dense, and where they are published."""

    name: str
    bandwidth_bytes_s: float
    flop_s: float
    memory_bytes: float
    source: str


# BF16 tensor-core rates without sparsity; vendors print the doubled, sparse ones
_HOPPER = "datasheet, SXM column; half of the 1,979 TFLOPS printed with sparsity"
_BLACKWELL = "NVIDIA DGX B200 datasheet / 8 (64 TB/s, 1,440 GB); Blackwell brief: 2.25 PFLOPS dense BF16 at 1,000 W"
PRESETS = {
    "H100": Gpu("H100 SXM", 3.35e12, 989.5e12, 80e9, f"NVIDIA H100 Tensor Core GPU {_HOPPER}"),
    "H200": Gpu("H200 SXM", 4.8e12, 989.5e12, 141e9, f"NVIDIA H200 Tensor Core GPU {_HOPPER}"),
    "B200": Gpu("B200 HGX", 8.0e12, 2250e12, 180e9, _BLACKWELL),
}


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The target. With experts, `active_params` counts what one token computes with; all weights are read."""

    params: float
    bytes_per_param: float
    kv_bytes_per_token: float
    active_params: float | None = None


class Draft(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The draft: one pass for a block, or one pass for each token."""

    drafting: Literal["block", "serial"]
    params: float
    bytes_per_param: float
    max_k: int
    acceptance: float | list[float]  # chance of position 1, 2, ... given that all before it were accepted


class Efficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shares of the peak figures that real kernels reach."""

    bandwidth: float = 0.75
    flop: float = 0.55
    memory: float = 0.9  # share of the memory that weights and K/V may take


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Seconds of a step of one replica on `gpus` GPUs, whose bandwidth, FLOP/s and memory add up."""

    gpu: Gpu
    gpus: int
    model: Model
    draft: Draft
    efficiency: Efficiency
    context_len: int
    overhead_s: float

    def _seconds(self, read_bytes: float, flop: float) -> float:
        bandwidth = self.gpus * self.gpu.bandwidth_bytes_s * self.efficiency.bandwidth
        return max(read_bytes / bandwidth, flop / (self.gpus * self.gpu.flop_s * self.efficiency.flop))

    def verify_s(self, tokens: int, batch: int) -> float:
        """Seconds of a target pass over `tokens` tokens of `batch` requests."""
        model = self.model
        kv_bytes = model.kv_bytes_per_token * self.context_len * batch
        active = model.params if model.active_params is None else model.active_params
        return self._seconds(model.params * model.bytes_per_param + kv_bytes, 2.0 * active * tokens)

    def draft_s(self, k: int, batch: int) -> float:
        """Seconds of drafting; a block drafter always makes its whole block, and K = 0 drafts nothing."""
        if not k:
            return 0.0
        draft = self.draft
        weights = draft.params * draft.bytes_per_param
        if draft.drafting == "block":
            return self._seconds(weights, 2.0 * draft.params * batch * (draft.max_k + 1))
        return k * self._seconds(weights, 2.0 * draft.params * batch)

    def expected_tokens(self, k: int) -> float:
        """Tokens that one request gets from a step, bonus included."""
        rates = self.draft.acceptance
        survival, total = 1.0, 1.0
        for j in range(k):
            survival *= rates[j] if isinstance(rates, list) else rates
            total += survival
        return total

    def tok_s(self, k: int, batch: int) -> float:
        """Output tokens per second of one replica with `batch` requests in flight."""
        seconds = self.draft_s(k, batch) + self.verify_s(batch * (k + 1), batch) + self.overhead_s
        return batch * self.expected_tokens(k) / seconds

    def largest_batch(self) -> int:
        """Requests whose K/V fit beside the weights; 0 or less when the weights alone do not."""
        room = self.gpus * self.gpu.memory_bytes * self.efficiency.memory
        room -= self.model.params * self.model.bytes_per_param + self.draft.params * self.draft.bytes_per_param
        return int(room // (self.model.kv_bytes_per_token * (self.context_len + self.draft.max_k + 1)))
