"""SGLang's NIXL and Mooncake transfer back ends over host memory, for servers whose device is the CPU.

Stock 0.5.23 registers KV as device memory with NIXL, which UCX rejects for host pointers (nixl/conn.py),
and copies page indices through pinned memory and a CUDA event for Mooncake (prefill.py `_send_kv_chunk`)
and for the early send of a cached prefix. Each fix is a subclass or a detour of a few lines; on any other
device nothing changes.
"""

from functools import cache
from typing import Any


def after_get_kv_class(kv_class: Any, transfer_backend: Any, class_type: Any) -> Any:
    """AFTER disaggregation.utils.get_kv_class: return the class for host memory, None to keep it."""
    from sglang.srt.disaggregation.utils import KVClassType, TransferBackend

    if kv_class is None or not _on_cpu():
        return None
    if (transfer_backend, class_type) == (TransferBackend.MOONCAKE, KVClassType.SENDER):
        return _host_sender(kv_class)
    if (transfer_backend, class_type) == (TransferBackend.NIXL, KVClassType.MANAGER):
        return _host_manager(kv_class)
    return None


def around_early_send(original: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND maybe_send_cached_prefix_chunk: leave it to the ordinary send; the early one needs CUDA."""
    if not _on_cpu():
        original(scheduler, *args, **kwargs)


def _on_cpu() -> bool:
    from sglang.srt.runtime_context import get_device

    return bool(get_device().device == "cpu")


@cache
def _host_sender(base: type) -> type:
    return type(f"Host{base.__name__}", (base,), {"supports_host_tensor_indices": False})


@cache
def _host_manager(base: Any) -> type:
    class HostKVManager(base):  # type: ignore[misc]  # SGLang's class, known at run time
        def __init__(self, args: Any, *rest: Any, **named: Any) -> None:
            args.kv_data_mem_kinds = ["DRAM"] * len(args.kv_data_ptrs)
            super().__init__(args, *rest, **named)

    return HostKVManager
