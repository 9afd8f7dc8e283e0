"""
How much of a loss is due to the variant, the seed or the cost, and what that decides.

A loss is that of a run of one seed. Noise differs by variant and by length of training, so each has its own variance.
"""

import math
from typing import NamedTuple

import numpy as np
from scipy.special import fdtrc, stdtr, stdtrit  # the distributions of F and of Student's t

TIE = 0.02  # nats: a candidate whose whole interval is nearer to 0 ties with the baseline
SAME_COST = 0.005  # relative difference up to which costs count as equal
# Pocock's constants: with so many looks at growing data, an error of 5% in all leaves this much for each look
ERROR_OF_A_LOOK = {1: 0.05, 2: 0.0294, 3: 0.0221, 4: 0.0182, 5: 0.0158}

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
        return self.error * float(stdtrit(self.freedom, (1 + level) / 2)) if self.error else 0.0

    def detectable(self, level):
        """Return the gain that is found, at this level, with a probability of roughly 80%."""
        return self.half(level) + 0.84 * self.error


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


def mean(group):
    return sum(group.values()) / len(group)


def noise_of(losses):
    """Return the degrees of freedom and the variance that losses (groups, seeds) have without each one's mean."""
    left = losses - losses.mean(axis=1, keepdims=True)
    left = left - left.mean(axis=0)
    freedom = (len(losses) - 1) * (losses.shape[1] - 1)
    return freedom, (left**2).sum() / freedom if freedom else math.nan


def seeds_matter(groups):
    """Return whether seeds shift the losses of all groups alike, {seed: loss} each: by an F test (p < 0.05)."""
    losses = np.array([[group[seed] for seed in groups[0]] for group in groups])
    freedom, variance = noise_of(losses)
    of_seeds = len(losses) * np.var(losses.mean(axis=0), ddof=1)
    return bool(variance > 0 and fdtrc(losses.shape[1] - 1, freedom, of_seeds / variance) < 0.05)


# -- the verdict at a cost -------------------------------------------------------------------------------------


class Judgement(NamedTuple):
    verdict: str  # "" while the baseline has not been trained at the cost `needs`
    gain: Gain  # over the baseline at the cost `rung`
    rung: float
    needs: float = 0.0


def judge(runs, rungs, cost, level, paired, spread=0.0):
    """Return the Judgement of a candidate of a cost, in units of the baseline's own, on the evidence that there is.

    `runs` are the candidate's, `rungs` the baseline's by cost, {seed: loss} each. A candidate must beat the lowest mean
    loss that the baseline reaches at its cost or below. So the rungs are climbed from below, and the first one that is
    significantly better decides. `spread` is the relative uncertainty of the cost itself.
    """
    for rung in sorted({*needed_rungs(cost), *(rung for rung in rungs if rung < cost)}):
        length = nearest(rung, rungs)
        if length is None:
            return Judgement("", gain_of(runs, rungs[1.0], paired), 1.0, needs=rung)
        gain = gain_of(runs, rungs[length], paired and length == 1)
        if gain.value + gain.half(level) < 0:
            return Judgement(FAILS, gain, length)
    last = length
    lowest = min((rung for rung in rungs if rung <= last), key=lambda rung: mean(rungs[rung]))
    gain = gain_of(runs, rungs[lowest], paired and lowest == 1)
    if spread and not is_same(cost, 1):  # what a cost that is a little off changes, along the baseline's slope
        slope = (mean(rungs[1.0]) - mean(rungs[last])) / math.log(last)
        gain = gain._replace(error=math.hypot(gain.error, slope * spread))
    if lowest != last:
        rise = gain_of(rungs[lowest], rungs[last], False)
        if rise.value > rise.half(0.9):  # a one-sided test (p < 0.05)
            return Judgement(NO_LONGER, gain, lowest)
    half = gain.half(level)
    if gain.value > half:
        return Judgement(PAYS, gain, lowest)
    return Judgement(TIES if abs(gain.value) + half < TIE else UNDECIDED, gain, lowest)


def needed_rungs(cost):
    """Return the costs at which the baseline must be trained: its own, twice that and so on, and the candidate's."""
    powers = [2.0**i for i in range(int(math.log2(cost)) + 1)] if cost >= 1 else []
    return [rung for rung in powers if not is_same(rung, cost)] + [cost]


def is_same(cost, other):
    return abs(cost / other - 1) <= SAME_COST


def nearest(cost, rungs):
    """Return the rung at a cost, or None."""
    same = [rung for rung in rungs if is_same(rung, cost)]
    return min(same, key=lambda rung: abs(rung - cost), default=None)


def worth(loss, rungs):
    """Return the cost at which the baseline reaches a loss, along straight lines over log cost between its rungs.

    None if that is less than its shortest training, or more than its longest.
    """
    costs = sorted(rungs)
    losses = np.minimum.accumulate([mean(rungs[cost]) for cost in costs])
    if not losses[0] >= loss >= losses[-1]:
        return None
    return math.exp(np.interp(-loss, -losses, np.log(costs)))


def detectable(noise, seeds, level):
    """Return the gain that runs of so many seeds find with roughly 80%, for runs of this standard deviation."""
    return Gain(0.0, noise * math.sqrt(2 / seeds), 2 * seeds - 2).detectable(level)


# -- tables of many groups (tasks.py) --------------------------------------------------------------------------


def holm(p):
    """Return p-values with Holm's correction, by name: with 95% probability none is below 0.05 by chance."""
    by_name, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        by_name[name] = largest
    return by_name


def differences(groups, name="loss"):
    """Return each group's `name` less the first one's, {group: (difference, half its interval's width, corrected p)}.

    `name` = its group's + its seed's + noise, all groups with the same seeds. Those with a run that diverged are out.
    """
    first, *_ = groups
    finite = {group: results for group, results in groups.items() if not has_diverged(results, name)}
    if first not in finite or len(finite) < 2:
        return {}
    values = {group: {one["run"]["seed"]: one[name] for one in results} for group, results in finite.items()}
    table = np.array([[of_seed[seed] for seed in values[first]] for of_seed in values.values()])
    freedom, variance = noise_of(table)
    gains = {
        group: Gain(mean(values[group]) - mean(values[first]), math.sqrt(2 * variance / table.shape[1]), freedom)
        for group in values
        if group != first
    }
    p = holm({group: 2 * stdtr(freedom, -abs(gain.value) / gain.error) for group, gain in gains.items()})
    return {group: (gain.value, gain.half(0.95), p[group]) for group, gain in gains.items()}


def has_diverged(results, name="loss"):
    return any(result[name] is None for result in results)


def compare(groups, name="loss"):
    """Return, by group: its difference to the first ± half the interval's width, better or worse where p < 0.05."""
    texts = {group: "diverged" if has_diverged(results, name) else "" for group, results in groups.items()}
    for group, (difference, half, p) in differences(groups, name).items():
        word = "better" if (difference > 0) == ("accuracy" in name) else "worse"
        texts[group] = f"{difference:+.3f} ± {half:.3f} {word if p < 0.05 else ''}".strip()
    return texts
