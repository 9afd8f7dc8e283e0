"""
Statistics of the experiments: what a loss owes to its method, and what to its seed or its cost.

Runs of one seed and length see the same batches and start, as far as their parameters are the same, from the same
draws. So methods are compared within seeds: loss = its method's + its seed's + noise, by least squares. Intervals are
of 95 %, by Student's t. Where many differences are called better or worse, their p-values have Holm's correction.
"""

import math

import numpy as np
from scipy.stats import CensoredData, logrank, permutation_test
from scipy.stats import f as f_distribution
from scipy.stats import t as student


class LinearModel:
    """Least squares of y on rows of named numbers; what a row does not name is 0 there."""

    def __init__(self, rows, y):
        self.names = list(dict.fromkeys(name for row in rows for name in row))
        X, y = self.columns(rows), np.array(y, dtype=float)
        self.inverse = np.linalg.pinv(X.T @ X)
        self.coefficients = self.inverse @ X.T @ y
        self.freedom = len(y) - np.linalg.matrix_rank(X)
        self.X, self.noise = X, y - X @ self.coefficients
        self.variance = self.noise @ self.noise / self.freedom if self.freedom else math.nan

    def columns(self, rows):
        return np.array([[row.get(name, 0.0) for name in self.names] for row in rows])

    def estimate(self, row):
        """Return the sum that a row stands for, its standard error, half its interval's width, and p of its being 0."""
        (x,) = self.columns([row])
        error = math.sqrt(self.variance * (x @ self.inverse @ x))
        return by_students_t(float(x @ self.coefficients), error, self.freedom)


def by_students_t(value, error, freedom):
    """Return (value, its standard error, half the width of its interval of 95 %, p of its being 0)."""
    p = 2 * student.sf(abs(value) / error, freedom) if error else float(value == 0)
    return value, error, student.ppf(0.975, freedom) * error, p


def holm(p):
    """Return p-values with Holm's correction, by name: with 95 % none that is below 0.05 is there by chance."""
    by_name, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        by_name[name] = largest
    return by_name


def differences(groups, name="loss"):
    """Return each group's `name` less the first one's, {group: (difference, half its interval's width, corrected p)}.

    `name` = its group's + its seed's + noise, which is as large for all. Groups with a run that diverged are left out,
    and if the first is one of them there is nothing to compare with.
    """
    first, *others = groups
    if has_diverged(groups[first], name):
        return {}
    finite = {group: results for group, results in groups.items() if not has_diverged(results, name)}
    seen = [(group, result) for group, results in finite.items() for result in results]
    assert len({id(result) for _, result in seen}) == len(seen), "a run counts once"
    rows = [{group: 1, f"seed {result['run']['seed']}": 1} for group, result in seen]
    model = LinearModel(rows, [result[name] for _, result in seen])
    estimates = {group: model.estimate({group: 1, first: -1}) for group in others if group in finite}
    p = holm({group: estimate[3] for group, estimate in estimates.items()})
    return {group: (estimate[0], estimate[2], p[group]) for group, estimate in estimates.items()}


def has_diverged(results, name="loss"):
    return any(result[name] is None for result in results)


