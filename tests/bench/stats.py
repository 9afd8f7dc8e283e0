"""
How much of a loss is due to the variant, the seed or the cost, and what that decides.

A loss is that of a run of one seed. Noise differs by variant and by length of training, so each has its own variance.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import fdtrc, stdtrit  # the distributions of F and of Student's t

MOST_RATES = 24  # learning rates tried in one search
TIE = 0.02  # nats: a candidate whose whole interval is nearer to 0 ties with the baseline
LEAST = 0.001  # nats: a gain must be larger to matter, so half of an interval is never less
ERROR = 0.05  # of all intervals of a candidate: each of its looks has an equal share (Bonferroni)

PAYS, FAILS, TIES = "pays", "does not pay", "tie"
UNDECIDED, NO_LONGER = "undecided", "longer training hurts the baseline"


# -- one difference of means -----------------------------------------------------------------------------------


class Gain(NamedTuple):
    """By how much a candidate's mean loss is lower than the baseline's, in nats per token."""

    value: float
    error: float  # standard error
    freedom: float  # degrees of freedom of its estimate

    def half(self, level):
        """Return the half-width of the interval of a level such as 0.95, by Student's t."""
        return max(LEAST, self.error * float(stdtrit(self.freedom, (1 + level) / 2)))

    def decides(self, level):
        return abs(self.value) > self.half(level) or abs(self.value) + self.half(level) < TIE

    def needed(self, seeds, level):
        """Return how many seeds, up to a thousand, would decide if this gain of `seeds` seeds and its noise stay."""
        later = lambda n: self._replace(error=self.error * (seeds / n) ** 0.5, freedom=self.freedom * n / seeds)
        return next((n for n in range(seeds + 1, 1000) if later(n).decides(level)), 1000)


def gain_of(runs, base, paired):
    """Return the Gain of a candidate's runs over the baseline's: {seed: loss} each, at least two."""
    value = mean(base) - mean(runs)
    if paired:  # equal seeds saw equal batches, so their differences have less noise
        differences = [base[seed] - runs[seed] for seed in runs.keys() & base.keys()]
        return Gain(value, math.sqrt(np.var(differences, ddof=1) / len(differences)), len(differences) - 1)
    # Welch: the variances of two means add up, and so do, weighted, their uncertainties
    parts = [(np.var(list(group.values()), ddof=1) / len(group), len(group) - 1) for group in (runs, base)]
    total = sum(variance for variance, _ in parts)
    spread = sum(variance**2 / freedom for variance, freedom in parts)
    return Gain(value, math.sqrt(total), total**2 / spread if spread else 1.0)


def next_rate(scores):
    """Return the learning rate to try next: a factor of two past the best of {rate: loss}, unless it has neighbors.

    Of equal ones the lowest is the best, so where all runs diverge the rate falls. None ends the search.
    """
    best = min(sorted(scores), key=scores.get)
    if len(scores) >= MOST_RATES or min(scores) < best < max(scores):
        return None
    return best / 2 if best == min(scores) else 2 * best


def mean(group):
    return sum(group.values()) / len(group)


def noise_of(losses):
    """Return the degrees of freedom and the variance that losses (groups, seeds) have without each one's mean."""
    left = losses - losses.mean(axis=1, keepdims=True)
    left = left - left.mean(axis=0)
    freedom = (len(losses) - 1) * (losses.shape[1] - 1)
    return freedom, (left**2).sum() / freedom if freedom else math.nan


def seeds_matter(groups):
    """Return whether seeds shift the losses of all groups alike, {seed: loss} each: by an F test (p < 0.02)."""
    losses = np.array([[group[seed] for seed in groups[0]] for group in groups])
    freedom, variance = noise_of(losses)
    of_seeds = len(losses) * np.var(losses.mean(axis=0), ddof=1)
    return bool(variance > 0 and fdtrc(losses.shape[1] - 1, freedom, of_seeds / variance) < 0.02)


# -- the verdict at a cost -------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    verdict: str
    gain: Gain  # over the baseline at the cost `rung`
    rung: float


def judge(runs, baseline_at, cost, level, paired):
    """Return the Judgement of a candidate of a cost, in units of the baseline's own.

    `runs` are the candidate's losses, baseline_at(rung) those of the baseline at a cost, {seed: loss} each. A candidate
    must beat the lowest mean loss that the baseline reaches at its cost or below. So the rungs are climbed from below,
    and the first one that is significantly better decides.
    """
    rungs, gains = {}, {}
    for rung in needed_rungs(cost):
        rungs[rung] = baseline_at(rung)
        gains[rung] = gain = gain_of(runs, rungs[rung], paired and rung == 1)
        if gain.value + gain.half(level) < 0:
            return Judgement(FAILS, gain, rung)
    lowest = min(rungs, key=lambda rung: mean(rungs[rung]))
    gain, rise = gains[lowest], gain_of(rungs[lowest], rungs[cost], False)
    if rise.value > rise.half(0.9):  # a one-sided test (p < 0.05)
        verdict = NO_LONGER
    elif gain.decides(level):
        verdict = PAYS if gain.value > gain.half(level) else TIES
    else:
        verdict = UNDECIDED
    return Judgement(verdict, gain, lowest)


def needed_rungs(cost):
    """Return the costs at which the baseline must be trained: its own, twice that and so on, and the candidate's."""
    powers = range(math.ceil(math.log2(cost)))  # none where the candidate costs no more than the baseline
    return [*(2.0**i for i in powers), cost]


# -- tables of many groups (tasks.py) --------------------------------------------------------------------------


def differences(groups):
    """Return, by name, how much a group's mean is above the first one's ± half the width of its 95% interval.

    `groups` are {name: numbers}, None for a run that diverged. A number is its group's + its seed's + noise; all groups
    have the same seeds. The intervals are not corrected for the number of groups.
    """
    texts = {name: "diverged" if None in numbers else "" for name, numbers in groups.items()}
    first, *others = groups
    if texts[first]:
        return texts
    others = [name for name in others if not texts[name]]
    freedom, variance = noise_of(np.array([groups[name] for name in (first, *others)]))
    error = math.sqrt(2 * variance / len(groups[first]))
    for name in others:
        gain = Gain(np.mean(groups[name]) - np.mean(groups[first]), error, freedom)
        texts[name] = f"{gain.value:+.3f} ± {gain.half(0.95):.3f}"
    return texts
