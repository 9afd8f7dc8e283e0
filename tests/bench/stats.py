"""
Statistics of the experiments: what a loss owes to its method, and what to its seed or its cost.

Runs of one seed see the same batches and start, as far as their parameters are the same, from the same draws. So
methods are compared within seeds: loss = its method's + its seed's + noise, by least squares, the noise being as large
for all but what is set apart. Intervals are of 95 %, by Student's t. Whether a difference counts is decided by its
p-value with Holm's correction for all comparisons of its column.
"""

import math
import statistics

import numpy as np
from scipy.stats import CensoredData, logrank, permutation_test
from scipy.stats import t as student


class LinearModel:
    """Least squares of y on rows of named numbers; what a row does not name is 0 there."""

    def __init__(self, rows, y):
        self.names = list(dict.fromkeys(name for row in rows for name in row))
        X, y = self.columns(rows), np.array(y, dtype=float)
        self.inverse = np.linalg.pinv(X.T @ X)
        self.coefficients = self.inverse @ X.T @ y
        self.freedom = len(y) - np.linalg.matrix_rank(X)
        noise = y - X @ self.coefficients
        self.variance = noise @ noise / self.freedom if self.freedom else math.nan

    def columns(self, rows):
        return np.array([[row.get(name, 0.0) for name in self.names] for row in rows])

    def estimate(self, row):
        """The sum that a row stands for, its standard error, half the width of its interval, and p of its being 0."""
        (x,) = self.columns([row])
        value, error = float(x @ self.coefficients), math.sqrt(self.variance * (x @ self.inverse @ x))
        return value, error, student.ppf(0.975, self.freedom) * error, 2 * student.sf(abs(value) / error, self.freedom)


def holm(p):
    """Holm's corrected p-values, by name: taking what is below 0.05, all of it is true with 95 %."""
    by_name, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        by_name[name] = largest
    return by_name


def observations(groups, name="loss"):
    """(group, result, value) of all results, by the group's name; groups with a run that diverged are left out."""
    finite = {group: results for group, results in groups.items() if all(r[name] is not None for r in results)}
    seen = [(group, result, result[name]) for group, results in finite.items() for result in results]
    assert len({id(result) for _, result, _ in seen}) == len(seen), "a run counts once"
    return seen


def seed_of(result):
    return f"seed {result['run']['seed']}"


def linear_models(base, groups, name="loss", apart=(), of_cost=lambda flops: {}):
    """The LinearModel that each of `groups` is fitted in, as far as none of its runs diverged, by the group's name.

    `name` = its seed's + of_cost(its operations) + what the group has more than the runs `base`. All groups are fitted
    together, but for those in `apart`, which are fitted by themselves.
    """
    parts = [[group for group in groups if group not in apart], *([group] for group in apart if group in groups)]
    models = {}
    for part in parts:
        seen = observations({None: base} | {group: groups[group] for group in part}, name)
        rows = [
            of_cost(result["flops"]) | {seed_of(result): 1} | ({group: 1} if group else {}) for group, result, _ in seen
        ]
        model = LinearModel(rows, [value for *_, value in seen])
        models |= {group: model for group in part if group in model.names}
    return models


def of_groups(models):
    """What each group has more, {group: (difference, half its interval's width, corrected p)}."""
    estimates = {group: model.estimate({group: 1}) for group, model in models.items()}
    p = holm({group: estimate[3] for group, estimate in estimates.items()})
    return {group: (estimate[0], estimate[2], p[group]) for group, estimate in estimates.items()}


def differences(groups, name="loss", apart=()):
    """Each group's `name` less the first one's, {group: (difference, half its interval's width, corrected p)}."""
    (_, base), *others = groups.items()
    return of_groups(linear_models(base, dict(others), name, apart))


class CostCurve:
    """What one model's loss is after training of some cost: quadratic in the logarithm of the operations.

    It goes through `ladder`, runs of that model of several lengths, and each of `groups` of other models lies some
    difference off it: loss = c₁ ln C + c₂ (ln C)² + its seed's + its group's.
    """

    def __init__(self, ladder, groups, apart=()):
        self.unit = statistics.fmean(result["flops"] for result in ladder)
        self.range = [pick(result["flops"] for result in ladder) for pick in (min, max)]
        self.models = linear_models(ladder, groups, apart=apart, of_cost=self.at)
        self.flops = {group: results[0]["flops"] for group, results in groups.items() if group in self.models}

    def at(self, flops):
        x = math.log(flops / self.unit)
        return {"ln C": x, "(ln C)²": x * x}

    def differences(self):
        """Each group's loss less that at its cost: {group: (difference, half its interval's width, corrected p)}."""
        return of_groups(self.models)

    def equal_cost(self, group):
        """The operations that take the ladder's model to the loss of `group`, and the ends of their interval.

        At the interval's ends the group's loss is just told apart from the curve; infinite or 0 is an end that lies
        beyond the ladder.
        """
        costs = np.geomspace(*self.range, 400)
        estimates = [self.models[group].estimate(self.above(group, C)) for C in costs]
        above = np.array([estimate[0] for estimate in estimates])  # grows with the cost
        low, high = (np.array([sign * half for _, _, half, _ in estimates]) for sign in (-1, 1))
        return [self.where_zero(costs, line) for line in (above, above + high, above + low)]

    def above(self, group, flops):
        """A row of the model: the group's loss less that of the curve after so many operations."""
        there, here = self.at(self.flops[group]), self.at(flops)
        return {group: 1} | {name: there[name] - here[name] for name in there}

    @staticmethod
    def where_zero(costs, rising):
        """The cost at which a rising line crosses 0."""
        if rising[0] > 0:
            return 0.0
        return float(np.interp(0, rising, costs, right=math.inf))


def slope(points):
    """How y grows with x, and half its interval's width, of points (x, y, y's standard error, degrees of freedom)."""
    x, y, error, freedom = np.array(points).T
    weights = 1 / error**2
    x = x - np.average(x, weights=weights)
    information = (weights * x * x).sum()
    return (weights * x * y).sum() / information, student.ppf(0.975, freedom.sum()) / math.sqrt(information)


def log_rank(steps, others, limit):
    """p of the log-rank test between the steps that runs and others took to a goal; infinity: not in `limit` steps.

    It is exact: the share of all ways to divide the runs that set the two sides at least as far apart.
    """
    if len({*steps, *others}) == 1:
        return 1.0  # all alike: the test would divide 0 by 0

    def censored(steps):
        reached = [step for step in steps if step < math.inf]
        return CensoredData(uncensored=reached, right=[limit] * (len(steps) - len(reached)))

    def distance(steps, others):
        return abs(logrank(censored(steps), censored(others)).statistic)

    return permutation_test((steps, others), distance, vectorized=False, alternative="greater").pvalue


def in_words(difference, half, p, higher_is_better=False, digits=3):
    """The difference ± half its interval's width, and better or worse where the corrected p is below 0.05."""
    better = (difference > 0) == higher_is_better
    verdict = ("better" if better else "worse") if p < 0.05 else ""
    return f"{difference:+.{digits}f} ± {half:.{digits}f} {verdict}".strip()


def compare(groups, name="loss", apart=()):
    """The differences to the first of `groups` in words, by the group's name: nothing for the first itself."""
    found = differences(groups, name, apart)
    texts = {group: in_words(*found[group], "accuracy" in name) if group in found else "diverged" for group in groups}
    return texts | {next(iter(groups)): ""}
