"""The measuring loop of `spec-ext bench envelope`: in turn, round after round, until done or out of time."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sglang_spec_ext.commands import bench_envelope_load as load
from sglang_spec_ext.commands.bench_envelope_fleet import Fleet, Running, Unavailable
from sglang_spec_ext.commands.bench_envelope_setups import Role, Setup
from sglang_spec_ext.commands.bench_envelope_trace import look, series
from sglang_spec_ext.runtime import ControlError, SpecExt

LOOK_EVERY_S = 1.0
SHIFTING = "shifting"


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is measured."""

    concurrency: tuple[int, ...]
    rounds: int
    tokens: int  # of each answer
    cell_s: float  # seconds that the first setting of a level should take; the others do the same work
    shifting_rounds: int  # in so many rounds the shifting load follows the levels
    first_round: int = 0  # number of the first one in the samples; their prompts are the same for every draft
    deadline: float = float("inf")  # on time.monotonic(); what would start later is left out by name


@dataclass
class Measured:
    """Samples as the report keeps them, and what was left out, with the reason."""

    samples: list[dict[str, Any]] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    inactive: dict[str, list[str]] = field(default_factory=dict)  # what a controller said that it could not do
    series: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    interrupted: bool = False


@dataclass
class Bench:
    """One run: the same prompts for every setting in a round, others in the next round."""

    fleet: Fleet
    setups: Sequence[Setup]
    prompts: load.Prompts
    amount: Amount
    say: Callable[[str], None]
    side_by_side: bool = True  # all servers alive: settings alternate; else a server does all its loads in turn
    waves: dict[int, int] = field(default_factory=dict)  # by concurrency, set by the first setting measured
    found: Measured = field(default_factory=Measured)

    def run(self) -> Measured:
        """Measure everything; the order of settings turns from round to round, so that drift hits all alike.

        An interrupt ends it with what was measured until then, if anything was.
        """
        try:
            for number in range(self.amount.rounds):
                for setup, target in self._order(number):
                    self._cell(setup, target, number)
        except KeyboardInterrupt:
            if not self.found.samples:
                raise
            self.found.interrupted = True
            self.found.left_out["what was to follow"] = "interrupted"
        return self.found

    def _order(self, number: int) -> list[tuple[Setup, int | str]]:
        loads: list[int | str] = list(self.amount.concurrency)
        loads += [SHIFTING] if number < self.amount.shifting_rounds else []
        turned = [*self.setups[number % len(self.setups) :], *self.setups[: number % len(self.setups)]]
        if self.side_by_side:
            return [(setup, target) for target in loads for setup in turned]
        names = list(dict.fromkeys(setup.server for setup in turned))
        return [(setup, target) for name in names for target in loads for setup in turned if setup.server == name]

    def _cell(self, setup: Setup, target: int | str, number: int) -> None:
        label = f"{setup.name} at {target}"
        if time.monotonic() > self.amount.deadline:
            self.found.left_out.setdefault(label, "out of time")
            return
        try:
            running = self.fleet.get(setup.server)
        except Unavailable as error:
            self.found.left_out[setup.name] = str(error)
            return
        try:
            steer(running.control, setup)
            answers, tok_s = self._load(setup, running, target, number)
        except (load.LoadFailed, ControlError) as error:
            self.found.left_out[label] = str(error)
            self.say(f"{label}: {error}")
            return
        if running.control is not None and setup.role is Role.ADAPTIVE:
            self.found.inactive[setup.name] = running.control.state()["inactive"]
        sample = {
            "setup": setup.name,
            "load": target,
            "round": self.amount.first_round + number,
            "tok_s": tok_s,
            "accept_length": load.accept_length(answers),
            "requests": len(answers),
            "tokens": sum(answer.tokens for answer in answers),
        }
        self.found.samples.append(sample)
        self.say(f"round {number + 1}, {label}: {tok_s:.1f} tokens/s")

    def _load(self, setup: Setup, running: Running, target: int | str, number: int) -> tuple[list[load.Answer], float]:
        if isinstance(target, str):
            answers = self._shifting(setup, running, number)
            return answers, load.tokens_per_second(answers)
        return self._level(running, target, number)

    def _level(self, running: Running, concurrency: int, number: int) -> tuple[list[load.Answer], float]:
        """Return the measured answers and the throughput while all of them were sent, one as soon as another ended."""
        amount, start = self.amount, self._start(number, concurrency)

        def waves(count: int, first: int) -> load.Phase:
            return load.level(self.prompts, concurrency, waves=count, tokens=amount.tokens, start=first)

        if concurrency not in self.waves:
            began = time.monotonic()
            load.drive(running.url, [waves(1, start)])
            self.waves[concurrency] = max(1, round(amount.cell_s / (time.monotonic() - began)))
        # out of step when measured, as requests of real traffic are: it decides what their prefills cost
        lead, phase = waves(1, start), waves(self.waves[concurrency], start + concurrency)
        answers = load.drive(running.url, [lead, phase, load.mark(self.prompts, concurrency, start=start)])
        begin, end = len(lead.asks), len(lead.asks) + len(phase.asks)
        return answers[begin:end], load.rate_between(answers, answers[begin].start_s, answers[end].start_s)

    def _shifting(self, setup: Setup, running: Running, number: int) -> list[load.Answer]:
        phases = load.shifting(
            self.prompts, waves=1, tokens=self.amount.tokens, start=self._start(number, 0),
            largest=max(self.amount.concurrency),
        )  # fmt: skip
        with Watch(running.control if setup.role is Role.ADAPTIVE else None) as watch:
            answers = load.drive(running.url, phases)
        if number == 0:
            self.found.series[setup.name] = series(answers, watch.looks)
        return answers

    @staticmethod
    def _start(number: int, concurrency: int) -> int:
        return 97 * number + 31 * concurrency  # another stretch of prompts in every round and at every level


def steer(control: SpecExt | None, setup: Setup) -> None:
    """Bring a server into a setting; the controller's own server is left alone, as in production."""
    if control is None or setup.role is Role.ADAPTIVE:
        return
    if setup.pin is None:
        control.unpin()
        control.set_mode("shadow")
    else:
        control.set_mode("adaptive")
        control.pin(setup.pin)


class Watch:
    """Looks at a controller every second while a load runs."""

    def __init__(self, control: SpecExt | None) -> None:
        self._control = control
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.looks: list[dict[str, Any]] = []
        self._failure: Exception | None = None

    def _run(self) -> None:
        assert self._control is not None
        try:
            while not self._stop.wait(LOOK_EVERY_S):
                self.looks.append(look(self._control.state(), time.perf_counter()))
        except Exception as error:  # noqa: BLE001 - raised again where the load is waited for
            self._failure = error

    def __enter__(self) -> "Watch":
        if self._control is not None:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        if self._control is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
