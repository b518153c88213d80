"""The promises of the controller on whole scenarios, beside every fixed K, an oracle and published rules."""

from pathlib import Path

import numpy as np
import pytest

from sglang_spec_ext.control.comparison import compare
from sglang_spec_ext.control.scenario import ScenarioError, load_scenario
from sglang_spec_ext.control.simulator import World

NAMES = (
    "scenario_example",
    *sorted(p.stem for p in (Path(__file__).parent / "vectors/scenarios").glob("*.json")),
)
STEADY_STEPS = 500  # a segment shorter than this is a transition


@pytest.fixture(scope="module", params=NAMES)
def comparison(request, scenario_text):
    return compare(load_scenario(scenario_text(request.param)))


def test_promises(comparison):
    run, world = comparison.adaptive, comparison.world
    assert run.tok_s >= 0.95 * comparison.oracle.tok_s
    fixed = {k: r.segment_tok_s() for k, r in comparison.fixed.items()}
    oracle_ks = world.oracle_ks()
    for index, (part, tok_s) in enumerate(zip(run.bounds(), run.segment_tok_s(), strict=True)):
        steps = part.stop - part.start
        if steps < STEADY_STEPS:
            continue
        assert tok_s >= 0.97 * max(rates[index] for rates in fixed.values()), index
        assert tok_s >= 0.98 * fixed[0][index], index
        assert run.switches(part) <= 10 * steps / 1000, index
        if oracle_ks[index] == 0:
            assert run.probe_fraction(part) <= 0.01, index
    assert run.tok_s >= 0.98 * comparison.fixed[0].tok_s
    assert set(run.ks) <= set(world.scenario.tiers)


def test_never_behind_a_published_rule(comparison):
    for name, rule in comparison.published.items():
        assert comparison.adaptive.tok_s >= 0.97 * rule.tok_s, name


def test_summary_has_the_documented_form(comparison):
    result = comparison.as_dict()
    assert result.keys() == {"adaptive", "fixed", "oracle", "published"}
    assert result["adaptive"].keys() == {"tok_s", "switches", "probe_fraction", "k_histogram", "segments"}
    assert result["adaptive"]["segments"][0].keys() == {"tok_s", "best_fixed_k", "best_fixed_tok_s"}
    assert result["fixed"].keys() == {str(k) for k in comparison.world.scenario.tiers}
    assert sum(result["adaptive"]["k_histogram"].values()) == len(comparison.adaptive.ks)


def test_sglang_rule_probes_half_of_the_steps_where_drafts_are_hopeless(scenario_text):
    """The published rule at K = 0 tries the smallest K at each next decision."""
    result = compare(load_scenario(scenario_text("hopeless_drafts"))).as_dict()
    at_zero = result["published"]["sglang_ema"]["k_histogram"]["0"]
    assert at_zero < 0.8 * 6000
    assert result["adaptive"]["k_histogram"]["0"] > 0.98 * 6000


def test_draws_follow_the_stated_probabilities(scenario_text):
    world = World(load_scenario(scenario_text("block_positions")))
    accepted = world.draws[1].accepted
    alphas = [0.85, 0.8, 0.7, 0.55, 0.4, 0.3, 0.2]
    got = [(accepted >= j).mean() for j in range(1, 8)]
    assert got == pytest.approx(np.cumprod(alphas), abs=5e-3)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda s: s.replace('"alpha": 0.8', '"alpha": 1.8', 1), "alpha"),
        (lambda s: s.replace('"steps": 2000', '"steps": 0', 1), "steps"),
        (lambda s: s.replace('"share": 1.0', '"share": 0.9', 1), "shares"),
        (lambda s: s.replace("[0, 1, 3, 5, 7]", "[0, 3, 1]"), "tiers"),
        (lambda s: s.replace('"profile_bias": 1.0', '"profile_bias": 0'), "profile_bias"),
        (lambda s: s.replace('"profile_bias": 1.0', '"profile_bias": [1.0]'), "profile_bias"),
        (lambda s: s.replace('"linear"', '"cubic"'), "kind"),
        (lambda s: s.replace('"seed": 0', '"seed": 0, "typo": 1'), "typo"),
        (lambda s: s.replace("[372, 0.00597]", "[372, 0.001]"), "verify_s_by_tokens"),
        (lambda s: s[:-40], "scenario"),
    ],
)
def test_a_broken_scenario_is_refused_by_name(scenario_text, change, named):
    text = scenario_text("scenario_example")
    broken = change(text)
    assert broken != text
    with pytest.raises(ScenarioError, match=named):
        load_scenario(broken)
