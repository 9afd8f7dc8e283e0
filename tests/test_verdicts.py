"""What compare.py says of simulated runs: how often it is wrong, and what a fit makes of a ladder."""

import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import growth
import stats
from report import Report
from simulate import CURVES, comparison_of, pays, reports, simulate

POWER = {"curve": CURVES["8 layers of width 256"], "noise": 0.005}
SLOW = POWER | {"curve": CURVES["slow"]}


@pytest.mark.parametrize("arguments, settings", [
    ((1.24, 3), POWER),
    ((1.41, 9), POWER),
    ((2.83, 5), SLOW | {"of_candidate": 0.5}),
    ((1.41, 3), SLOW | {"of_candidate": 2}),
    ((2.83, 5), POWER | {"of_seed": 0.02}),
    ((1.41, 9, "--ladder=4"), POWER),
    ((1.019, 9), POWER),  # as good as the baseline's own cost
    ((1.41, 3), POWER | {"of_candidate": 3}),
])  # fmt: skip
def test_nothing_seems_to_pay_where_nothing_does(arguments, settings):
    """The baseline's curve has a floor, the costs are not those of its ladder, and the candidate's noise is another."""
    noisy = settings.get("of_candidate") == 3
    shares, covered = simulate(comparison_of(*arguments), 300, np.random.default_rng(0), **settings)
    assert pays(shares) <= (0.06 if noisy else 0.04)
    assert all((0.88 if noisy else 0.92) <= share <= 0.99 for share in covered.values())


def test_what_pays_is_found():
    """Of effects as large as a comparison says that it finds with roughly 80%, about as many are found."""
    comparison, rng = comparison_of(1.41, 5), np.random.default_rng(1)
    least = np.mean([each.fits["candidate"].could_see(1.41) for each in reports(comparison, 50, rng, **POWER)])
    shares, _ = simulate(comparison, 200, rng, effect=least, **POWER)
    assert 0.6 < pays(shares) < 0.95


def rising(cost):
    """A baseline that is at its best at its own length."""
    return 1.619 + (0.02 if cost > 1 else -0.11) * math.log2(cost)


@pytest.mark.parametrize("effect", [0.0, 0.015])
def test_a_baseline_may_always_train_for_less(effect):
    """Longer training makes the baseline worse, so a candidate may beat it at its cost and not before."""
    settings = {"curve": rising, "noise": 0.005, "effect": effect}
    shares, _ = simulate(comparison_of(1.86, 3), 100, np.random.default_rng(0), **settings)
    assert pays(shares) == 0 and shares.get(stats.NO_LONGER if effect else "does not pay") > 0.5


def test_only_runs_whose_steps_have_the_same_tokens_share_offsets():
    results = [
        {"flops": flops, "seed": seed, "loss": 2 - flops / 10 + 0.02 * seed + 0.001 * ((seed + flops) % 2)}
        for flops in (1, 2, 4)
        for seed in (1, 2, 3)
    ]
    ladder, runs = results, [result | {"flops": 1.5} for result in results[:3]]
    shared, apart = (stats.CostCurve(ladder, runs, same_batches) for same_batches in (True, False))
    assert shared.shared and not apart.shared
    assert shared.gain({1.0: 1})[2] < apart.gain({1.0: 1})[2] / 2


@pytest.mark.parametrize("offsets, shared", [
    ([(0.02, 0.0, -0.02)] * 4, True),
    ([(0.02, 0.0, -0.02), (-0.02, 0.02, 0.0), (0.0, -0.02, 0.02), (0.02, -0.02, 0.0)], False),
])  # fmt: skip
def test_seeds_matter_where_they_lie_alike_at_all_lengths(offsets, shared):
    wobble = [0.001, -0.002, 0.001]
    ladder = [
        {"flops": flops, "seed": seed, "loss": 2.0 - flops + offset + wobble[(flops + seed) % 3]}
        for flops, of_length in enumerate(offsets, start=1)
        for seed, offset in enumerate(of_length)
    ]
    assert stats.seeds_matter(ladder) == shared


