"""Pairs of real prefill and decode servers on the CPU platform, each started once for all tests that ask for it."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import torch

from sglang_spec_ext.testing_pd import Pair, missing_part, running_pair

VOCAB = 64
TOKENS = 12
CPU = {"SGLANG_PLATFORM": "spec_ext_cpu", "OMP_NUM_THREADS": "1"}  # these models are tiny
STOCK = (
    "--device", "cpu", "--dtype", "float32", "--max-running-requests", "8", "--max-total-tokens", "16384",
    "--chunked-prefill-size", "64", "--random-seed", "1", "--sleep-on-idle", "--log-level", "warning",
)  # fmt: skip
COMMON = (*STOCK, "--spec-ext-mode", "shadow", "--spec-ext-profile", "off", "--enable-metrics")
EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
ROW_BYTES = {"EAGLE3": 768, "DFLASH": 256, "DSPARK": 256}  # of these drafts, by docs/pd.md's table


@dataclass(frozen=True)
class PdSetup:
    """One way to serve on two servers."""

    algorithm: str
    backend: str
    transport: str = "aux"

    @property
    def name(self) -> str:
        return f"{self.algorithm.lower()}-{self.backend}-{self.transport}"


def arguments(
    algorithm: str, checkpoint: Callable[[str], Path], *more: str, common: tuple[str, ...] = COMMON
) -> list[str]:
    """Return the arguments of any server of an algorithm."""
    found = ["--model-path", str(checkpoint("blend-llama")), *common, "--speculative-algorithm", algorithm]
    found += ["--speculative-draft-model-path", str(checkpoint(f"blend-{algorithm.lower()}"))]
    return [*found, *(EAGLE if algorithm == "EAGLE3" else ()), *more]


def skip_without(setup: PdSetup) -> None:
    reason = missing_part(setup.backend)
    if reason is not None:
        pytest.skip(reason)


@dataclass
class Served:
    """A running pair with its setup."""

    setup: PdSetup
    pair: Pair

    def counters(self, role: str) -> dict[str, float]:
        return self.pair.handoff(role)["counters"]

    def gains(self, role: str, before: dict[str, float]) -> dict[str, float]:
        """Return what the counters gained since `before`, without zeros."""
        after = self.counters(role)
        gained = {name: value - before.get(name, 0) for name, value in after.items()}
        return {name: value for name, value in gained.items() if value}

    def assert_whole(self, reference, within_s: float = 30.0) -> None:
        """Both servers answer rightly, and soon hold no slot: one of a request given up is freed at a later step."""
        (ids,) = prompts(1, seed=5)
        (answer,) = self.pair.generate([ids], max_new_tokens=TOKENS)
        assert answer["output_ids"] == reference(ids, TOKENS)
        deadline = time.monotonic() + within_s
        for role in ("prefill", "decode"):
            while (slots := self.pair.handoff(role)["slots"])["free"] < slots["size"] and time.monotonic() < deadline:
                time.sleep(0.2)
            assert slots["free"] == slots["size"], role
            assert not slots["errors"]


def first_steps(gains: dict[str, float], kind: str) -> dict[int, int]:
    """Return {accept length with bonus: first decode steps}, `kind` warm or cold."""
    prefix = f"first_accept_len_with_bonus_{kind}{{"
    return {int(name[len(prefix) : -1]): int(count) for name, count in gains.items() if name.startswith(prefix)}


def prompts(count: int, *, seed: int) -> list[list[int]]:
    """Return prompts of 1 to 99 tokens; those above 64 take more than one chunk."""
    rng = random.Random(seed)
    return [[rng.randrange(3, VOCAB - 1) for _ in range(rng.randrange(1, 100))] for _ in range(count)]


PAIRS = (PdSetup("EAGLE3", "nixl"), PdSetup("DSPARK", "mooncake_tcp"), PdSetup("DFLASH", "nixl", "sidecar"))


@pytest.fixture(scope="session", params=PAIRS, ids=lambda setup: setup.name)
def pd_pair(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory) -> Iterator[Served]:
    """One pair for each setup; pytest orders the tests so that each is started once."""
    setup: PdSetup = request.param
    skip_without(setup)
    more = ["--spec-ext-pd-transport", setup.transport]
    if setup.transport == "sidecar":
        key = tmp_path_factory.mktemp("pd") / "key"
        key.write_bytes(b"0123456789abcdef")
        key.chmod(0o600)
        more += ["--spec-ext-pd-key-file", str(key)]
    serve = arguments(setup.algorithm, checkpoint, *more)
    roles = {"prefill": serve, "decode": serve}
    with running_pair(roles, backend=setup.backend, environment=CPU) as pair:
        yield Served(setup, pair)


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[[list[int], int], list[int]]:
    """Return greedy decoding of the target in transformers: what every server must answer."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("blend-llama"), dtype=torch.float32).eval()

    @torch.inference_mode()
    def greedy(ids: list[int], tokens: int) -> list[int]:
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()

    return greedy
