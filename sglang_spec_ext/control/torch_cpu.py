"""torch's CPU draws and float32 sums without torch, so that tables made with it can be computed anywhere.

torch's CPU generator is MT19937, seeded as NumPy's legacy generator is. `rand` keeps the low 24 bits of one
32-bit output per float32; `randperm` is a Fisher-Yates shuffle with one output modulo the places left.
Source: ATen `CPUGeneratorImpl`, `uniform_real_distribution`, `randperm_cpu`.

Where two results are equal in exact arithmetic, an argmax follows the rounding of the sum, so the order of
the additions is part of the result. `vecmat` adds as the BLAS of torch's x86 wheels does; the order was
read off the sizes of partial sums that cancellation exposes, and agrees with torch bit by bit.
"""

import numpy as np
from numpy.typing import NDArray


class TorchRandom:
    """The stream that `torch.manual_seed(seed)` starts on the CPU."""

    def __init__(self, seed: int) -> None:
        self._stream = np.random.RandomState(seed)

    def _words(self, count: int) -> NDArray[np.uint32]:
        return self._stream.randint(0, 1 << 32, size=count, dtype=np.uint32)

    def rand(self, *shape: int) -> NDArray[np.float32]:
        """Return `torch.rand(*shape)` in float32."""
        words = self._words(int(np.prod(shape)))
        return ((words & 0xFFFFFF).astype(np.float32) * np.float32(2.0**-24)).reshape(shape)

    def randperm(self, n: int) -> NDArray[np.int64]:
        """Return `torch.randperm(n)`, for n far below 2**32 / 20, where torch draws one word per place."""
        order = np.arange(n, dtype=np.int64)
        for place, word in enumerate(self._words(n - 1).tolist() if n > 1 else []):
            other = place + word % (n - place)
            order[place], order[other] = order[other], order[place]
        return order


def vecmat(vector: NDArray[np.float32], matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return `vector @ matrix` ([N] by [N, M], float32, N a multiple of 8) as torch adds it up."""
    rows = len(vector)
    if rows % 8:
        raise ValueError(
            f"vector: its length must be a multiple of 8, got {rows}; the order is known for those"
        )
    zero = np.zeros(matrix.shape[1], np.float32)

    def fused(row: int, addend: NDArray[np.float32]) -> NDArray[np.float32]:
        # a float32 product is exact in float64, so one rounding follows the sum as in a fused multiply-add
        exact = np.float64(vector[row]) * matrix[row].astype(np.float64) + addend
        rounded: NDArray[np.float32] = exact.astype(np.float32)
        return rounded

    total = zero
    for row in range(0, rows, 8):
        total = fused(row + 4, fused(row + 6, total))
        odd = fused(row + 5, fused(row + 7, zero))
        first = fused(row, fused(row + 2, zero)) + fused(row + 1, fused(row + 3, zero))
        total = (total + odd) + first
    return total
