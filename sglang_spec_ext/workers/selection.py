"""Which worker class serves an algorithm, and the proof that it does.

Hooks around `SpeculativeAlgorithm.create_worker` and after `Scheduler.get_init_info`.
"""

from collections.abc import Callable
from typing import Any

from sglang_spec_ext import __version__, flags
from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.launch import PROOF_KEY

ADAPTIVE_ALGORITHMS = ("EAGLE", "EAGLE3", "DFLASH", "DSPARK")


class UnsupportedAlgorithmError(SpecExtError):
    """The extension was asked for with an algorithm that it does not extend."""


def create_worker(original: Callable[..., Any], algorithm: Any, server_args: Any) -> Any:
    """Return our subclass of the built-in worker class."""
    base = original(algorithm, server_args)
    chosen = flags.active_config()
    if chosen is None:
        return base
    if algorithm.name not in ADAPTIVE_ALGORITHMS:
        raise UnsupportedAlgorithmError(
            f"--spec-ext-mode needs --speculative-algorithm to be one of {', '.join(ADAPTIVE_ALGORITHMS)}, "
            f"got {algorithm.name}; leave --spec-ext-mode out"
        )
    from sglang_spec_ext.workers.extended import extend

    if chosen.pd_transport != "off":
        from sglang_spec_ext.workers import handoff

        handoff.ask_for_records(chosen)
    return extend(base)


def add_proof(info: dict[str, Any], scheduler: Any) -> dict[str, Any]:
    """Tell the launching process, and `/server_info`, what this scheduler runs."""
    chosen = flags.active_config()
    if chosen is not None:
        from sglang_spec_ext.workers.cost_source import prepare

        prepare(scheduler)
        worker = getattr(scheduler, "draft_worker", None)
        _switch_metrics_on(scheduler)
        info[PROOF_KEY] = {
            "version": __version__,
            "mode": chosen.mode,
            "worker": None if worker is None else type(worker).__name__,
            "profile": getattr(worker, "spec_ext_profile", None),
        }
    return info


def _switch_metrics_on(scheduler: Any) -> None:
    context = scheduler.metrics_collector_context
    loop = getattr(scheduler.draft_worker, "spec_ext", None)
    if loop is None or context.collector is None or not context.current_scheduler_metrics_enabled:
        return
    from sglang_spec_ext.metrics import PrometheusMetrics

    loop.metrics = PrometheusMetrics(context.collector.labels)
    if scheduler.draft_worker.spec_ext_config.pd_transport != "off":
        from sglang_spec_ext.workers import handoff

        handoff.switch_metrics_on(context.collector.labels)
