"""What this scheduler runs, as a Capability, read from SGLang's own state.

K is `speculative_num_draft_tokens` - 1 for every algorithm (SGLang counts the root, or the block's anchor),
and the largest tier where it may change at run time.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from sglang_spec_ext.disagg.digest import checkpoint_digest
from sglang_spec_ext.disagg.handshake import BLOCK_ALGORITHMS, EAGLE_ALGORITHMS, Capability, StockRows

SUPPORTED_ALGORITHMS = (*EAGLE_ALGORITHMS, *BLOCK_ALGORITHMS)


def unsupported_reason() -> str | None:
    """Return why no record can travel from or to this process's scheduler, or None."""
    from sglang.srt.environ import envs
    from sglang.srt.runtime_context import get_disagg, get_parallel, get_spec

    pp_size = get_parallel().pp_size
    disagg, algorithm = get_disagg(), (get_spec().speculative_algorithm or "").upper()
    if disagg.disaggregation_mode == "null":
        return "the server is not disaggregated"
    if algorithm not in SUPPORTED_ALGORITHMS:
        supported = ", ".join(SUPPORTED_ALGORITHMS)
        return f"--speculative-algorithm is {algorithm or 'not set'}, records exist for {supported}"
    if pp_size > 1:
        return f"--pp-size is {pp_size}, records need the draft on the rank that sends: use 1"
    if envs.SGLANG_RUST_SERVER.get():
        return "SGLANG_RUST_SERVER replaces the bootstrap server that carries the handshake: unset it"
    return None


def capability_of(scheduler: Any, buffers: Any, *, transport: str) -> Capability:
    """Return the capability of a scheduler whose MetadataBuffers have just been made."""
    from sglang.srt.runtime_context import get_spec, max_speculative_num_draft_tokens

    spec = get_spec()
    algorithm = spec.speculative_algorithm.upper()
    is_eagle = algorithm in EAGLE_ALGORITHMS
    levels = spec.speculative_num_steps if spec.enable_multi_layer_eagle else 1
    hidden = buffers.output_hidden_states
    return Capability(
        algorithm=algorithm,
        draft_digest=_draft_digest(scheduler, spec),
        num_draft_tokens=max_speculative_num_draft_tokens() - 1,
        topk_entries=spec.speculative_eagle_topk * levels if is_eagle else 0,
        hidden_width=hidden.shape[1] if is_eagle else 0,
        hidden_dtype=dtype_name(hidden.dtype),
        tap_layers=_tap_layers(scheduler),
        vocab_size=scheduler.model_config.vocab_size,
        transport=transport,
    )


def stock_rows_of(buffers: Any, pointers: list[int], item_lens: list[int]) -> StockRows:
    """Return the lengths of SGLang's own rows and the place of the hidden row among them."""
    return StockRows(row_bytes=tuple(item_lens), hidden_index=pointers.index(buffers.output_hidden_states.data_ptr()))


def dtype_name(dtype: Any) -> str:
    """Return the schema's name of a torch dtype."""
    return str(dtype).removeprefix("torch.")


def _tap_layers(scheduler: Any) -> tuple[int, ...]:
    config = scheduler.tp_worker.model_runner.spec_aux_config
    layers = config.dflash_target_layer_ids or config.eagle_aux_hidden_state_layer_ids or ()
    return tuple(int(layer) for layer in layers)


def _draft_digest(scheduler: Any, spec: Any) -> str:
    """Return the draft checkpoint's digest; of name and configuration if it is no local directory."""
    path: str = spec.speculative_draft_model_path or scheduler.model_config.model_path
    if Path(path).is_dir():
        return checkpoint_digest(path)
    config = scheduler.tp_worker.model_runner.spec_aux_config.draft_model_config
    described = config.hf_config.to_dict() if config is not None else {}
    named = [path, spec.speculative_draft_model_revision, described]
    canonical = json.dumps(named, sort_keys=True, default=str).encode()
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
