"""What `spec-ext bench envelope` compares: servers, and the settings that are measured on them.

Each fixed K is that K pinned on a server of ours, so a fixed K and the controller differ in nothing but the choice. The
controller has a server of its own, so that it learns from what it serves and not from what is pinned.
"""

import os
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from sglang_spec_ext.cli import UsageError
from sglang_spec_ext.cpu import selection

ALGORITHMS = ("DSPARK", "DFLASH", "EAGLE3", "EAGLE")
STOCK_STEPS = 3  # what SGLang's documentation starts EAGLE with
OUR_STEPS = 7  # the deepest slot of stock `--speculative-adaptive`, so that both choose from as many
PROMPT_ROOM = 512  # tokens of K/V for the longest prompt and the drafts of a request, on the CPU
CORE = ("none", "fixed", "adaptive", "ragged")  # what `--quick` measures


class Role(StrEnum):
    """What a setting stands for in the comparison."""

    NONE = "none"  # no speculation at all
    FIXED = "fixed"  # one K, pinned
    STATIC = "static"  # stock SGLang, its full width
    STOCK = "stock"  # stock SGLang's own adaptive ways
    SHADOW = "shadow"  # ours, deciding and not acting
    ADAPTIVE = "adaptive"  # ours


@dataclass(frozen=True)
class ServerSpec:
    """One `sglang.launch_server`: arguments and environment."""

    name: str
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    extended: bool = False  # runs the extension, so that it can be steered
    pinned: bool = False  # fixed K are measured on it
    needs_table: bool = False  # its arguments lack SGLang's own cost table, measured in this run


@dataclass(frozen=True)
class Setup:
    """One line of the result: a server, and how it is steered before each load."""

    name: str
    server: str
    family: str  # algorithm, or "" without speculation
    role: Role
    pin: int | None = None


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What the user wants compared."""

    target: Path
    drafts: dict[str, Path]  # algorithm -> draft
    dtype: str
    max_concurrency: int
    tokens: int  # of each answer; in the shifting load up to half as many again
    kinds: frozenset[str]  # of KINDS
    tiers: str = "auto"
    threads: int | None = None
    server_arguments: tuple[str, ...] = ()


# kinds of settings, as `--only` names them
KINDS = ("none", "fixed", "static", "stock", "compact", "compact-table", "shadow", "adaptive", "ragged")


def parse_drafts(given: Sequence[str]) -> dict[str, Path]:
    """Parse `ALGORITHM=FOLDER` arguments."""
    drafts = {}
    for text in given:
        algorithm, separator, folder = text.partition("=")
        if not separator or algorithm not in ALGORITHMS:
            raise UsageError(f"--draft {text}: must be ALGORITHM=FOLDER with one of {', '.join(ALGORITHMS)}")
        drafts[algorithm] = Path(folder)
    return drafts


def servers(choice: Choice) -> list[ServerSpec]:
    """Return the servers that the chosen settings need, our own first."""
    return list(_servers(choice))


def _servers(choice: Choice) -> Iterator[ServerSpec]:
    common, environment = _common(choice)

    def spec(name: str, *flags: str, **more: object) -> ServerSpec:
        own = more.pop("environment", {})
        assert isinstance(own, dict)
        return ServerSpec(name, (*common, *flags), {**environment, **own}, **more)  # type: ignore[arg-type]

    for algorithm, draft in choice.drafts.items():
        drafting = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(draft))
        acting = ("--spec-ext-mode", "adaptive", "--spec-ext-tiers", choice.tiers)
        ours = (*drafting, *_steps(algorithm, OUR_STEPS), *acting)
        stock = (*drafting, *_steps(algorithm, STOCK_STEPS))
        compact = {"SGLANG_RAGGED_VERIFY_MODE": "compact"}
        # graphs of one width would leave DSPARK's K where it is
        narrow = compact if algorithm == "DSPARK" and not selection.selected() else {}
        if choice.kinds & {"fixed", "shadow"}:
            yield spec(f"{algorithm} ours", *ours, extended=True, pinned=True, environment=narrow)
        if "adaptive" in choice.kinds:
            yield spec(f"{algorithm} ours adaptive", *ours, extended=True, environment=narrow)
        # by margins a budget is verified on the CPU platform alone
        if "ragged" in choice.kinds and (algorithm == "DSPARK" or selection.selected()):
            yield spec(f"{algorithm} ours ragged", *ours, "--spec-ext-verify", "ragged", extended=True)
        if "static" in choice.kinds:
            yield spec(f"{algorithm} stock", *stock)
        if algorithm.startswith("EAGLE") and "stock" in choice.kinds:
            yield spec(f"{algorithm} stock adaptive", *stock, "--speculative-adaptive")
        if algorithm == "DSPARK" and "compact" in choice.kinds:
            yield spec(f"{algorithm} stock compact", *stock, environment=compact)
        if algorithm == "DSPARK" and "compact-table" in choice.kinds:
            yield spec(f"{algorithm} stock compact, table", *stock, environment=compact, needs_table=True)
    if "none" in choice.kinds:
        yield spec("no speculation")


def recording_server(choice: Choice) -> ServerSpec:
    """Return the server that SGLang's profiler of DSpark cost tables asks for."""
    common, environment = _common(choice)
    flags = ("--speculative-algorithm", "DSPARK", "--speculative-draft-model-path", str(choice.drafts["DSPARK"]))
    wanted = {
        "SGLANG_RAGGED_VERIFY_MODE": "static",
        "SGLANG_DSPARK_ENABLE_SPS_RECORD": "1",
        "SGLANG_SIMULATE_ACC_LEN": "1.0",
    }
    return ServerSpec("profiled by SGLang", (*common, *flags), {**environment, **wanted})


