"""
How much of a loss is due to the method, the seed or the cost.

Runs of one seed see the same batches, so methods are compared within seeds. Intervals are of 95%, by Student's t.
"""

import math

import numpy as np
from scipy.stats import f as f_distribution
from scipy.stats import t as student

TIE = 0.02  # nats: a candidate whose whole interval is nearer to 0 ties with the baseline
SAME_COST = 0.02  # relative difference up to which costs count as equal
NO_LONGER = "longer training hurts the baseline: use more data or dropout"


class LinearModel:
    """Least squares of y on rows of named numbers; names missing from a row count as 0.

    Each of the `groups`, a label for each row, has its own noise variance, as in Welch's test.
    """

    def __init__(self, rows, y, groups=None):
        self.names = list(dict.fromkeys(name for row in rows for name in row))
        self.X, y = self.columns(rows), np.array(y, dtype=float)
        self.inverse = np.linalg.pinv(self.X.T @ self.X)
        self.coefficients = self.inverse @ self.X.T @ y
        self.freedom = len(y) - np.linalg.matrix_rank(self.X)
        self.noise = y - self.X @ self.coefficients
        labels = np.zeros(len(y)) if groups is None else np.array(groups)
        self.groups = [(labels == label, *self.variance(labels == label)) for label in np.unique(labels)]

    def columns(self, rows):
        return np.array([[row.get(name, 0.0) for name in self.names] for row in rows])

    def variance(self, rows):
        """Return the variance of the noise of some rows, and its degrees of freedom."""
        X, noise = self.X[rows], self.noise[rows]
        freedom = len(X) - np.einsum("ij,jk,ik->", X, self.inverse, X)
        return noise @ noise / freedom if freedom > 0.5 else math.nan, freedom

    def sum(self, row):
        """Return the sum that a row stands for."""
        return float(self.columns([row])[0] @ self.coefficients)

    def estimate(self, row):
        """Return (a row's prediction, its standard error, half its 95% interval, the p-value of its being 0).

        The variances of the noise add up, with the degrees of freedom of Welch and Satterthwaite.
        """
        weights = self.X @ self.inverse @ self.columns([row])[0]  # of each y, in the sum
        total, spread = 0.0, 0.0
        for rows, variance, freedom in self.groups:
            share = weights[rows] @ weights[rows]
            if share > 1e-12:
                total += share * variance
                spread += (share * variance) ** 2 / freedom if freedom else 0.0
        freedom = total**2 / spread if spread else self.freedom or math.nan
        value, error = self.sum(row), math.sqrt(total)
        p = 2 * student.sf(abs(value) / error, freedom) if error else float(value == 0)
        return value, error, student.ppf(0.975, freedom) * error, p


def holm(p):
    """Return p-values with Holm's correction, by name: with 95% probability none is below 0.05 by chance."""
    by_name, largest = {}, 0.0
    for rank, name in enumerate(sorted(p, key=p.get)):
        largest = max(largest, min(1.0, (len(p) - rank) * p[name]))
        by_name[name] = largest
    return by_name


def differences(groups, name="loss"):
    """Return each group's `name` less the first one's, {group: (difference, half its interval's width, corrected p)}.

    `name` = its group's + its seed's + noise, by least squares. Groups with a run that diverged are left out.
    """
    first, *others = groups
    if has_diverged(groups[first], name):
        return {}
    finite = {group: results for group, results in groups.items() if not has_diverged(results, name)}
    seen = [(group, result) for group, results in finite.items() for result in results]
    rows = [{group: 1, f"seed {result['run']['seed']}": 1} for group, result in seen]
    model = LinearModel(rows, [result[name] for _, result in seen])
    estimates = {group: model.estimate({group: 1, first: -1}) for group in others if group in finite}
    p = holm({group: estimate[3] for group, estimate in estimates.items()})
    return {group: (estimate[0], estimate[2], p[group]) for group, estimate in estimates.items()}


