"""What a comparison decides, cheapest evidence first, and which runs that needs."""

import math
import statistics
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from config.runtime.errors import UserError
from runs import CRASHED, Run, result_of
from stats import ERROR, UNDECIDED, Gain, Judgement, gain_of, judge, next_rate, seeds_matter

SPEED, OVERHEAD = 50e9, 10  # operations a second, and seconds: of a run, until one has ended
SAME, REFUSED, DIVERGED = "is the same code", "refused", "diverged"
OF_BATCHES = ("batch_size", "grad_accum_steps", "max_iters")  # with equal ones, equal seeds see equal batches


class Missing(Exception):
    """The next decision depends on runs that have not ended. Holds them."""


class LeftOut(Exception):
    """A variant cannot take part. Holds the variant, a verdict and why."""


class Refused(UserError):
    """The baseline itself cannot take part."""

    exit_code = 4


class Standing(NamedTuple):
    """What a look has found of a candidate."""

    losses: dict  # of the candidate, {seed: loss}
    paired: bool  # whether equal seeds are compared with each other
    equal: Gain | None  # at equal steps, if they are equal
    seconds: float | None  # of training, over the baseline's
    judged: Judgement


class Comparison:
    """The variants, the first of which is the baseline, and what their runs say.

    It decides as if all runs had ended. Where one has not, Missing is raised, which says what to run next.
    """

    def __init__(self, variants, options, folder, windows, tokens, earlier):
        self.variants, self.options = variants, options
        self.folder, self.windows, self.tokens = folder, windows, tokens  # of the runs, and the SHA-256 of their text
        self.earlier = earlier  # {identity of a candidate: the looks at it and this baseline, (first seed, seeds)}
        self.baseline, *self.candidates = variants
        self.looks = read_looks(options)
        self.rates = numbers(options, "rates")
        self.searches = options["rates"] != "none" and len(self.rates) != 1
        self.results = {}  # {run: its result}
        self.ended = []  # (operations, seconds) of the runs that this process has done
        self.tuned = {}  # {(variant, multiple of its length): its best learning rate}
        self.trouble = {}  # {variant: (a verdict, why)}
        self.standing = {}  # {candidate: its Standing at its last look}
        first = {}  # {identity: its first variant}
        for variant in variants:
            if variant.trouble:
                self.leave_out(variant, *variant.trouble)
            elif (same := first.setdefault(variant.identity, variant)) is not variant:
                self.leave_out(variant, SAME, f"it has the code and the settings of {same.name}")

    def leave_out(self, variant, verdict, why):
        """Note why a variant cannot take part. The others go on, unless it is the baseline."""
        self.trouble.setdefault(variant, (verdict, why))
        if variant is self.baseline:
            told = f"the baseline, {variant.name}, is {verdict}: {why}"
            raise SystemExit(1) if verdict == CRASHED else Refused(told)  # a traceback has been printed

    # -- decisions -----------------------------------------------------------------------------------------------

    def missing(self):
        """Return the runs that are needed next, as far as those that have ended say; none when all is decided."""
        try:
            self.decide()
        except Missing as missing:
            return missing.args[0]
        return []

    def decide(self):
        """Decide about the candidates, look by look."""
        self.standing = {}
        for look in range(len(self.looks)):
            if not self.undecided():
                break
            self.each(self.rate, [self.baseline])
            self.each(self.rate, self.undecided())
            losses = self.each(self.losses, [self.baseline, *self.undecided()], look)
            self.each(self.judge, self.undecided(), look, losses)

    def undecided(self):
        sound = [one for one in self.candidates if one not in self.trouble]
        return [one for one in sound if one not in self.standing or self.standing[one].judged.verdict == UNDECIDED]

    def each(self, function, variants, *more):
        """Return {variant: function(variant, *more)}, or raise Missing with the runs that they lack."""
        found, missing = {}, {}
        for variant in variants:
            try:
                found[variant] = function(variant, *more)
            except Missing as its:
                missing |= dict.fromkeys(its.args[0])
            except LeftOut as left_out:
                self.leave_out(*left_out.args)
        if missing:  # alternating, so that a machine that slows down slows all variants
            raise Missing(sorted(missing, key=lambda run: run.seed))
        return found

    def judge(self, candidate, look, losses):
        """Note a candidate's Standing at a look, where the variants have these losses."""
        runs, base = losses[candidate], losses[self.baseline]
        batches = lambda variant: [variant.settings[name] for name in OF_BATCHES]
        alike = [one for one in losses if batches(one) == batches(self.baseline)]
        paired = candidate in alike and seeds_matter([losses[one] for one in alike])
        baseline_at = lambda cost: self.losses(self.baseline, look, cost)
        judged = judge(runs, baseline_at, self.cost(candidate), self.level(candidate), paired)
        equal = candidate.settings["max_iters"] == self.baseline.settings["max_iters"]
        equal = gain_of(runs, base, paired) if equal else None
        self.standing[candidate] = Standing(runs, paired, equal, self.seconds(candidate), judged)

    def cost(self, candidate):
        """Return the operations of a candidate's training, over the baseline's."""
        return rounded(candidate.flops / self.baseline.flops)

    def seconds(self, candidate):
        """Return the same for the seconds of training, in the runs of the first look; None if a run was resumed."""
        seconds = lambda variant: [self.result(self.run(variant, seed))["seconds"] for seed in self.seeds(0)]
        ours, theirs = seconds(candidate), seconds(self.baseline)
        return None if None in ours + theirs else statistics.median(a / b for a, b in zip(ours, theirs))

    def others(self, candidate):
        """Return the looks at a candidate, (first seed, seeds), that other comparisons took."""
        planned = {(self.options["first_seed"], seeds) for seeds in self.looks}
        return self.earlier.get(candidate.identity, set()) - planned

    def level(self, candidate):
        """Return the level of a candidate's intervals, such that all looks at it err in 5% together.

        Those of other comparisons count twice, for they did not know of these.
        """
        return 1 - ERROR / (len(self.looks) + 2 * len(self.others(candidate)))

    def run_seconds(self, flops):
        """Return how long a run will take, by those that have ended: they also import, evaluate and are measured."""
        if not self.ended:
            return flops / SPEED + OVERHEAD
        return flops * sum(seconds for _, seconds in self.ended) / sum(flops for flops, _ in self.ended)

    # -- runs ----------------------------------------------------------------------------------------------------

    def seeds(self, look):
        first = self.options["first_seed"]
        return range(first, first + self.looks[look])

    def run(self, variant, seed, cost=1.0, rate=None):
        """Return the run of a variant at a multiple of its length, and at its best rate there unless one is given."""
        steps = max(1, round(cost * variant.settings["max_iters"]))
        return Run(variant, rate or self.rate(variant, cost), seed, steps, self.folder, self.windows)

    def result(self, run):
        """Return the result of a run, or None if it has not ended."""
        if run not in self.results and (found := result_of(run, self.tokens)):
            self.results[run] = found
        return self.results.get(run)

    def need(self, runs):
        """Return the results of runs. Raise LeftOut if one does not count, and Missing if one has not ended."""
        results = [self.result(run) for run in runs]
        for run, result in zip(runs, results):
            if result and result["refused"]:
                raise LeftOut(run.variant, REFUSED, result["refused"])
        if None in results:
            raise Missing([run for run, result in zip(runs, results) if not result])
        return results

    def losses(self, variant, look, cost=1.0):
        """Return {seed: loss} of a variant at a look, and at a multiple of its length."""
        runs = [self.run(variant, seed, cost) for seed in self.seeds(look)]
        for run, result in zip(runs, self.need(runs)):
            if result["loss"] is None:
                raise LeftOut(variant, DIVERGED, run.label())
        return {run.seed: self.result(run)["loss"] for run in runs}

    # -- learning rates ------------------------------------------------------------------------------------------

    def rate(self, variant, cost=1.0):
        """Return a variant's best learning rate at a multiple of its length, or the one that is given."""
        if not self.searches:
            return self.rates[0] if self.rates else variant.settings["learning_rate"]
        if abs(cost - 1) < 0.1:
            cost = 1.0  # the best rate hardly changes with so little
        if (variant, cost) not in self.tuned:
            self.tuned[variant, cost] = self.search(variant, cost)
        return self.tuned[variant, cost]

    def search(self, variant, cost):
        """Return the rate at which a variant's loss is lowest.

        The grid grows by factors of two until the best rate has a worse one on either side. The vertex of the parabola
        through these three, over the logarithm of the rate, is the answer.
        """
        rates, seed = self.first_rates(variant, cost), self.options["first_seed"] - 1
        while True:
            found = [result["loss"] for result in self.need([self.run(variant, seed, cost, rate) for rate in rates])]
            losses = {rate: math.inf if loss is None else loss for rate, loss in zip(rates, found)}
            another = next_rate(losses)
            if not another:
                break
            rates.append(another)
        best = min(sorted(losses), key=losses.get)
        if losses[best] == math.inf:
            raise LeftOut(variant, DIVERGED, f"every run, down to a learning rate of {best:g}")
        if not min(losses) < best < max(losses):
            raise LeftOut(
                variant, UNDECIDED, f"of {len(losses)} learning rates the last, {best:g}, is best: use --rates"
            )
        return vertex(losses)

    def first_rates(self, variant, cost):
        """Return the rates that a search begins with: around the variant's, which moves as the baseline's best has."""
        own, base = variant.settings["learning_rate"], self.baseline
        if (variant, cost) != (base, 1.0):
            own = rounded(own * self.rate(base) / base.settings["learning_rate"])
        elif self.rates:
            return list(self.rates)
        return [own / 2, own, 2 * own]


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


def rounded(number):
    """Return a number to three digits, so that what is nearly the same is the same."""
    return float(f"{number:.3g}")


# -- settings that are lists -----------------------------------------------------------------------------------


def numbers(options, name):
    """Return a setting such as "1e-3,2e-3" as a list of numbers; none for "" and "none"."""
    text, values = options[name], []
    with suppress(ValueError):
        values = [float(part) for part in text.split(",") if text not in ("", "none")]
        if len(set(values)) == len(values) and all(0 < value < math.inf for value in values):
            return values
    raise UserError(f"{name} = {text!r} is invalid: it must be distinct numbers above 0, such as 1,2,3")


def read_looks(options):
    """Return the numbers of seeds after which a verdict is tried."""
    given = numbers(options, "seeds")
    looks = sorted(map(int, given))
    if not looks or looks != given or not 2 <= looks[0] <= looks[-1] < 1000:
        raise UserError(
            f"seeds = {options['seeds']!r} is invalid: it must be whole and ascending, above 1, as in 3,5,8"
        )
    return looks
