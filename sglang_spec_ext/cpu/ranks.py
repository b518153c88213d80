"""What several ranks on one machine need beside gloo.

Stands in for `distributed/parallel_state.py: reg_all_gather_into_tensor` and `reg_reduce_scatter_tensor`,
`distributed/bootstrap.py: _check_tp_memory_balance` and the flag `model_executor/forward_batch_info.py: _is_cpu`.
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


def reduce_scatter_tensor(output: torch.Tensor, input: torch.Tensor, group_name: str) -> None:  # noqa: A002
    """Sum `input` [ranks * n, ...] over the ranks and write this rank's part to `output` [n, ...].

    gloo has no reduce-scatter: all ranks get the whole sum and keep their part.
    """
    group = parallel_state._groups[group_name]()
    if group is None:
        raise RuntimeError(f"reduce_scatter_tensor: group {group_name!r} has been destroyed")
    total = input.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    output.copy_(total.view(group.world_size, *output.shape)[group.rank_in_group])


def skip_memory_balance(*, pre_model_load_memory: float, local_gpu_memory: float) -> None:
    """Leave out the comparison of free memory, in GiB, of this rank's device and the least of all ranks.

    On one machine both are the same memory, read at two times.
    """
