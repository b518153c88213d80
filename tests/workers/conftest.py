"""Real servers in adaptive mode on the CPU platform, each started once for every test that asks for it."""

import contextlib
import importlib.util
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest

KEY = "only-for-this-server"
E2E = Path(__file__).resolve().parents[1] / "e2e"


def e2e_module(name: str) -> ModuleType:
    """Return a module of the end-to-end tests: its references and tests of distributions serve here too."""
    spec = importlib.util.spec_from_file_location(f"spec_ext_e2e_{name}", E2E / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@dataclass(frozen=True)
class Setup:
    """One way to serve with the controller acting."""

    name: str
    draft: str
    flags: tuple[str, ...]
    target: str = "blend-llama"


_EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
SETUPS = (
    Setup("dspark", "blend-dspark", ("--speculative-algorithm", "DSPARK")),
    Setup("dspark-ragged", "blend-dspark", ("--speculative-algorithm", "DSPARK", "--spec-ext-verify", "ragged")),
    Setup("dflash", "blend-dflash", ("--speculative-algorithm", "DFLASH")),
    Setup("eagle3", "blend-eagle3", ("--speculative-algorithm", "EAGLE3", *_EAGLE)),
    Setup("eagle", "blend-eagle", ("--speculative-algorithm", "EAGLE", *_EAGLE, "--spec-ext-verify", "ragged")),
)


class Mover:
    """Pins K to one tier after another, through every ordered pair, while something is generated."""

    def __init__(self, control: object, tiers: Sequence[int]) -> None:
        self._control = control
        pairs = list(itertools.permutations(tiers, 2))
        self._sequence = itertools.cycle(k for pair in pairs for k in pair)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.failure: Exception | None = None

    def _run(self) -> None:
        from sglang_spec_ext.runtime import ControlError

        try:
            while not self._stop.wait(0.002):
                self._control.pin(next(self._sequence))
        except ControlError as error:
            self.failure = error

    def __enter__(self) -> "Mover":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()
        self._control.unpin()
        assert self.failure is None, self.failure


@dataclass
class Adaptive:
    """A server whose controller acts, a client of it, and its runtime control."""

    setup: Setup
    client: object
    control: object
    folder: Path

    def ask(self, request: dict, tokens: int, **sampling: object) -> list[dict]:
        """Post a request to `/generate`; returns one answer a prompt."""
        params = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **sampling}
        answer = self.client.post("/generate", json={**request, "sampling_params": params})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found if isinstance(found, list) else [found]

    def generate(self, ids: list, *, tokens: int = 48, **sampling: object) -> list[dict]:
        """Ask with token ids."""
        return self.ask({"input_ids": ids}, tokens, **sampling)

    def moving(self) -> Mover:
        """Return a context in which K moves every few steps."""
        return Mover(self.control, self.control.state()["tiers"])


@contextlib.contextmanager
def serving(
    setup: Setup,
    checkpoint: Callable[[str], Path],
    environment: dict[str, str],
    launcher: Sequence[str],
) -> Iterator[Adaptive]:
    """Run a server in adaptive mode for the duration of a block."""
    import httpx

    from sglang_spec_ext.runtime import SpecExt
    from sglang_spec_ext.testing import running_server

    common = e2e_module("conftest")
    arguments = ["--model-path", str(checkpoint(setup.target)), *common.COMMON, *setup.flags]
    arguments += ["--speculative-draft-model-path", str(checkpoint(setup.draft)), "--spec-ext-mode", "adaptive"]
    arguments += ["--enable-metrics", "--api-key", KEY]
    with running_server(arguments, environment={**common.CPU, **environment}, launcher=launcher) as server:
        with httpx.Client(base_url=server.url, timeout=180, headers={"Authorization": f"Bearer {KEY}"}) as client:
            yield Adaptive(setup, client, SpecExt(server.url, api_key=KEY), checkpoint(setup.target))


@pytest.fixture(scope="session", params=SETUPS, ids=lambda setup: setup.name)
def adaptive(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], forked: tuple[str, ...]
) -> Iterator[Adaptive]:
    """One server for each setup."""
    pytest.importorskip("sglang")
    with serving(request.param, checkpoint, {}, forked) as served:
        yield served


@pytest.fixture
def adaptive_on(
    checkpoint: Callable[[str], Path], forked: tuple[str, ...]
) -> Callable[..., contextlib.AbstractContextManager[Adaptive]]:
    """Return a function from (draft, flags, environment[, launcher][, target]) to a server."""
    pytest.importorskip("sglang")

    def start(
        draft: str,
        flags: tuple[str, ...],
        environment: dict[str, str],
        launcher: Sequence[str] = forked,
        target: str = "blend-llama",
    ) -> contextlib.AbstractContextManager[Adaptive]:
        return serving(Setup("own", draft, flags, target), checkpoint, environment, launcher)

    return start


@pytest.fixture(scope="session")
def reference_of(checkpoint: Callable[[str], Path]) -> Callable[[str], object]:
    """Return a function from a target's name to that target in transformers: what plain decoding must return."""
    pytest.importorskip("sglang")
    import torch
    from transformers import AutoModelForCausalLM

    def load(name: str) -> object:
        model = AutoModelForCausalLM.from_pretrained(checkpoint(name), dtype=torch.float32).eval()
        return e2e_module("conftest").Reference(model)

    return load


@pytest.fixture(scope="session")
def reference(reference_of: Callable[[str], object]) -> object:
    """The target of most servers."""
    return reference_of("blend-llama")


@pytest.fixture(scope="session")
def sampling() -> ModuleType:
    """The test of sampled distributions: filters by definition, the uniform of a drawn token, limits."""
    pytest.importorskip("sglang")
    return e2e_module("test_sampling")
