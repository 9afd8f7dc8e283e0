"""What compare.py says of simulated runs: how often it is wrong, and the statistics behind a verdict."""

import sys

import numpy as np
import pytest
import scipy.stats

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import stats
from simulate import Simulated, Truth, simulate


def group(*losses):
    return dict(enumerate(losses))


@pytest.mark.parametrize("kind", [
    {"cost": 1.0},
    {"cost": 1.86},
    {"cost": 1.4, "of_candidate": 2.0, "growth": 0.5},
    {"cost": 0.4, "of_candidate": 0.5},
    {"cost": 1.0, "of_seed": 0.03, "noise": 0.005},
    {"cost": 1.86, "drop": 0.1},
])  # fmt: skip
def test_where_nothing_pays_nothing_seems_to(kind):
    """The candidate is as good as the baseline at equal cost: *pays* and *does not pay* are both wrong."""
    shares, covered, _ = simulate(Truth(**kind), 60, np.random.default_rng(0), rates="none")
    assert shares.get(stats.PAYS, 0) <= 0.1 and shares.get(stats.FAILS, 0) <= 0.14 and covered > 0.85


def test_what_pays_is_found_and_costs_less_than_eight_seeds():
    shares, _, cost = simulate(Truth(gain=0.025), 60, np.random.default_rng(1), rates="none")
    assert shares.get(stats.PAYS, 0) > 0.85 and cost < 14


def test_looks_one_after_another_err_no_more_often():
    """Each is a command of its own, which knows the looks before."""
    kind = Truth(looks=tuple(map(str, range(3, 13))))
    shares, covered, _ = simulate(kind, 60, np.random.default_rng(0), rates="none")
    assert shares.get(stats.PAYS, 0) <= 0.1 and covered > 0.85


def test_as_many_seeds_as_said_decide():
    gain = stats.Gain(0.01, 0.01, 8)
    needed = gain.needed(5, 0.95)
    halves = [stats.Gain(0.01, 0.01 * (5 / n) ** 0.5, 8 * n / 5).half(0.95) for n in (needed - 1, needed)]
    assert halves[0] > 0.01 - 1e-9 > halves[1] and stats.Gain(0.02, 1e9, 8).needed(5, 0.95) == 1000


def test_what_is_far_worse_is_found_with_three_seeds():
    shares, _, cost = simulate(Truth(cost=3.9, gain=-0.4), 20, np.random.default_rng(2), rates="none")
    assert shares == {stats.FAILS: 1.0} and cost == pytest.approx(3 + 3 * 3.9)


def test_a_search_half_an_octave_off_is_corrected():
    """The best rate lies between two of the grid: the vertex finds it."""
    simulated = Simulated(Truth(noise=1e-6), np.random.default_rng(0))
    while runs := simulated.missing():
        for run in runs:
            simulated.do(run)
    assert simulated.rate(simulated.baseline) == pytest.approx(0.005, rel=0.02)


# -- one difference ------------------------------------------------------------------------------------------


def test_a_gain_is_welchs_or_that_of_pairs():
    runs, base = [1.0, 2.0, 4.0, 3.5], [1.2, 2.1, 4.4, 3.6]
    for paired, expected in ((True, scipy.stats.ttest_rel(base, runs)),
                             (False, scipy.stats.ttest_ind(base, runs, equal_var=False))):  # fmt: skip
        gain = stats.gain_of(group(*runs), group(*base), paired)
        assert gain.value == pytest.approx(np.mean(base) - np.mean(runs)) and gain.freedom == pytest.approx(expected.df)
        interval = expected.confidence_interval(0.95)
        assert gain.half(0.95) == pytest.approx((interval.high - interval.low) / 2)


def test_each_length_has_its_own_noise():
    """A longer baseline that scatters does not widen the interval over a shorter one."""
    rungs = {1.0: group(2.0, 2.001, 1.999), 2.0: group(1.9, 2.3, 1.7)}
    judged = judge(group(2.2, 2.201, 2.199), rungs, 2.0)
    assert judged.verdict == stats.FAILS and judged.rung == 1.0 and judged.gain.half(0.95) < 0.01


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.2])
def test_whether_seeds_matter_is_the_f_test_of_a_two_way_analysis_of_variance(shift):
    losses = np.random.default_rng(0).normal(size=(3, 5)) + shift * np.arange(5)
    rest = losses - losses.mean(0) - losses.mean(1, keepdims=True) + losses.mean()
    f = 3 * losses.mean(0).var(ddof=1) / ((rest**2).sum() / 8)
    assert stats.seeds_matter([group(*row) for row in losses]) == (scipy.stats.f.sf(f, 4, 8) < 0.02) == (shift == 1.2)
    assert not stats.seeds_matter([group(*losses[0])])  # with one variant there is nothing to test


# -- the verdict at a cost -----------------------------------------------------------------------------------


def tight(loss):
    return group(loss, loss + 0.001, loss - 0.001)


def judge(runs, rungs, cost, paired=False):
    return stats.judge(runs, rungs.__getitem__, cost, 0.95, paired)


def test_a_gain_that_does_not_matter_is_a_tie():
    """Where losses are equal up to rounding, the interval has no width of its own."""
    same = group(2.0, 2.0, 2.0)
    assert judge(group(1.9999, 1.9999, 1.9999), {1.0: same}, 1.0).verdict == stats.TIES
    assert judge(group(1.99, 1.99, 1.99), {1.0: same}, 1.0).verdict == stats.PAYS


def test_rungs_are_climbed_from_below():
    assert stats.needed_rungs(3.9) == [1, 2, 3.9] and stats.needed_rungs(4.0) == [1, 2, 4]
    assert stats.needed_rungs(1.0) == [1] and stats.needed_rungs(0.4) == [0.4]
    rungs = {1.0: tight(2.0), 2.0: tight(1.8)}
    assert judge(tight(1.85), rungs, 3.9)[0::2] == (stats.FAILS, 2.0)  # so that it need not be trained for 3.9
    rungs[3.9] = tight(1.65)
    assert judge(tight(1.7), rungs, 3.9)[0::2] == (stats.FAILS, 3.9)
    assert judge(tight(1.6), rungs, 3.9).verdict == stats.PAYS
    assert judge(tight(1.65), rungs, 3.9).verdict == stats.TIES


def test_pairs_decide_at_equal_length_alone():
    """Seeds shift both by as much as the gain, which pairs show. At another length the batches are others."""
    base, runs = group(2.0, 2.1, 2.2), group(1.95, 2.051, 2.149)
    assert judge(runs, {1.0: base}, 1.0, paired=True).verdict == stats.PAYS
    assert judge(base, {1.0: runs}, 1.0, paired=True).verdict == stats.FAILS
    assert judge(runs, {1.0: base}, 1.0).verdict == stats.UNDECIDED
    assert judge(runs, {1.0: group(3.0, 3.1, 3.2), 2.0: base}, 2.0, paired=True).verdict == stats.UNDECIDED


def test_the_lowest_loss_at_any_lower_cost_is_to_be_beaten():
    """The baseline is worse again at the candidate's cost, but not significantly."""
    rungs = {1.0: tight(2.0), 2.0: group(1.99, 2.03, 2.01)}
    assert judge(tight(1.9), rungs, 2.0)[0::2] == (stats.PAYS, 1.0)
    rungs[2.0] = tight(2.05)
    assert judge(tight(1.9), rungs, 2.0).verdict == stats.NO_LONGER
