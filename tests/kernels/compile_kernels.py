"""Compile every Triton kernel for one CUDA capability on a machine without a GPU: `compile_kernels.py 90`.

Prints one line for each compilation: kernel, bytes of shared memory, bytes of machine code.
"""

import sys

import torch
import triton
from sglang_spec_ext.kernels.cases import (
    chain_case,
    confidence_case,
    logits_case,
    markov_case,
    record_case,
    record_layout,
)
from sglang_spec_ext.kernels.chain_accept_triton import chain_accept_triton
from sglang_spec_ext.kernels.margin_features_triton import margin_features_triton
from sglang_spec_ext.kernels.markov_step_triton import markov_step_triton
from sglang_spec_ext.kernels.record_pack_triton import record_pack_triton, record_unpack_triton
from sglang_spec_ext.kernels.survival_plan_triton import survival_plan_triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction


class NoDevice:
    """What the compiler asks of a driver."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """The GPU to compile for."""
        return self.target

    def get_current_device(self) -> int:
        """Any index."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Any handle."""
        return device


def compile_only() -> None:
    """Replace launching by compiling."""
    launch = JITFunction.run

    def run(self, *args, grid, warmup, **kwargs):
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        sys.stdout.write(f"{self.__name__} {kernel.metadata.shared} {len(kernel.asm['cubin'])}\n")
        return kernel

    JITFunction.run = run


def chain_accept() -> None:
    """All modes; dense, capped and ragged; a vocabulary of several blocks."""
    names = (
        "target_ids",
        "target_probs",
        "draft_probs",
        "uniforms",
        "final_uniforms",
        "row_starts",
        "verify_lens",
    )
    for mode, layout in (("greedy", "dense"), ("target_only", "capped"), ("rejection", "ragged")):
        case = dict.fromkeys(names) | chain_case(2, 7, 40_000, mode=mode, layout=layout, seed=0)
        chain_accept_triton(**case)


def survival_plan() -> None:
    """Small and largest batches, budget as a number and as a tensor."""
    for num_requests, num_positions in ((3, 5), (1024, 15)):
        case = confidence_case(num_requests, num_positions, seed=0)
        survival_plan_triton(case["confidences"], 20, caps=None)
        survival_plan_triton(case["confidences"], torch.tensor([20]), caps=case["caps"])


def margin_features() -> None:
    """All dtypes, several blocks."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        margin_features_triton(logits_case(2, 40_000, dtype=dtype, seed=0))


def markov_step() -> None:
    """Each kind of noise and dtype; one tile of rows and several."""
    for noise, num_requests, dtype in (
        ("greedy", 3, torch.float32),
        ("given", 70, torch.float16),
        ("philox", 20, torch.bfloat16),
    ):
        markov_step_triton(**markov_case(num_requests, 1000, 256, dtype=dtype, noise=noise, seed=0))


def record_pack() -> None:
    """Wide words and narrow ones."""
    for hidden_width, dtype in ((4096, torch.bfloat16), (129, torch.bfloat16), (7168, torch.float32)):
        layout = record_layout(hidden_width=hidden_width, hidden_dtype=dtype, topk=8, block=7)
        case = record_case(layout, 5, seed=0)
        rows = torch.zeros((8, layout.row_bytes), dtype=torch.uint8)
        record_pack_triton(rows, layout, **case)
        record_unpack_triton(rows, layout.fields, slots=case["slots"], word_bytes=layout.word_bytes)


if __name__ == "__main__":
    driver.set_active(NoDevice(int(sys.argv[1])))
    assert not triton.knobs.runtime.interpret
    compile_only()
    chain_accept()
    survival_plan()
    margin_features()
    markov_step()
    record_pack()
