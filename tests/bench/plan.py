"""What a comparison decides, cheapest evidence first, and which runs that needs."""

import math
import statistics
from typing import NamedTuple

import numpy as np

from config.runtime.errors import UserError
from runs import Run, result_of
from stats import (
    ERROR_OF_A_LOOK,
    FAILS,
    NO_LONGER,
    PAYS,
    TIES,
    UNDECIDED,
    Gain,
    gain_of,
    judge,
    needed_rungs,
    next_rate,
    seeds_matter,
)

SPEED, OVERHEAD = 50e9, 10  # operations a second, and seconds: of a run, until one has ended
SPREAD = 0.02  # by how much the ratio of two step times differs between sessions, at least
ALIKE = 0.05  # largest relative difference at which time and operations count as one cost
SAME, REFUSED, CRASHED, DIVERGED = "computes the same", "refused", "crashed", "diverged"
WORST_FIRST = (FAILS, NO_LONGER, UNDECIDED, TIES, PAYS)  # of the verdicts by operations and by time
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
    base: dict  # of the baseline
    paired: bool  # whether equal seeds are compared with each other
    equal: Gain  # at equal steps
    costs: dict  # {price: cost}, over the baseline's
    times: tuple | None  # (cost by time, its relative uncertainty)
    judgements: dict  # {price: its Judgement}

    @property
    def verdict(self):
        return min((one.verdict for one in self.judgements.values()), key=WORST_FIRST.index)


