"""
How much of a difference in loss is due to chance, and what that decides.

A loss is that of a run of one seed. Noise differs by variant and by length of training, so each has its own variance.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import stdtrit  # the distribution of Student's t

TIE = 0.02  # nats: a candidate whose whole interval is nearer to 0 ties with the baseline
LEAST = 0.001  # nats: a gain must be larger to matter, so half of an interval is never less
ERROR = 0.05  # of all intervals of a candidate: each of its looks has an equal share (Bonferroni)
MOST_RATES = 24  # learning rates tried in one search

PAYS, FAILS, TIES, UNDECIDED = "pays", "does not pay", "tie", "undecided"


class Gain(NamedTuple):
    """By how much a candidate's mean loss is lower than the baseline's, in nats per token."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom of its estimate
    level: float  # of its interval, such as 0.95

    @property
    def half(self):
        """The half-width of its interval, by Student's t."""
        return max(LEAST, self.error * float(stdtrit(self.freedom, (1 + self.level) / 2)))

    @property
    def verdict(self):
        if abs(self.value) > self.half:
            return PAYS if self.value > 0 else FAILS
        return TIES if abs(self.value) + self.half < TIE else UNDECIDED

    def needed(self, seeds):
        """Return how many seeds, up to a thousand, would decide if this gain of `seeds` seeds and its noise stay."""
        later = lambda n: self._replace(error=self.error * (seeds / n) ** 0.5, freedom=self.freedom * n / seeds)
        return next((n for n in range(seeds + 1, 1000) if later(n).verdict != UNDECIDED), 1000)


def gain_of(runs, base, level):
    """Return the Gain of a candidate's losses over the baseline's, by Welch's t test."""
    parts = [(np.var(losses, ddof=1) / len(losses), len(losses) - 1) for losses in (runs, base)]
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / freedom for variance, freedom in parts)
    return Gain(float(np.mean(base) - np.mean(runs)), math.sqrt(total), total**2 / spread if spread else 1.0, level)


def judge(runs, baseline_at, cost, level):
    """Return the verdict on a candidate of a cost, in units of the baseline's, its Gain, and over which baseline.

    `runs` are its losses, baseline_at(rung) those of the baseline at a cost. A candidate must beat the lowest mean loss
    that the baseline reaches at its cost or below. So the rungs are climbed from below, and the first one that is
    significantly better decides.
    """
    rungs = {}
    for rung in needed_rungs(cost):
        rungs[rung] = baseline_at(rung)
        gain = gain_of(runs, rungs[rung], level)
        if gain.verdict == FAILS:
            return FAILS, gain, rung
    lowest = min(rungs, key=lambda rung: np.mean(rungs[rung]))
    gain = gain_of(runs, rungs[lowest], level)
    return gain.verdict, gain, lowest


def needed_rungs(cost):
    """Return the costs at which the baseline must be trained: its own, twice that and so on, and the candidate's."""
    return [*(2.0**i for i in range(math.ceil(math.log2(cost)))), cost]


# -- learning rates ----------------------------------------------------------------------------------------------


def next_rate(scores):
    """Return the learning rate to try next: a factor of two past the best of {rate: loss}, unless it has neighbors.

    Of equal ones the lowest is the best, so where all runs diverge the rate falls. None ends the search.
    """
    best = min(sorted(scores), key=scores.get)
    if len(scores) >= MOST_RATES or min(scores) < best < max(scores):
        return None
    return best / 2 if best == min(scores) else 2 * best


def vertex(losses):
    """Return the rate at the vertex of the parabola through the best of {rate: loss} and its neighbors, to two digits.

    The parabola is over the logarithm of the rate. If a neighbor has diverged, the best is returned.
    """
    rates = sorted(losses)
    best = min(rates, key=losses.get)
    near = rates[rates.index(best) - 1 :][:3]
    y = [losses[rate] for rate in near]
    if math.inf in y:
        return best
    curvature, slope, _ = np.polyfit(np.log(np.array(near) / best), y, 2)
    return float(f"{best * math.exp(-slope / (2 * curvature)):.2g}") if curvature > 0 else best
