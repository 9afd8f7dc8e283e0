"""What a comparison decides, cheapest evidence first, and which runs that needs."""

import math
from contextlib import suppress
from typing import NamedTuple

from config.runtime.errors import UserError
from runs import CRASHED, Run, result_of
from stats import ERROR, UNDECIDED, Gain, gain_of, judge, next_rate, vertex

SAME, REFUSED, DIVERGED = "is the same code", "refused", "diverged"


class Missing(Exception):
    """The next decision depends on runs that have not ended. Holds them."""


class LeftOut(Exception):
    """A variant cannot take part. Holds the variant, a verdict and why."""


class Refused(UserError):
    """The baseline itself cannot take part."""

    exit_code = 4


class Standing(NamedTuple):
    """What is known of a candidate, at its last look."""

    verdict: str = UNDECIDED
    why: str = ""
    seeds: int = 0
    equal_steps: Gain | None = None  # None also where steps differ
    equal_cost: Gain | None = None
    baseline_at: float | None = None  # its cost there
    seconds: float | None = None  # of training, over the baseline's


class Comparison:
    """The variants, the first of which is the baseline, and what their runs say.

    It decides as if all runs had ended. Where one has not, Missing is raised, which says what to run next.
    """

    def __init__(self, variants, options, folder, windows, tokens, earlier):
        self.options = options
        self.folder, self.windows, self.tokens = folder, windows, tokens  # of the runs, and the SHA-256 of their text
        self.earlier = earlier  # {identity of a candidate: the looks at it and this baseline, (first seed, seeds)}
        self.baseline, *self.candidates = variants
        self.looks = numbers(options, "seeds", int, 2)
        self.searches = options["rates"] != "none"
        self.rates = numbers(options, "rates", float, 1e-12) if self.searches and options["rates"] else []
        self.results = {}  # {run: its result}
        self.tuned = {}  # {(variant, multiple of its length): its best learning rate}
        self.left_out, self.standing = {}, {}  # {candidate: its Standing}
        first = {}  # {identity: its first variant}
        for variant in variants:
            if variant.trouble:
                self.leave_out(variant, *variant.trouble)
            elif (same := first.setdefault(variant.identity, variant)) is not variant:
                self.leave_out(variant, SAME, f"it has the code and the settings of {same.name}")

    def leave_out(self, variant, verdict, why):
        """Note why a variant cannot take part. The others go on, unless it is the baseline."""
        if variant is self.baseline:
            told = f"the baseline, {variant.name}, is {verdict}: {why}"
            raise SystemExit(1) if verdict == CRASHED else Refused(told)  # a traceback has been printed
        self.left_out[variant] = self.standing[variant] = Standing(verdict, why)

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
        self.standing = dict.fromkeys(self.candidates, Standing()) | self.left_out
        for look in range(len(self.looks)):
            if not self.undecided():
                break
            self.each(self.rate, [self.baseline])
            self.each(self.rate, self.undecided())
            losses = self.each(self.losses, [self.baseline, *self.undecided()], look)
            self.each(self.judge, self.undecided(), look, losses)

    def undecided(self):
        return [one for one in self.candidates if self.standing[one].verdict == UNDECIDED and one not in self.left_out]

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
        runs, level = losses[candidate], self.level(candidate)
        cost = rounded(candidate.flops / self.baseline.flops)
        verdict, gain, rung = judge(runs, lambda rung: self.losses(self.baseline, look, rung), cost, level)
        steps = {variant.settings["max_iters"] for variant in (candidate, self.baseline)}
        equal = gain_of(runs, losses[self.baseline], level) if len(steps) == 1 else None
        self.standing[candidate] = Standing(verdict, "", len(runs), equal, gain, rung, self.seconds(candidate))

    def seconds(self, candidate):
        """Return the seconds of training at the first look, over the baseline's; None if a run was resumed."""
        seconds = lambda one: [self.result(self.run(one, seed))["seconds"] for seed in self.seeds(0)]
        ours, theirs = seconds(candidate), seconds(self.baseline)
        return None if None in ours + theirs else sum(ours) / sum(theirs)

    def others(self, candidate):
        """Return the looks at a candidate, (first seed, seeds), that other comparisons took."""
        planned = {(self.options["first_seed"], seeds) for seeds in self.looks}
        return self.earlier.get(candidate.identity, set()) - planned

    def level(self, candidate):
        """Return the level of a candidate's intervals, such that all looks at it err in 5% together.

        Those of other comparisons count twice, for they did not know of these.
        """
        return 1 - ERROR / (len(self.looks) + 2 * len(self.others(candidate)))

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
            for name in ("ckpt.pt", "best.pt"):  # measured, they are no longer needed
                (run.folder / name).unlink(missing_ok=True)
        return self.results.get(run)

    def need(self, runs):
        """Return the losses of runs. Raise LeftOut if one does not count, and Missing if one has not ended."""
        missing = [run for run in runs if not self.result(run)]
        for run in runs:
            if run not in missing and self.results[run]["refused"]:
                raise LeftOut(run.variant, REFUSED, self.results[run]["refused"])
        if missing:
            raise Missing(missing)
        return [self.results[run]["loss"] for run in runs]

    def losses(self, variant, look, cost=1.0):
        """Return the losses of a variant at a look, and at a multiple of its length."""
        runs = [self.run(variant, seed, cost) for seed in self.seeds(look)]
        losses = self.need(runs)
        if math.inf in losses:
            raise LeftOut(variant, DIVERGED, runs[losses.index(math.inf)].label())
        return losses

    # -- learning rates ------------------------------------------------------------------------------------------

    def rate(self, variant, cost=1.0):
        """Return a variant's best learning rate at a multiple of its length, or its own if none is searched."""
        if not self.searches:
            return variant.settings["learning_rate"]
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
        seed, new, losses = self.options["first_seed"] - 1, self.first_rates(variant, cost), {}
        while new:
            losses |= zip(new, self.need([self.run(variant, seed, cost, rate) for rate in new]))
            new = [rate for rate in [next_rate(losses)] if rate]
        best = min(sorted(losses), key=losses.get)
        if losses[best] == math.inf:
            raise LeftOut(variant, DIVERGED, f"every run, down to a learning rate of {best:g}")
        if not min(losses) < best < max(losses):
            raise LeftOut(variant, UNDECIDED, f"of {len(losses)} rates the last, {best:g}, is best: use --rates")
        return vertex(losses)

    def first_rates(self, variant, cost):
        """Return the rates that a search begins with: around the variant's, which moves as the baseline's best has."""
        own, base = variant.settings["learning_rate"], self.baseline
        if (variant, cost) != (base, 1.0):
            own = rounded(own * self.rate(base) / base.settings["learning_rate"])
        elif self.rates:
            return self.rates
        return [own / 2, own, 2 * own]


def rounded(number):
    """Return a number to three digits, so that what is nearly the same is the same."""
    return float(f"{number:.3g}")


def numbers(options, name, kind, least):
    """Return a setting such as "3,5,8" as ascending numbers."""
    with suppress(ValueError):
        values = sorted({kind(part) for part in options[name].split(",")})
        if least <= values[0] and values[-1] < math.inf:
            return values
    raise UserError(f"{name} = {options[name]!r} is invalid: write numbers from {least} up, as in 3,5,8")