class Comparison:
    """The variants, the first of which is the baseline, and what their runs say.

    It decides as if all runs had ended. Where one has not, Missing is raised, which says what to run next.
    """

    def __init__(self, variants, options, folder, windows, tokens):
        self.variants, self.options = variants, options
        self.folder, self.windows, self.tokens = folder, windows, tokens  # of the runs, and the SHA-256 of their text
        self.baseline, *self.candidates = variants
        self.looks = read_looks(options)
        self.level = 1 - ERROR_OF_A_LOOK[len(self.looks)]  # of the interval at each look
        self.rates = numbers(options, "rates")
        self.searches = options["rates"] != "none" and len(self.rates) != 1
        self.ladder = dict.fromkeys(numbers(options, "ladder"))  # {cost: the baseline's losses}, for the curve
        if options["cost"] not in ("both", "operations"):
            raise UserError(f"cost = {options['cost']!r} is invalid: it must be both or operations")
        self.results = {}  # {run: its result}
        self.ended = []  # (operations, seconds) of the runs that this process has done
        self.tuned = {}  # {(variant, multiple of its length): its best learning rate}
        self.trouble = {}  # {variant: (a verdict, why)}
        self.standing = {}  # {candidate: its Standing at its last look}
        self.complete = 0  # looks that have decided about all candidates
        first = {}  # {identity: its first variant}
        for variant in variants:
            if variant.crashed:
                self.leave_out(variant, CRASHED, variant.crashed)
            elif variant.refused:
                self.leave_out(variant, REFUSED, variant.refused)
            elif first.setdefault(variant.identity, variant) is not variant:
                same = first[variant.identity]
                cure = f"; after a commit, use --against={same.name}~1" if same.code == f"@{same.name}" else ""
                self.leave_out(variant, SAME, f"its first steps are those of {same.name}{cure}")

    def leave_out(self, variant, verdict, why):
        """Note why a variant cannot take part. The others go on, unless it is the baseline."""
        self.trouble.setdefault(variant, (verdict, why))
        if variant is self.baseline and verdict == CRASHED:
            raise SystemExit(1)  # its traceback has been printed
        if variant is self.baseline:
            raise Refused(f"the baseline, {variant.name}, is {verdict}: {why}")

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
        self.standing, self.complete = {}, 0
        for look in range(len(self.looks)):
            if not self.undecided():
                break
            self.each(self.rate, [self.baseline])
            self.each(self.rate, self.undecided())
            losses = self.each(self.losses, [self.baseline, *self.undecided()], look)
            self.each(self.judge, self.undecided(), look, losses)
            self.complete = look + 1
        for cost in self.ladder:
            self.ladder[cost] = self.each(self.losses, [self.baseline], 0, cost)[self.baseline]

    def undecided(self):
        sound = [one for one in self.candidates if one not in self.trouble]
        return [one for one in sound if one not in self.standing or self.standing[one].verdict == UNDECIDED]

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
        times = self.times(candidate)
        costs, judgements = self.costs(candidate, times), {}
        for price, cost in costs.items():
            baseline_at = lambda cost: self.losses(self.baseline, look, cost)
            spread = times[1] if price == "time" else 0.0
            judgements[price] = judge(runs, baseline_at, cost, self.level, paired, spread)
        equal = gain_of(runs, base, paired)
        self.standing[candidate] = Standing(runs, base, paired, equal, costs, times, judgements)

    def times(self, candidate):
        """Return the ratio of a candidate's training time to the baseline's, and its relative uncertainty, or None.

        Both are of the first look's runs. These must be of one machine, and have alternated: another day it is busier.
        """
        pairs = [[self.result(self.run(one, seed)) for one in (candidate, self.baseline)] for seed in self.seeds(0)]
        periods = [[result["period"] for result in group] for group in zip(*pairs)]
        together = max(min(group)[0] for group in periods) < min(max(group)[1] for group in periods)
        if not together or len({result["machine"] for pair in pairs for result in pair}) > 1:
            return None
        ratios = [ours["train_seconds"] / theirs["train_seconds"] for ours, theirs in pairs]
        middle = statistics.median(ratios)
        return middle, max(SPREAD, (max(ratios) - min(ratios)) / 2 / middle)

    def costs(self, candidate, times):
        """Return what a candidate's training costs, over the baseline's: {"operations": ..., "time": ...}.

        The time is left out where it differs from the operations by no more than a twentieth, or its own spread.
        """
        costs = {"operations": rounded(candidate.flops / self.baseline.flops)}
        if times and self.options["cost"] == "both" and abs(times[0] / costs["operations"] - 1) > max(ALIKE, times[1]):
            costs["time"] = rounded(times[0])
        return costs

    def forecast(self):
        """Return (runs, seconds of one worker) at least and at most."""
        operations = {rounded(candidate.flops / self.baseline.flops) for candidate in self.undecided()}
        rungs = {rung for cost in operations for rung in needed_rungs(cost)} | self.ladder.keys()
        lengths = [variant.flops for variant in self.variants if variant not in self.trouble]
        longer = [self.baseline.flops * cost for cost in rungs - {1.0}]
        least, most = self.looks[0] + 3 * self.searches, self.looks[-1] + 6 * self.searches  # runs at each length
        return [
            (runs * len(flops), runs * sum(map(self.run_seconds, flops)))
            for runs, flops in ((least, lengths), (most, lengths + longer))
        ]

    def run_seconds(self, flops):
        """Return how long a run will take, by those that have ended: they also import, evaluate and are measured."""
        if not self.ended:
            return flops / SPEED + OVERHEAD
        return flops * sum(seconds for _, seconds in self.ended) / sum(flops for flops, _ in self.ended)

    # -- runs ----------------------------------------------------------------------------------------------------

    def seeds(self, look):
        first = self.options["first_seed"]
        return range(first, first + self.looks[look])

    def run(self, variant, seed, cost=1.0):
        """Return the run of a variant at a multiple of its length, and at its best rate there."""
        return self.run_at(variant, self.rate(variant, cost), seed, cost)

    def run_at(self, variant, rate, seed, cost):
        steps = max(1, round(cost * variant.settings["max_iters"]))
        return Run(variant, rate, seed, steps, self.folder, self.windows)

    def result(self, run):
        """Return the result of a run, or None if it has not ended."""
        found = self.results.get(run) or result_of(run, self.tokens)
        if found:
            self.results[run] = found
        return found

    def need(self, runs):
        """Return the results of runs. Raise LeftOut if one does not count, and Missing if one has not ended."""
        results = {run: self.result(run) for run in runs}
        for run, result in results.items():
            if result and result["refused"]:
                raise LeftOut(run.variant, REFUSED, result["refused"])
        missing = [run for run, result in results.items() if not result]
        if missing:
            raise Missing(missing)
        return list(results.values())

    def losses(self, variant, look, cost=1.0):
        """Return {seed: loss} of a variant at a look, and at a multiple of its length."""
        runs = [self.run(variant, seed, cost) for seed in self.seeds(look)]
        for run, result in zip(runs, self.need(runs)):
            if result["loss"] is None:
                raise LeftOut(variant, DIVERGED, run.label())
        return {run.seed: self.results[run]["loss"] for run in runs}

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
            found = [result["loss"] for result in self.need([self.run_at(variant, rate, seed, cost) for rate in rates])]
            losses = {rate: math.inf if loss is None else loss for rate, loss in zip(rates, found)}
            another = next_rate(losses)
            if not another:
                break
            rates.append(another)
        if min(losses.values()) == math.inf:
            raise LeftOut(variant, DIVERGED, f"every run, down to a learning rate of {min(losses):g}")
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

    The parabola is over the logarithm of the rate. If a neighbor is missing or has diverged, the best is returned.
    """
    rates = sorted(losses)
    best = min(rates, key=losses.get)
    place = rates.index(best)
    near = rates[place - 1 : place + 2]  # fewer than three if the best is at an edge
    y = [losses[rate] for rate in near]
    if len(near) < 3 or not math.isfinite(sum(y)):
        return best
    curvature, slope, _ = np.polyfit(np.log(np.array(near) / best), y, 2)
    return float(f"{best * math.exp(-slope / (2 * curvature)):.2g}") if curvature > 0 else best


def rounded(number):
    """Return a number to three digits, so that what is nearly the same is the same."""
    return float(f"{number:.3g}")


# -- settings that are lists -----------------------------------------------------------------------------------


def numbers(options, name):
    """Return a setting such as "1e-3,2e-3" as a list of numbers; none for "" and "none"."""
    text = options[name]
    if text in ("", "none"):
        return []
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or len(set(values)) < len(values) or not all(0 < value < math.inf for value in values):
        raise UserError(f"{name} = {text!r} is invalid: it must be distinct numbers above 0, such as 1,2,3")
    return values


def read_looks(options):
    """Return the numbers of seeds after which a verdict is tried."""
    given = numbers(options, "seeds")
    looks = sorted(map(int, given))
    if looks != given or len(looks) not in ERROR_OF_A_LOOK or not 2 <= looks[0] <= looks[-1] < 1000:
        needed = "one number, or up to five ascending ones, such as 3,5,8; all above 1"
        raise UserError(f"seeds = {options['seeds']!r} is invalid: it must be {needed}")
    return looks
