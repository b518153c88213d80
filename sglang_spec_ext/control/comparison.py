"""One scenario, all policies: ours, every fixed K, the oracle and the published rules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_spec_ext.control.published import SglangEma, VllmArgmax, VllmTable
from sglang_spec_ext.control.scenario import Scenario, profile_of
from sglang_spec_ext.control.simulator import Policy, Run, World, adaptive_policy


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs of all policies on the same draws."""

    world: World
    adaptive: Run
    fixed: dict[int, Run]
    oracle: Run
    published: dict[str, Run]

    def as_dict(self) -> dict[str, Any]:
        """Plain form: tokens per second, switches, share of probes, steps by K, segments."""
        by_segment = {k: run.segment_tok_s() for k, run in self.fixed.items()}
        segments = []
        for index, tok_s in enumerate(self.adaptive.segment_tok_s()):
            best_k, best = max(
                ((k, rates[index]) for k, rates in by_segment.items()), key=lambda pair: pair[1]
            )
            segments.append({"tok_s": tok_s, "best_fixed_k": best_k, "best_fixed_tok_s": best})
        return {
            "adaptive": {
                "tok_s": self.adaptive.tok_s,
                "switches": self.adaptive.switches(),
                "probe_fraction": self.adaptive.probe_fraction(),
                "k_histogram": self.adaptive.k_histogram(),
                "segments": segments,
            },
            "fixed": {str(k): run.tok_s for k, run in self.fixed.items()},
            "oracle": {"tok_s": self.oracle.tok_s},
            "published": {
                name: {
                    "tok_s": run.tok_s,
                    "switches": run.switches(),
                    "k_histogram": run.k_histogram(),
                    "segments": [{"tok_s": tok_s} for tok_s in run.segment_tok_s()],
                }
                for name, run in self.published.items()
            },
        }


def compare(scenario: Scenario, progress: Callable[[int, int], None] | None = None) -> Comparison:
    """Run every policy through a scenario; `progress(done, total)` counts steps that policies choose."""
    world = World(scenario)
    table = profile_of(scenario)
    steps = sum(segment.steps for segment in scenario.segments)
    total = steps * 4
    done = 0

    def run(policy_of: Callable[[int], Policy]) -> Run:
        nonlocal done
        before = done
        result = world.run(
            policy_of, None if progress is None else lambda step: progress(before + step, total)
        )
        done += steps
        return result

    adaptive = adaptive_policy(scenario)
    ours = run(lambda _index: adaptive)
    fixed = {k: world.run_fixed([k] * len(scenario.segments)) for k in scenario.tiers}
    oracle = world.run_fixed(world.oracle_ks())
    ema, by_table = SglangEma(scenario), VllmTable(scenario, table)
    published = {
        ema.name: run(lambda _index: ema),
        by_table.name: run(lambda _index: by_table),
        VllmArgmax.name: run(lambda index: VllmArgmax(scenario, table, world.true_expected(index))),
    }
    return Comparison(world, ours, fixed, oracle, published)
