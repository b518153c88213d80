"""Real servers on the CPU platform, each started once for every test that asks for it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

pytest.importorskip("sglang")

import httpx
import torch

from sglang_spec_ext.testing import Server, running_server

# one thread: these models are tiny, and two would only wait for each other
CPU = {"SGLANG_PLATFORM": "spec_ext_cpu", "OMP_NUM_THREADS": "1"}
COMMON = (
    "--device", "cpu", "--dtype", "float32", "--max-running-requests", "8", "--max-total-tokens", "16384",
    "--chunked-prefill-size", "64", "--random-seed", "1", "--sleep-on-idle", "--log-level", "warning",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """One way to serve: target, draft and flags."""

    name: str
    target: str = "blend-llama"
    draft: str | None = None
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    forked: bool = True  # False: the very command of the README

    @property
    def speculative(self) -> bool:
        return "--speculative-algorithm" in self.flags


_EAGLE = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
_SHADOW = ("--spec-ext-mode", "shadow")


def _algorithm(name: str, *more: str) -> tuple[str, ...]:
    return ("--speculative-algorithm", name, *more)


SETUPS = (
    Setup("plain", forked=False),
    Setup("eagle", draft="blend-eagle", flags=_algorithm("EAGLE", *_EAGLE)),
    Setup("eagle3", draft="blend-eagle3", flags=_algorithm("EAGLE3", *_EAGLE, *_SHADOW)),
    Setup("dflash", draft="blend-dflash", flags=_algorithm("DFLASH", *_SHADOW)),
    Setup("dspark", draft="blend-dspark", flags=_algorithm("DSPARK", *_SHADOW), forked=False),
    Setup(
        "dspark-compact",
        draft="blend-dspark",
        flags=_algorithm("DSPARK"),
        environment={"SGLANG_RAGGED_VERIFY_MODE": "compact"},
    ),
    Setup("ngram", flags=_algorithm("NGRAM", "--speculative-num-draft-tokens", "6")),
)


@dataclass
class Served:
    """A running server with its setup and a client."""

    setup: Setup
    server: Server
    client: httpx.Client
    folder: Path

    def generate(self, ids: list[list[int]] | list[int], **sampling: object) -> list[dict]:
        """Ask `/generate` with token ids; returns one answer a prompt."""
        params = {"temperature": 0, "max_new_tokens": 32, "ignore_eos": True, **sampling}
        answer = self.client.post("/generate", json={"input_ids": ids, "sampling_params": params})
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return found if isinstance(found, list) else [found]


def launch_arguments(setup: Setup, checkpoint: Callable[[str], Path]) -> list[str]:
    arguments = ["--model-path", str(checkpoint(setup.target)), *COMMON, *setup.flags]
    if setup.draft is not None:
        arguments += ["--speculative-draft-model-path", str(checkpoint(setup.draft))]
    return arguments


@pytest.fixture(scope="session", params=SETUPS, ids=lambda setup: setup.name)
def served(
    request: pytest.FixtureRequest, checkpoint: Callable[[str], Path], tmp_path_factory, forked: tuple[str, ...]
) -> Iterator[Served]:
    """One server for each setup; pytest orders the tests so that each is started once."""
    setup: Setup = request.param
    environment = {**CPU, **setup.environment}
    if setup.name == "dspark-compact":
        table = tmp_path_factory.mktemp("sps") / "sps.json"
        # a steep table, so that the budget really trims
        table.write_text(
            '{"sample_batch_tokens": [1, 8, 16, 32, 64], "sample_steps_per_sec": [100, 60, 30, 15, 7],'
            ' "max_batch_tokens": 64}'
        )
        arguments = [*launch_arguments(setup, checkpoint), "--speculative-dspark-sps-table-path", str(table)]
    else:
        arguments = launch_arguments(setup, checkpoint)
    launcher = forked if setup.forked else None
    with running_server(arguments, environment=environment, launcher=launcher) as server:
        with httpx.Client(base_url=server.url, timeout=180) as client:
            yield Served(setup, server, client, checkpoint(setup.target))


@dataclass
class Reference:
    """The target itself, in transformers: what plain decoding must return."""

    model: torch.nn.Module

    @torch.inference_mode()
    def greedy(self, ids: list[int], tokens: int) -> list[int]:
        out = self.model.generate(
            torch.tensor([ids]), max_new_tokens=tokens, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return out[0, len(ids) :].tolist()

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """Return the next-token logits [len(ids), V] float32 after each prefix."""
        return self.model(torch.tensor([ids])).logits[0].float()


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Reference:
    from transformers import AutoModelForCausalLM

    return Reference(AutoModelForCausalLM.from_pretrained(checkpoint("blend-llama"), dtype=torch.float32).eval())