def setups(specs: Iterable[ServerSpec], tiers: Mapping[str, Sequence[int]], kinds: frozenset[str]) -> list[Setup]:
    """Return the settings to measure; `tiers` holds the K that can be pinned, by server (absent: it did not start)."""
    found: list[Setup] = []
    for spec in specs:
        family = "" if spec.name == "no speculation" else spec.name.split()[0]
        if spec.pinned:
            if "fixed" in kinds:
                found += [
                    Setup(f"{family} K={k}", spec.name, family, Role.FIXED, pin=k) for k in tiers.get(spec.name, ())
                ]
            if "shadow" in kinds:
                found.append(Setup(f"{family} shadow", spec.name, family, Role.SHADOW))
        elif spec.extended:
            ragged = " ragged" if spec.name.endswith("ragged") else ""
            found.append(Setup(f"{family} adaptive{ragged}", spec.name, family, Role.ADAPTIVE))
        else:
            role = Role.NONE if not family else Role.STATIC if spec.name.endswith("stock") else Role.STOCK
            found.append(Setup(spec.name, spec.name, family, role))
    return found


def _steps(algorithm: str, steps: int) -> tuple[str, ...]:
    """Return how far EAGLE drafts; block drafts carry their width."""
    if not algorithm.startswith("EAGLE"):
        return ()
    width = ("--speculative-num-draft-tokens", str(steps + 1))
    return ("--speculative-num-steps", str(steps), "--speculative-eagle-topk", "1", *width)


def _common(choice: Choice) -> tuple[tuple[str, ...], dict[str, str]]:
    arguments = ["--model-path", str(choice.target), "--dtype", choice.dtype, "--log-level", "warning"]
    # every answer is computed: a prompt that comes again must not be cheaper than the first time
    arguments += ["--disable-radix-cache", "--max-running-requests", str(choice.max_concurrency)]
    arguments += ["--stream-interval", "4"]
    environment = {}
    if selection.selected():
        arguments += ["--device", "cpu", "--sleep-on-idle"]
        arguments += ["--max-total-tokens", str((PROMPT_ROOM + 2 * choice.tokens) * choice.max_concurrency)]
    if choice.threads is not None:
        environment["OMP_NUM_THREADS"] = str(choice.threads)
    return (*arguments, *choice.server_arguments), environment


def split_arguments(text: str) -> tuple[str, ...]:
    """Split further server arguments as a shell would."""
    return tuple(shlex.split(text))


def default_threads() -> int | None:
    """Return the threads a CPU server computes with: those of the machine unless the environment says less."""
    return None if "OMP_NUM_THREADS" in os.environ else os.cpu_count()