def has_diverged(results, name="loss"):
    return any(result[name] is None for result in results)


class CostCurve:
    """A candidate's loss, and the baseline's at several lengths of training, the rungs of a ladder.

    Every rung has its mean, and so has the candidate. Runs of one seed share an offset if an F test finds one in the
    ladder, and if a candidate's steps have the same tokens as the baseline's (`same_batches`). The candidate and the
    baseline have separate variances, as in Welch's test.
    """

    def __init__(self, ladder, runs, same_batches=True):
        """Take the results of the baseline, those of its own length first, and of the candidate; none has diverged."""
        unit = ladder[0]["flops"]
        self.cost = runs[0]["flops"] / unit
        self.rungs = sorted({result["flops"] / unit for result in ladder})
        self.shared = same_batches and seeds_matter(ladder)
        seeds = {f"seed {result['seed']}" for result in ladder + runs} if self.shared else set()
        self.seeds = dict.fromkeys(seeds, 1 / max(1, len(seeds)))
        rows = [{result["flops"] / unit: 1} for result in ladder] + [{"candidate": 1} for _ in runs]
        if self.shared:
            rows = [row | {f"seed {result['seed']}": 1} for row, result in zip(rows, ladder + runs)]
        groups = ["candidate" in row for row in rows]
        self.model = LinearModel(rows, [result["loss"] for result in ladder + runs], groups)

    def loss(self, row):
        """Return the loss that a row stands for, over all seeds."""
        return self.model.sum(row | self.seeds)

    def is_measured(self, cost):
        return any(is_same_cost(rung, cost) for rung in self.rungs)

    def at(self, cost):
        """Return the row of the baseline's loss at a cost, or None below the shortest rung.

        A parabola over log cost through a rung and its neighbors corrects for its small distance from the cost.
        Between rungs, a chord is used. It lies above a convex curve, in the candidate's favor, so there only
        *does not pay* is safe. Beyond the longest rung, that rung is used.
        """
        if not self.is_measured(cost):
            below, above = self.around(cost, cost)
            return interpolated(below[-1:] + above[:1], cost) if below else None
        nearest = min(self.rungs, key=lambda rung: abs(math.log(rung / cost)))
        below, above = self.around(nearest / 1.2, nearest * 1.2)  # rungs that are nearer tell the slope less well
        return interpolated([*below[-1:], nearest, *above[:1]], cost)

    def around(self, low, high):
        return [rung for rung in self.rungs if rung <= low], [rung for rung in self.rungs if rung >= high]

    def reference(self, cost):
        """Return the row of the lowest loss that the baseline reaches at this cost or a lower one, or None."""
        at_cost = self.at(cost)
        rows = [{rung: 1.0} for rung in self.rungs if rung < cost and not is_same_cost(rung, cost)]
        return min(rows + [at_cost], key=self.loss) if at_cost else None

    def rises(self, cost):
        """Return whether the baseline's loss rises toward this cost, or the next rung, by a t test (p < 0.05)."""
        below, above = self.around(cost * (1 + SAME_COST), cost)
        rungs = below if self.is_measured(cost) else below + above[:1]
        lowest = min(rungs, key=lambda rung: self.loss({rung: 1}), default=None)
        if not rungs or lowest == rungs[-1]:
            return False
        rise, _, _, p = self.model.estimate({rungs[-1]: 1, lowest: -1})
        return rise > 0 and p / 2 < 0.05

    def gain(self, reference):
        """Return by how much the candidate's loss is lower than that of a row, as `estimate` does."""
        return self.model.estimate(reference | {"candidate": -1})

    def break_even(self, cost):
        """Return by how much a candidate of this cost must lower the loss of the baseline at its own length."""
        return self.loss({1.0: 1}) - self.loss(self.reference(cost))

    def verdict(self, cost):
        """Return whether the candidate pays at a cost, as text, or None if the baseline must be trained at it first."""
        reference = self.reference(cost)
        if not reference:
            return None
        gain, _, half, _ = self.gain(reference)
        if gain + half < 0:
            return "does not pay"
        if self.rises(cost):
            return NO_LONGER
        if not self.is_measured(cost):
            return None
        if gain - half > 0:
            return "pays"
        return f"tie within {abs(gain) + half:.3f}" if abs(gain) + half < TIE else "undecided"

    def could_see(self, cost):
        """Return the least difference at a cost that is found with a probability of roughly 80%."""
        _, error, half, _ = self.gain(self.reference(cost))
        return half + 0.84 * error

    def curve(self, costs):
        """Return the baseline's loss at costs within the ladder: interpolated through its rungs, along the
        best-fitting power law with a floor, L∞ + a C^-b, if there are four or more, else along chords."""
        rungs, losses = np.array(self.rungs), np.array([self.loss({rung: 1}) for rung in self.rungs])
        law = np.zeros_like
        if len(rungs) >= 4:
            fits = {b: np.polyfit(rungs**-b, losses, 1, full=True) for b in np.geomspace(0.02, 4, 50)}
            b = min(fits, key=lambda b: fits[b][1].sum())
            law = lambda cost: np.polyval(fits[b][0], cost**-b)
        return law(costs) + np.interp(np.log(costs), np.log(rungs), losses - law(rungs))

    def worth(self):
        """Return (low, worth, high): the cost that brings the baseline to the candidate's loss, and its interval.

        What lies beyond the ladder is 0 or infinite. None where the baseline's loss rises along it.
        """
        if len(self.rungs) == 1 or self.rises(self.rungs[-1]):
            return None
        costs = np.geomspace(self.rungs[0], self.rungs[-1], 400)
        above, half = self.loss({"candidate": 1}) - self.curve(costs), self.gain({1.0: 1})[2]
        half = math.inf if math.isnan(half) else half
        return [first_zero(costs, above + off) for off in (half, 0, -half)]