class CostCurve:
    """A candidate's loss beside the baseline's, whose loss by cost is known from runs of several lengths, the ladder.

    Between its lengths the baseline's loss is the straight line over the logarithm of the cost. Every length has its
    mean, and so has the candidate. Runs of one length that share a seed share an offset. Runs of different lengths
    share it too if the baseline's do (`seeds_matter`). The candidate's noise is taken to be as large as the baseline's,
    unless its seeds lie clearly farther apart (`split_noise`). No other candidate is in the fit, so none can make this
    one's interval wide or narrow.
    """

    def __init__(self, ladder, runs):
        """Take results: those of the baseline, of all lengths, and the candidate's. None of them has diverged."""
        self.steps, self.flops = runs[0]["steps"], runs[0]["flops"]
        self.lengths = dict(sorted({result["flops"]: result["steps"] for result in ladder}.items()))  # {cost: steps}
        self.seeds, self.shared = {result["seed"] for result in runs}, seeds_matter(ladder)
        rows = [{result["flops"]: 1} | self.seed_of(result) for result in ladder]
        rows += [{"candidate": 1} | self.seed_of(result) for result in runs]
        self.model = LinearModel(rows, [result["loss"] for result in ladder + runs])
        self.noise = self.split_noise(np.arange(len(rows)) >= len(ladder))

    def shares_seeds(self, steps):
        """Say whether runs of so many steps share their seeds' offsets with others: a rung's with the candidate's."""
        return self.shared or steps == self.steps and steps in self.lengths.values()

    def seed_of(self, result):
        return {f"seed {result['seed']}": 1} if self.shares_seeds(result["steps"]) else {}

    def mean(self, group, steps, weight=1.0):
        """Return the row of a group's mean loss, over the seeds where it shares theirs."""
        share = weight / len(self.seeds) if self.shares_seeds(steps) else 0.0
        return {group: weight} | {f"seed {seed}": share for seed in self.seeds}

    def baseline(self, flops, weight=1.0):
        """Return the row of the baseline's loss at a cost, or None beyond the ladder."""
        costs = list(self.lengths)
        if not 0.999 * costs[0] <= flops <= 1.001 * costs[-1]:
            return None
        place = float(np.interp(math.log(flops), np.log(costs), range(len(costs))))
        below = min(int(place), len(costs) - 1)
        above = min(below + 1, len(costs) - 1)
        rows = [self.mean(costs[below], self.lengths[costs[below]], weight * (1 - place + below))]
        rows.append(self.mean(costs[above], self.lengths[costs[above]], weight * (place - below)))
        return add(*rows)

    def split_noise(self, own):
        """Return (rows, variance, degrees of freedom) of the candidate's and the baseline's noise, or of both together.

        They are two if the candidate's variance is larger, by an F test at p < 0.2. So lenient a test keeps the
        intervals of a candidate right whose seeds are three times as far apart, and costs the others little.
        """
        X, noise = self.model.X, self.model.noise
        leverage = np.einsum("ij,jk,ik->i", X, self.model.inverse, X)
        parts = []
        for rows in (own, ~own):
            freedom = (1 - leverage)[rows].sum()
            parts.append((rows, noise[rows] @ noise[rows] / freedom if freedom > 0.5 else math.nan, freedom))
        (_, variance, freedom), (_, of_baseline, freedom_of_baseline) = parts
        if f_distribution.sf(variance / of_baseline, freedom, freedom_of_baseline) < 0.2:
            return parts
        return [(own | ~own, self.model.variance, self.model.freedom)]

    def estimate_row(self, row):
        """Return (the sum that a row stands for, its standard error, half its interval's width, p of its being 0).

        The variances of two kinds of noise add up, with the degrees of freedom of Welch and Satterthwaite.
        """
        (x,) = self.model.columns([row])
        weights = self.model.X @ self.model.inverse @ x  # of the losses, in the sum
        parts = [(variance * (weights[rows] @ weights[rows]), freedom) for rows, variance, freedom in self.noise]
        value, total = float(x @ self.model.coefficients), sum(part for part, _ in parts)
        spread = sum(part**2 / freedom for part, freedom in parts if freedom)
        freedom = total**2 / spread if spread else self.model.freedom or math.nan
        return by_students_t(value, math.sqrt(total), freedom)

    def estimate(self, flops):
        """Return the candidate's loss less the baseline's at a cost, as `estimate_row` does; None beyond the ladder."""
        other = self.baseline(flops, weight=-1)
        return other and self.estimate_row(add(self.mean("candidate", self.steps), other))

    def gain(self, flops, other):
        """Return by how much the baseline's loss is lower at a cost than at the cost `other`."""
        (x,) = self.model.columns([add(self.baseline(other), self.baseline(flops, weight=-1))])
        return float(x @ self.model.coefficients)

    def worth(self):
        """Return (low, worth, high): the cost that brings the baseline to the candidate's loss, and its interval.

        At an end the candidate is just told apart from the baseline. What lies beyond the ladder is 0 or infinite.
        """
        costs = np.geomspace(min(self.lengths), max(self.lengths), 200)
        above, _, half, _ = np.array([self.estimate(flops) for flops in costs]).T  # it grows with the cost
        half = np.nan_to_num(half, nan=math.inf)
        return [first_zero(costs, line) for line in (above + half, above, above - half)]

    def could_see(self):
        """Return the least difference at the candidate's cost that is found with a probability of 80 %."""
        _, error, half, _ = self.estimate(self.flops)
        return half + 0.84 * error


def seeds_matter(ladder):
    """Say whether runs of one seed lie off the others' mean at all lengths alike: by an F test, at p < 0.05."""
    losses = [result["loss"] for result in ladder]
    lengths = [{result["steps"]: 1} for result in ladder]
    seeds = [{f"seed {result['seed']}": 1} for result in ladder]
    without, shared = LinearModel(lengths, losses), LinearModel([a | b for a, b in zip(lengths, seeds)], losses)
    gained = without.freedom - shared.freedom
    if not gained or not shared.freedom:
        return False
    explained = (without.variance * without.freedom - shared.variance * shared.freedom) / gained
    return bool(f_distribution.sf(explained / shared.variance, gained, shared.freedom) < 0.05)


def add(*rows):
    """Return the sum of rows, {name: number}."""
    total = {}
    for row in rows:
        for name, number in row.items():
            total[name] = total.get(name, 0.0) + number
    return total


def first_zero(costs, rising):
    """Return the cost at which a line crosses 0 from below: 0 if it begins above, infinity if it never does."""
    if rising[0] > 0:
        return 0.0
    above = np.flatnonzero(rising > 0)
    if not len(above):
        return math.inf
    right = above[0]
    return float(np.interp(0, rising[right - 1 : right + 1], costs[right - 1 : right + 1]))


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


def compare(groups, name="loss"):
    """Return the differences to the first of `groups` in words, by the group's name: nothing for the first itself."""
    found = differences(groups, name)
    texts = {group: "diverged" if has_diverged(results, name) else "" for group, results in groups.items()}
    return texts | {group: in_words(*difference, "accuracy" in name) for group, difference in found.items()}