def test_a_rung_that_is_a_little_off_is_corrected():
    """At 1.02 times a rung's cost the baseline has gained 2 % of the slope, which the chord to the next understates."""
    curve = CURVES["8 layers of width 256"]
    ladder = [{"flops": flops, "seed": 1, "loss": curve(flops)} for flops in (1, 0.5, 2)]
    fit = stats.CostCurve(ladder, [{"flops": 1.02, "seed": 1, "loss": 2.0}])
    assert fit.loss(fit.at(1.02)) == pytest.approx(curve(1.02), abs=2e-4)
    assert fit.loss(fit.at(1.41)) > curve(1.41) + 0.005  # where there is no rung: a chord, for *does not pay* alone


def test_worth_is_the_cost_of_the_same_loss():
    curve = CURVES["8 layers of width 256"]

    def worth(loss, rungs=(1, 0.5, 2, 4)):
        noise = [1e-5, -1e-5]
        ladder = [{"flops": cost, "seed": s, "loss": curve(cost) + noise[s]} for cost in rungs for s in (0, 1)]
        runs = [{"flops": 3.0, "seed": s, "loss": loss - noise[s]} for s in (0, 1)]
        return stats.CostCurve(ladder, runs).worth()

    assert worth(curve(1.41)) == pytest.approx([1.41] * 3, rel=0.01)
    assert worth(curve(0.4)) == [0, 0, 0] and worth(curve(5)) == [math.inf] * 3
    assert worth(curve(1.41), rungs=(1, 0.5, 2))[1] == pytest.approx(1.48, abs=0.03)  # along a chord, so roughly


def of_length(steps, slope):
    """Return a report of three seeds: the candidate gains 0.01 at 400 steps, and `slope` more with each doubling.

    Sizes and costs are those of the runs: with committed results, a candidate's own are of another vocabulary.
    """
    shape = {"settings": {"max_iters": steps}, "tokens_per_step": 10, "batch": [1, 1, 10]}
    baseline, candidate = SimpleNamespace(**shape), SimpleNamespace(**shape)
    doublings = math.log2(steps / 400)
    losses = {"standard": 3 - 0.3 * doublings + 0.01 * doublings**2}
    losses["candidate"] = losses["standard"] - 0.01 - slope * doublings
    main = {}
    for name, flops in (("standard", steps), ("candidate", 1.1 * steps)):
        noise = zip((1, 2, 3), (-0.001, 0.0, 0.001))
        facts = {"flops": flops, "steps": steps, "parameters": 1000}
        main[name] = [{"loss": losses[name] + off, "seed": seed, **facts} for seed, off in noise]
    comparison = SimpleNamespace(baseline=baseline, timing=SimpleNamespace(is_known=lambda: False))
    candidates = {"standard": baseline, "candidate": candidate}
    report, others = object.__new__(Report), {"base": "standard", "others": ["candidate"], "lacking": 0}
    vars(report).update(comparison=comparison, candidates=candidates, main=main, fits={"candidate": None}, **others)
    return report


@pytest.mark.parametrize("slope", [-0.005, 0.004])
def test_how_a_gain_grows_with_training(slope):
    reports = [of_length(steps, slope) for steps in (1600, 400, 25600, 6400)]
    reports[2].lacking = 1  # a length whose runs are not all there is left out
    reports = growth.by_length(reports)
    assert [report.comparison.baseline.settings["max_iters"] for report in reports] == [400, 1600, 6400]
    assert [report.tokens_per_parameter() for report in reports] == [4, 16, 64]
    (found,) = growth.all_growths(reports)
    assert found.costs() == {"steps": 1, "operations": pytest.approx(1.1)}
    for cost in (1.0, 1.1):  # the baseline's loss is a parabola over the log of its length, so it is exact
        values, halves = found.gains(cost)
        for value, doublings in zip(values, (0, 2, 4)):
            more = math.log2(cost)
            longer = -0.3 * more + 0.01 * ((doublings + more) ** 2 - doublings**2)
            assert value == pytest.approx(0.01 + slope * doublings + longer, abs=1e-9)
        per_doubling, half = found.per_doubling(values, halves)
        assert per_doubling == pytest.approx(slope + 0.02 * math.log2(cost), abs=1e-9) and 0 < half < 0.002
    fewer, deeper = of_length(6400, slope), of_length(25600, slope)
    fewer.candidates.pop("candidate")  # more seeds of some of the candidates are no length
    assert growth.by_length([*reports, fewer]) == reports
    deeper.comparison.baseline.settings["n_layer"] = 4
    assert growth.by_length([*reports, deeper]) == []
    assert growth.by_length(reports[:1]) == growth.by_length([reports[0], reports[0]]) == []
