"""What compare.py says of simulated runs: how often it is wrong, and the statistics behind a verdict."""

import sys

import numpy as np
import pytest
import scipy.stats

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import stats
from simulate import Simulated, Truth, simulate


@pytest.mark.parametrize("kind", [
    {"cost": 1.0},
    {"cost": 1.86},
    {"cost": 1.4, "of_candidate": 2.0, "growth": 0.5},
    {"cost": 0.4, "of_candidate": 0.5},
    {"cost": 1.0, "of_seed": 0.03, "noise": 0.005},
    {"cost": 1.86, "drop": 0.1},
    {"commands": [[n] for n in range(3, 13)]},  # one after another; each knows the looks before
])  # fmt: skip
def test_where_nothing_pays_nothing_seems_to(kind):
    """The candidate is as good as the baseline at equal cost: *pays* and *does not pay* are both wrong."""
    pays, fails, covered, _ = simulate(Truth(**kind), 60, np.random.default_rng(0), rates="none")
    assert pays <= 0.1 and fails <= 0.14 and covered > 0.85


def test_what_pays_is_found_with_less_than_eight_seeds():
    pays, _, _, runs = simulate(Truth(gain=0.025), 60, np.random.default_rng(1), rates="none")
    assert pays > 0.85 and runs < 14


def test_what_is_far_worse_is_found_with_three_seeds():
    _, fails, _, runs = simulate(Truth(cost=3.9, gain=-0.4), 20, np.random.default_rng(2), rates="none")
    assert fails == 1 and runs == 2 * 3


def test_a_search_half_an_octave_off_is_corrected():
    """The best rate lies between two of the grid: the vertex finds it."""
    simulated = Simulated(Truth(noise=1e-6), np.random.default_rng(0))
    assert simulated.rate(simulated.baseline) == pytest.approx(0.005, rel=0.02)


# -- one difference ------------------------------------------------------------------------------------------


def test_a_gain_is_welchs():
    runs, base = [1.0, 2.0, 4.0, 3.5], [1.2, 2.1, 4.4, 3.6, 3.0]
    expected = scipy.stats.ttest_ind(base, runs, equal_var=False)
    gain = stats.gain_of(runs, base, 0.95)
    assert gain.value == pytest.approx(np.mean(base) - np.mean(runs)) and gain.freedom == pytest.approx(expected.df)
    interval = expected.confidence_interval(0.95)
    assert gain.half == pytest.approx((interval.high - interval.low) / 2)


def test_as_many_seeds_as_said_decide():
    gain = lambda n: stats.Gain(0.01, 0.01 * (5 / n) ** 0.5, 8 * n / 5, 0.95)
    needed = gain(5).needed(5)
    assert [gain(n).verdict for n in (needed - 1, needed)] == [stats.UNDECIDED, stats.PAYS]
    assert stats.Gain(0.02, 1e9, 8, 0.95).needed(5) == 1000


def test_a_gain_that_does_not_matter_is_a_tie():
    """Where losses are equal up to rounding, the interval has no width of its own."""
    assert stats.gain_of([1.9999] * 3, [2.0] * 3, 0.95).verdict == stats.TIES
    assert stats.gain_of([1.99] * 3, [2.0] * 3, 0.95).verdict == stats.PAYS


# -- the verdict at a cost -----------------------------------------------------------------------------------


def tight(loss):
    return [loss, loss + 0.001, loss - 0.001]


def judge(runs, rungs, cost):
    verdict, _, rung = stats.judge(runs, rungs.__getitem__, cost, 0.95)
    return verdict, rung


def test_rungs_are_climbed_from_below():
    assert stats.needed_rungs(3.9) == [1, 2, 3.9] and stats.needed_rungs(4.0) == [1, 2, 4]
    assert stats.needed_rungs(1.0) == [1] and stats.needed_rungs(0.4) == [0.4]
    rungs = {1.0: tight(2.0), 2.0: tight(1.8)}
    assert judge(tight(1.85), rungs, 3.9) == (stats.FAILS, 2.0)  # so that it need not be trained for 3.9
    rungs[3.9] = tight(1.65)
    assert judge(tight(1.7), rungs, 3.9) == (stats.FAILS, 3.9)
    assert judge(tight(1.6), rungs, 3.9) == (stats.PAYS, 3.9)
    assert judge(tight(1.65), rungs, 3.9) == (stats.TIES, 3.9)


def test_each_length_has_its_own_noise():
    """A longer baseline that scatters does not widen the interval over a shorter one."""
    assert judge(tight(2.2), {1.0: tight(2.0), 2.0: [1.9, 2.3, 1.7]}, 2.0) == (stats.FAILS, 1.0)


def test_the_lowest_loss_at_any_lower_cost_is_to_be_beaten():
    """The baseline is worse again at the candidate's cost."""
    rungs = {1.0: tight(2.0), 2.0: [1.99, 2.03, 2.01]}
    assert judge(tight(1.9), rungs, 2.0) == (stats.PAYS, 1.0)
    assert judge(tight(2.0), rungs, 2.0) == (stats.TIES, 1.0)
