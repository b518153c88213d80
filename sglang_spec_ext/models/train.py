"""The training loop of all drafts: AdamW over float32 weights, checkpoints, resumption.

A checkpoint holds weights, optimiser state, the step and the seconds spent; it is written under another name
and renamed, so that a full disk or a kill leaves the last good one. Every random draw of a step comes from
(seed, step): a training that was interrupted sees the batches that it would have seen.
"""

import json
import pathlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from sglang_spec_ext.errors import SpecExtError
from sglang_spec_ext.models.drafts_export import save_draft
from sglang_spec_ext.models.files import replace_atomically
from sglang_spec_ext.models.train_recipes import RECIPES, Draft, Trainee
from sglang_spec_ext.models.train_record import Progress

CHECKPOINT_EVERY_S = 300.0
CLIP_NORM = 1.0
# The Markov tables see a row only when its token comes up: they take larger steps.
TABLE_LR_FACTOR = 3.0


class TrainingError(SpecExtError):
    """A training that cannot go on; the message names the cause, what is kept and the cure."""


@dataclass(frozen=True)
class TrainSettings:
    """Where and how long: whichever of `steps` and `max_minutes` comes first ends the schedule."""

    algorithm: str
    out: pathlib.Path
    steps: int
    max_minutes: float
    seed: int
    learning_rate: float | None = None  # at its peak; None for the recipe's
    started_from: dict[str, Any] | None = None  # facts of the draft that is trained further
    checkpoint_every_s: float = CHECKPOINT_EVERY_S


@dataclass(frozen=True)
class StepReport:
    """What a progress line shows; `event` names a checkpoint that was just written."""

    step: int
    done: float
    loss: float
    shown: dict[str, float]
    elapsed_s: float
    event: str | None = None


def peak_memory_gib() -> float:
    """Return the peak resident memory of this process in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def train(
    trainee: Trainee, settings: TrainSettings, *, clock: Callable[[], float] = time.monotonic
) -> Iterator[StepReport]:
    """Train to the end of the schedule, yielding after each step; writes the folder `settings.out`.

    `settings.out` receives config.json, model.safetensors and training.json at every checkpoint;
    the state to resume from lies beside it as `<name>.state.pt` and is kept until the caller removes it.
    """
    draft, loop = trainee.draft, _Loop(trainee, settings)
    loop.resume()
    began = clock() - loop.elapsed_s
    saved_at = clock()
    while loop.done < 1.0:
        loss, shown = loop.advance()
        loop.elapsed_s = clock() - began
        event = None
        if clock() - saved_at >= settings.checkpoint_every_s or loop.done >= 1.0:
            event = loop.save(draft)
            saved_at = clock()
        yield StepReport(loop.step, loop.done, loss, shown, loop.elapsed_s, event)


def _optimizer(draft: Draft, peak: float) -> torch.optim.Optimizer:
    """Return AdamW. Muon needed fewer steps but its orthogonalisation cost as much as a step on two cores."""
    trained = [(name, value) for name, value in draft.named_parameters() if value.requires_grad]
    tables = [value for name, value in trained if name.startswith("markov_head.markov_w")]
    others = [value for name, value in trained if not name.startswith("markov_head.markov_w")]
    groups = [{"params": others, "peak": peak}, {"params": tables, "peak": peak * TABLE_LR_FACTOR}]
    used = [group for group in groups if group["params"]]
    return torch.optim.AdamW(used, lr=peak, betas=(0.9, 0.95), weight_decay=0.01)


class _Loop:
    """The mutable state of a training."""

    def __init__(self, trainee: Trainee, settings: TrainSettings) -> None:
        self.trainee, self.settings = trainee, settings
        self.step, self.elapsed_s = 0, 0.0
        self.history: list[dict[str, float]] = []
        self.optimizer = _optimizer(
            trainee.draft, settings.learning_rate or RECIPES[settings.algorithm].learning_rate
        )

    @property
    def state_path(self) -> pathlib.Path:
        return self.settings.out.with_name(f"{self.settings.out.name}.state.pt")

    @property
    def done(self) -> float:
        return min(1.0, max(self.step / self.settings.steps, self.elapsed_s / (60 * self.settings.max_minutes)))

    def resume(self) -> None:
        if not self.state_path.exists():
            self.trainee.prepare()
            return
        state = torch.load(self.state_path, weights_only=True)
        identity = [self.settings.algorithm, self.settings.seed]
        if state["identity"] != identity:
            found = f"{self.state_path} holds {state['identity']}, this run is {identity}"
            raise TrainingError(f"cannot resume: {found}; choose another folder or remove the state")
        self.trainee.draft.load_state_dict(state["weights"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.elapsed_s, self.history = state["step"], state["elapsed_s"], state["history"]

    def advance(self) -> tuple[float, dict[str, float]]:
        progress = Progress(self.done, self.step)
        self.optimizer.zero_grad()
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * progress.lr_factor
        rng = np.random.default_rng([self.settings.seed, self.step])
        loss, shown = self.trainee.loss(rng, progress)
        if not bool(torch.isfinite(loss)):
            kept = f"the last good checkpoint is {self.state_path}" if self.state_path.exists() else "none is kept"
            raise TrainingError(
                f"loss must be finite, got {loss.item()} in step {self.step}; {kept}; lower the learning rate"
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trainee.draft.parameters(), CLIP_NORM)
        self.optimizer.step()
        self.step += 1
        return float(loss.detach()), shown

    def save(self, draft: Draft) -> str:
        measured = self.trainee.validate()
        self.history.append(
            {
                "step": self.step,
                "minutes": round(self.elapsed_s / 60, 2),
                "greedy_accept_len": round(measured.greedy_accept_len, 4),
                "sampled_accept_len": round(measured.sampled_accept_len, 4),
            }
        )
        state = {
            "identity": [self.settings.algorithm, self.settings.seed],
            "weights": draft.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "elapsed_s": self.elapsed_s,
            "history": self.history,
        }
        facts: dict[str, Any] = {
            "algorithm": self.settings.algorithm,
            "seed": self.settings.seed,
            "train_tokens": self.trainee.num_train_tokens,
            "peak_learning_rate": self.optimizer.param_groups[0]["peak"],
            "steps": self.step,
            "peak_memory_gib": round(peak_memory_gib(), 2),
            "shape": asdict(RECIPES[self.settings.algorithm].shape),
            "validation": self.history,
        }
        if self.settings.started_from is not None:
            facts["started_from"] = self.settings.started_from
        try:
            self.settings.out.parent.mkdir(parents=True, exist_ok=True)
            replace_atomically(self.state_path, lambda path: torch.save(state, path))
            save_draft(draft, self.settings.out)
            text = json.dumps(facts, indent=2) + "\n"
            replace_atomically(
                self.settings.out / "training.json", lambda path: path.write_text(text, encoding="utf-8")
            )
        except (OSError, RuntimeError) as error:  # torch reports a failed write as RuntimeError
            kept = "the checkpoint before it is kept" if self.state_path.exists() else "there is none before it"
            cure = "free some space and start again: the training resumes"
            raise TrainingError(
                f"cannot write a checkpoint to {self.settings.out} ({error}); {kept}; {cure}"
            ) from error
        rates = " ".join(f"{rate:.2f}" for rate in measured.greedy_rates)
        last = self.history[-1]
        return (
            f"step {self.step}: accept length greedy {last['greedy_accept_len']:.3f}, sampled "
            f"{last['sampled_accept_len']:.3f}; rates {rates}"
        )
