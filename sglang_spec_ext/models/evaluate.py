"""Measures acceptance of a draft on the real engine, over held-out prompts of four kinds.

The engine reports, per request, how many verify steps accepted 0, 1, 2, ... drafts; everything here follows
from that histogram. Requests whose prompt or answer came up before are left out: repeated text inflates
acceptance. Nothing here judges a draft by the trainer's own arithmetic.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.models.prompts import KINDS, Prompt, build_prompts

PROMPT_SEED = 0  # the held-out prompts belong to the seed that the training prompts came from


@dataclass(frozen=True)
class Acceptance:
    """What verification found: `counts[i]` verify steps accepted exactly i drafts."""

    counts: tuple[int, ...]
    num_requests: int = 0
    num_duplicates: int = 0

    @property
    def num_steps(self) -> int:
        """Verify steps."""
        return sum(self.counts)

    @property
    def accept_len_with_bonus(self) -> float:
        """Mean tokens that a verify step emitted, the bonus token included; 0 without a step."""
        accepted = sum(i * count for i, count in enumerate(self.counts))
        return 1.0 + accepted / self.num_steps if self.num_steps else 0.0

    @property
    def accept_rates(self) -> tuple[float, ...]:
        """Acceptance of draft i given that the drafts before it were accepted; 0 where none was reached."""
        reached = [sum(self.counts[i:]) for i in range(len(self.counts))]
        pairs = itertools.pairwise(reached)
        return tuple(after / before if before else 0.0 for before, after in pairs)

    def __add__(self, other: "Acceptance") -> "Acceptance":
        """Pool two measurements."""
        width = max(len(self.counts), len(other.counts))
        mine, theirs = (part.counts + (0,) * (width - len(part.counts)) for part in (self, other))
        return Acceptance(
            tuple(a + b for a, b in zip(mine, theirs, strict=True)),
            self.num_requests + other.num_requests,
            self.num_duplicates + other.num_duplicates,
        )


def held_out_prompts(per_kind: int) -> list[Prompt]:
    """Return `per_kind` prompts of each kind, from templates, topics and sources no training prompt uses."""
    test = [prompt for prompt in build_prompts(PROMPT_SEED) if prompt.split == "test"]
    return [prompt for kind in KINDS for prompt in [p for p in test if p.kind == kind][:per_kind]]


def pool_answers(
    answers: Iterable[tuple[str, Mapping[str, Any]]], *, num_drafts: int
) -> dict[str, Acceptance]:
    """Pool engine answers by kind; `answers` are (kind, answer of `Engine.generate`) pairs.

    An answer without a histogram took no verify step (it ended with its first token).
    """
    pooled = {kind: Acceptance((0,) * (num_drafts + 1)) for kind in KINDS}
    seen: set[tuple[int, ...]] = set()
    for kind, answer in answers:
        tokens = tuple(answer["output_ids"])
        histogram = tuple(answer["meta_info"].get("spec_correct_drafts_histogram") or ())
        if tokens in seen:
            pooled[kind] += Acceptance((), num_duplicates=1)
            continue
        seen.add(tokens)
        pooled[kind] += Acceptance(histogram, num_requests=1)
    return pooled


def ask(
    engine: Any,
    encoded: Sequence[Sequence[int]],
    *,
    temperature: float,
    max_new_tokens: int,
) -> list[dict[str, Any]]:
    """Send token-id prompts to an engine in one call and return its answers in order."""
    sampling = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    answers = engine.generate(input_ids=[list(ids) for ids in encoded], sampling_params=sampling)
    return list(answers)


def markdown_table(measured: Mapping[str, Mapping[str, Acceptance]]) -> str:
    """Return the model card's table from label (such as 'greedy') -> kind -> acceptance."""
    lines = [
        "| decoding | text | requests | accept length with bonus | accept rate by position |",
        "|---|---|---|---|---|",
    ]
    for label, kinds in measured.items():
        total = Acceptance(())
        for kind, found in kinds.items():
            total += found
            lines.append(_row(label, kind, found))
        lines.append(_row(label, "all", total))
    return "\n".join(lines) + "\n"


def _row(label: str, kind: str, found: Acceptance) -> str:
    rates = " ".join(f"{rate:.2f}" for rate in found.accept_rates)
    return f"| {label} | {kind} | {found.num_requests} | {found.accept_len_with_bonus:.2f} | {rates} |"
