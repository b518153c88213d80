"""The launching process: takes our flags out of SGLang's command line and demands proof from the schedulers."""

import argparse
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from sglang_spec_ext import __version__, flags
from sglang_spec_ext.config import ConfigError, SpecExtConfig
from sglang_spec_ext.control.ladder import LARGEST_K, LadderError, read_ladder
from sglang_spec_ext.cpu import selection
from sglang_spec_ext.errors import SpecExtError

PROOF_KEY = "spec_ext"
# SGLang loads a draft's confidence head, and captures graphs of several widths, in its mode `compact` alone
RAGGED_MODE = "SGLANG_RAGGED_VERIFY_MODE"


class NotActive(SpecExtError):
    """A scheduler was started with the extension and does not run it."""


def add_flags(result: None, parser: argparse.ArgumentParser) -> None:
    """After `ServerArgs.add_cli_args`: add ours."""
    flags.add_arguments(parser)


def take_flags(original: Callable[[type, argparse.Namespace], Any], cls: type, args: argparse.Namespace) -> Any:
    """Around `ServerArgs.from_cli_args`: export our values for the child processes."""
    chosen = flags.take(args)
    if chosen is not None and chosen.mode != "off":
        activate(
            chosen,
            algorithm=args.speculative_algorithm,
            disaggregation_mode=args.disaggregation_mode,
            attention_dp=args.enable_dp_attention,
        )
    return original(cls, args)


def activate(
    chosen: SpecExtConfig, *, algorithm: str | None, disaggregation_mode: str, attention_dp: bool
) -> None:
    """Export the configuration and install the hooks of an active extension in this process.

    `algorithm` is SGLang's; with DSPARK, ragged verification needs a mode of SGLang's that every process reads.
    Attention data parallelism runs uniform, and SGLang refuses that mode there. `disaggregation_mode` is SGLang's:
    null, prefill or decode. With null no record can travel, and none of the hooks for it are installed in any process.
    """
    from sglang_spec_ext.hook_install import install
    from sglang_spec_ext.hooks import ACTIVE_HOOKS, DRAFT_HOOKS, PD_HOOKS

    _require_a_platform()
    _check_ladder(chosen)
    if disaggregation_mode == "null":
        chosen = msgspec.structs.replace(chosen, pd_transport="off")
    flags.export(chosen)
    if chosen.verify == "ragged" and algorithm == "DSPARK" and not attention_dp:
        os.environ.setdefault(RAGGED_MODE, "compact")
    install((*DRAFT_HOOKS, *ACTIVE_HOOKS))
    if chosen.pd_transport != "off":
        install(PD_HOOKS)


@contextmanager
def ragged_mode_restored() -> Iterator[None]:
    """For the duration of a block `activate` may choose SGLang's ragged mode."""
    before = os.environ.get(RAGGED_MODE)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(RAGGED_MODE, None)


def _check_ladder(chosen: SpecExtConfig) -> None:
    """Refuse a ladder that cannot be used before anything is loaded; the draft's own K is checked later."""
    if chosen.ladder != "none":
        try:
            read_ladder(chosen.ladder, max_k=LARGEST_K)
        except LadderError as error:
            raise ConfigError(f"--spec-ext-ladder {error}") from error


def _require_a_platform() -> None:
    """Refuse to start where SGLang would find no device; its own failure does not say what to do."""
    import torch

    if os.environ.get("SGLANG_PLATFORM") or torch.accelerator.is_available():
        return
    raise NotActive(
        f"no accelerator was found and no platform is selected; to serve on the CPU set "
        f"SGLANG_PLATFORM={selection.PLATFORM_NAME} and pass --device cpu"
    )


def forward_proof(info: dict[str, Any], controller: Any) -> dict[str, Any]:
    """After `DataParallelController.get_init_info`: it proves what every scheduler behind it has proved."""
    proofs = [found.get(PROOF_KEY) for found in controller._scheduler_init_infos]
    if proofs and None not in proofs:
        info[PROOF_KEY] = next((proof for proof in proofs if proof["version"] != __version__), proofs[0])
    return info


def require_proof(infos: Sequence[Mapping[str, Any]], *args: Any, **kwargs: Any) -> None:
    """After the schedulers reported ready: each must have sent a proof of this version."""
    if flags.active_config() is None:
        return
    for rank, info in enumerate(infos):
        proof = info.get(PROOF_KEY)
        if proof is None:
            raise NotActive(
                f"scheduler {rank} started without sglang-spec-ext although --spec-ext-mode asked for it: the plugin "
                "failed to load in that process (its log has the reason; SGLANG_PLUGINS and SGLANG_PLATFORM can "
                "exclude it). Run `spec-ext doctor`."
            )
        if proof["version"] != __version__:
            raise NotActive(
                f"scheduler {rank} runs sglang-spec-ext {proof['version']}, the launcher {__version__}; install one"
            )
