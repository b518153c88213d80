"""Where a worker's cost table comes from: a file that the user names, the last start, or a new profile."""

import hashlib
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sglang_spec_ext.config import ConfigError
from sglang_spec_ext.control.cost import CostTable
from sglang_spec_ext.control.cost_files import load_cost_table, save_cost_table
from sglang_spec_ext.control.curve import CostTableError
from sglang_spec_ext.models.cache import home
from sglang_spec_ext.workers.profile import Profiler, Report, fingerprint_of

logger = logging.getLogger(__name__)


def prepare(scheduler: Any) -> None:
    """Give the worker its cost table before it serves; without one it runs the fixed width and says so."""
    worker = scheduler.draft_worker
    loop = getattr(worker, "spec_ext", None)
    if loop is None:
        return
    chosen = worker.spec_ext_config
    unserved = worker.spec_ext_unserved()
    if unserved is not None:
        worker.spec_ext_profile = f"not run: {unserved}"
        return
    if chosen.profile == "off":
        worker.spec_ext_profile = "off: --spec-ext-profile off"
        return
    tiers = loop.controller.settings.tiers
    fingerprint = fingerprint_of(scheduler, context_len=chosen.profile_context, tiers=tiers)
    if chosen.profile != "auto":
        table, source = _named(Path(chosen.profile), fingerprint), chosen.profile
    else:
        found = _kept_or_measured(scheduler, fingerprint, chosen.profile_context)
        if found is None:
            return
        table, source = found
    loop.controller.price(table)
    worker.spec_ext_profile = source


def path_for(fingerprint: dict[str, str]) -> Path:
    """Return where a table with this fingerprint is kept."""
    text = json.dumps(fingerprint, sort_keys=True)
    return home() / "profiles" / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.json"


def _named(path: Path, fingerprint: dict[str, str]) -> CostTable:
    try:
        return load_cost_table(path, fingerprint)
    except OSError as error:
        raise ConfigError(
            f"--spec-ext-profile {path}: cannot be read ({error.strerror}); give auto, off or a cost table file"
        ) from error
    except CostTableError as error:
        raise ConfigError(f"--spec-ext-profile {path}: {error}") from error


def _kept_or_measured(
    scheduler: Any, fingerprint: dict[str, str], context_len: int
) -> tuple[CostTable, str] | None:
    worker = scheduler.draft_worker
    ranks = worker.spec_ext.ranks
    path = path_for(fingerprint)
    kept = ranks.first(_kept(path, fingerprint))
    if kept is not None:
        return kept, f"kept from an earlier start: {path}"
    try:
        with _progress(ranks.is_first) as report:
            table = Profiler(scheduler, context_len=context_len, report=report).measure(fingerprint)
    except Exception as error:  # whatever went wrong, the server must start and say so
        logger.exception("sglang-spec-ext: profiling failed; the fixed width runs")
        worker.spec_ext_profile = f"failed: {type(error).__name__}: {error}"
        return None
    return table, f"measured at this start: {_keep(table, path) if ranks.is_first else path}"


def _keep(table: CostTable, path: Path) -> str:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_cost_table(table, path)
    except OSError as error:  # a read-only home costs the next start a profile, and this one nothing
        return f"not kept ({error})"
    return str(path)


def _kept(path: Path, fingerprint: dict[str, str]) -> CostTable | None:
    if not path.exists():
        return None
    try:
        return load_cost_table(path, fingerprint)
    except CostTableError as error:
        logger.warning("sglang-spec-ext: %s; measuring again", error)
        return None


@contextmanager
def _progress(shown: bool) -> Iterator[Report]:
    """Show a bar on a terminal and a line in a log."""
    if not shown:
        yield lambda *_: None
        return
    from rich.console import Console
    from rich.progress import Progress

    console = Console(file=sys.stderr)
    if not console.is_terminal:
        logger.info(
            "sglang-spec-ext: measuring what a step costs (at most a minute; kept for the next start)"
        )
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("spec-ext profile", total=None)

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=f"spec-ext profile: {what}")

        yield report
