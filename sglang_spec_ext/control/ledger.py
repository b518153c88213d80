"""Shadow accounting: what was chosen, and what the best single K would have given, in tokens per second.

All predictions of one step use the same estimates, so the regret compares choices and not luck; measured
tokens per second stand beside it. An exponential window of about a thousand steps keeps it current.
"""

from collections.abc import Sequence
from typing import Any

from sglang_spec_ext.control.tiers import Score

WINDOW_STEPS = 1000.0


class Ledger:
    """Windowed sums of predicted and measured tokens and seconds."""

    def __init__(self, tiers: Sequence[int]) -> None:
        self.tiers = tuple(tiers)
        self._keep = 1.0 - 1.0 / WINDOW_STEPS
        self._tokens = [0.0] * len(self.tiers)
        self._seconds = [0.0] * len(self.tiers)
        self._chosen = [0.0, 0.0]
        self._best = [0.0, 0.0]
        self._measured = [0.0, 0.0]
        self._wasted = [0.0, 0.0]  # draft tokens verified, and of these accepted
        self._last: tuple[list[Score], Score, Score] | None = None
        self._repeats = 0  # of the last decision, not yet added

    def predicted(self, scores: Sequence[Score], chosen: Score, best: Score) -> None:
        """Add one decision: the scores of the lowest tiers, of the arm that runs, and of the best arm.

        A K that the ladder forbids at this batch counts as the largest K allowed.
        """
        self._add_repeats()
        self._last = ([*scores, *[scores[-1]] * (len(self.tiers) - len(scores))], chosen, best)
        self._add_last(1)

    def repeated(self) -> None:
        """Add one decision that is the last one over again."""
        self._repeats += 1

    def _add_repeats(self) -> None:
        if self._repeats:
            self._add_last(self._repeats)
            self._repeats = 0

    def _add_last(self, steps: int) -> None:
        assert self._last is not None
        scores, chosen, best = self._last
        keep = self._keep if steps == 1 else self._keep**steps
        self._tokens = [old * keep + new * steps for old, (_, new, _) in zip(self._tokens, scores, strict=True)]
        self._seconds = [old * keep + new * steps for old, (_, _, new) in zip(self._seconds, scores, strict=True)]
        _add(self._chosen, chosen.tokens * steps, chosen.seconds * steps, keep)
        _add(self._best, best.tokens * steps, best.seconds * steps, keep)

    def measured(self, tokens: float, seconds: float | None, *, drafted: int, accepted: int) -> None:
        """Add one observation: tokens emitted, seconds of the step, draft tokens verified and accepted."""
        if seconds is not None and 0.0 < seconds < float("inf"):
            _add(self._measured, tokens, seconds, self._keep)
        _add(self._wasted, drafted, accepted, self._keep)

    def snapshot(self) -> dict[str, Any]:
        """Plain facts in tokens per second; None before there is data."""
        self._add_repeats()
        fixed = {
            k: _rate((tokens, seconds))
            for k, tokens, seconds in zip(self.tiers, self._tokens, self._seconds, strict=True)
        }
        chosen, best = _rate(self._chosen), _rate(self._best)
        hindsight = max(fixed.items(), key=lambda item: item[1] or 0.0)
        drafted, accepted = self._wasted
        return {
            "chosen_tok_s": chosen,
            "best_each_step_tok_s": best,
            "best_fixed_k": None if hindsight[1] is None else hindsight[0],
            "best_fixed_tok_s": hindsight[1],
            "regret_tok_s": None if chosen is None or hindsight[1] is None else hindsight[1] - chosen,
            "fixed_tok_s": {str(k): rate for k, rate in fixed.items()},
            "measured_tok_s": _rate(self._measured),
            "wasted_draft_share": (drafted - accepted) / drafted if drafted else None,
        }


def _add(pair: list[float], first: float, second: float, keep: float) -> None:
    pair[0] = pair[0] * keep + first
    pair[1] = pair[1] * keep + second


def _rate(pair: Sequence[float]) -> float | None:
    return pair[0] / pair[1] if pair[1] else None
