"""What several ranks on one machine need beside gloo.

Stands in for `distributed/parallel_state.py: reg_all_gather_into_tensor`, `distributed/bootstrap.py:
_check_tp_memory_balance` and the flag `model_executor/forward_batch_info.py: _is_cpu`.
"""

import torch
from sglang.srt.distributed import parallel_state

IS_CPU = True


def all_gather_into_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:  # noqa: A002
    """Gather `input` of every rank into `output`, in rank order, in place."""
    group = parallel_state._groups[group_name]()
    if group is None:
        raise RuntimeError(f"all_gather_into_tensor: group {group_name!r} has been destroyed")
    group._all_gather_into_tensor(output, input)


def skip_memory_balance(*, pre_model_load_memory: float, local_gpu_memory: float) -> None:
    """Leave out the comparison of free memory, in GiB, of this rank's device and the least of all ranks.

    On one machine both are the same memory, read at two times.
    """