def is_same_cost(one, other):
    return abs(one / other - 1) <= SAME_COST


def interpolated(rungs, cost):
    """Return the row of Lagrange's polynomial over log cost through the rungs."""
    row = {}
    for rung in rungs:
        others = [other for other in rungs if other != rung]
        row[rung] = math.prod(math.log(cost / other) / math.log(rung / other) for other in others)
    return row


def seeds_matter(ladder):
    """Return whether seeds shift the loss equally at all lengths, by an F test (p < 0.05)."""
    losses = [result["loss"] for result in ladder]
    lengths = [{result["flops"]: 1} for result in ladder]
    seeds = [{f"seed {result['seed']}": 1} for result in ladder]
    without, shared = LinearModel(lengths, losses), LinearModel([a | b for a, b in zip(lengths, seeds)], losses)
    gained = without.freedom - shared.freedom
    if not gained or not shared.freedom:
        return False
    left = shared.noise @ shared.noise
    explained = (without.noise @ without.noise - left) / gained
    return bool(f_distribution.sf(explained / (left / shared.freedom), gained, shared.freedom) < 0.05)


def first_zero(costs, rising):
    """Return the cost at which a line crosses 0 from below: 0 if it begins above, infinity if it never does."""
    if rising[0] > 0:
        return 0.0
    above = np.flatnonzero(rising > 0)
    if not len(above):
        return math.inf
    right = above[0]
    return float(np.interp(0, rising[right - 1 : right + 1], costs[right - 1 : right + 1]))


def compare(groups, name="loss"):
    """Return, by group: its difference to the first ± half the interval's width, better or worse where p < 0.05."""
    texts = {group: "diverged" if has_diverged(results, name) else "" for group, results in groups.items()}
    for group, (difference, half, p) in differences(groups, name).items():
        word = "better" if (difference > 0) == ("accuracy" in name) else "worse"
        texts[group] = f"{difference:+.3f} ± {half:.3f} {word if p < 0.05 else ''}".strip()
    return texts
