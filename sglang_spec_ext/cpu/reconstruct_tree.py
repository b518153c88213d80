"""Takes the place of SGLang's module of the same name, which imports a kernel library that needs libcuda.

Stands in for `sglang/kernels/ops/speculative/reconstruct_tree.py` (NGRAM).
"""

from sglang_spec_ext.cpu.trees import reconstruct_from_tree_mask as reconstruct_indices_from_tree_mask_func

__all__ = ["reconstruct_indices_from_tree_mask_func"]
