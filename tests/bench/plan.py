"""What a comparison runs, cheapest evidence first: a pure function of its arguments and of the runs that ended."""

import json
import math
import os
import statistics
import sys
from collections import Counter
from contextlib import contextmanager, redirect_stdout

import numpy as np
import torch

from config.runtime.errors import UserError, file_errors
from config.runtime.files import atomic_write, sha256
from data.dataset import load_dataset
from data.prepare import ensure_prepared
from frozen import freeze, link_data, split_code
from identify import CodeError, identify, read_json_lines
from runs import Run, Variant, read_variant, result_of, split_name
from stats import ERROR_OF_A_LOOK, FAILS, NO_LONGER, PAYS, TIES, UNDECIDED, judge, nearest, needed_rungs, seeds_matter

USUAL_NOISE = 0.01  # nats, of the same run with another seed, by characters at 400 steps
MOST_RATES = 10  # learning rates tried per variant
SPREAD = 0.02  # by how much the ratio of two step times differs between sessions, at least
SPEED, OVERHEAD = 3e10, 15  # operations a second, and seconds of a run besides, before a run has ended
ALIKE = 0.05  # largest relative difference at which time and operations count as one cost
SAME, REFUSED, CRASHED, DIVERGED = "computes the same", "refused", "crashed", "diverged"
WORST_FIRST = ("", FAILS, NO_LONGER, UNDECIDED, TIES, PAYS)  # of the verdicts by operations and by time


class Refused(UserError):
    """The baseline itself cannot take part."""

    exit_code = 4


class Comparison:
    """The variants, the first of which is the baseline, and the runs that compare them.

    `words` are the variants' arguments, `common` train.py's options for all of them, `options` compare.py's settings.
    """

    def __init__(self, words, common, options, device):
        self.options, self.device = options, device
        self.looks = read_looks(options)
        self.level = 1 - ERROR_OF_A_LOOK[len(self.looks)]  # of the interval at each look
        self.rates = numbers(options, "rates")
        self.ladder = sorted(numbers(options, "ladder"))
        if options["cost"] not in ("both", "operations", "time"):
            raise UserError(f"cost = {options['cost']!r} does not work: it must be one of both, operations, time")
        self.results, self.trouble = {}, {}  # {run: its result}, {variant: (a verdict, why)}
        self.tuned = {}  # {(variant, multiple of its length): (the best learning rate, the runs that found it)}
        self.ended = []  # (operations, seconds) of the runs that have ended since the comparison began
        self.judged = {}  # {(candidate, look): its judgements}, once they are complete
        self.prepare(read_variants(words, common, options))

    def prepare(self, variants):
        """Freeze and examine the variants, and find the folder of their runs on these tokens."""
        settings = variants[0].settings
        with stdout_to_stderr():  # what preparing a text prints is no part of a plan
            data = load_dataset(ensure_prepared(settings["dataset"]))
        self.meta, tokens = data.meta, sha256(json.dumps(data.meta["sha256"], sort_keys=True).encode())[:8]
        self.folder = self.options["out"].resolve() / tokens
        for home in {variant.home for variant in variants}:
            link_data(home, data.folder)
        self.windows = save_windows(data, settings, self.folder)
        found = identify(variants, self.folder, self.windows, self.device)
        self.variants = [one if isinstance(facts, CodeError) else facts for one, facts in found.items()]
        first = {}  # the first variant of each fingerprint
        for variant, facts in zip(self.variants, found.values()):
            if isinstance(facts, CodeError):
                self.leave_out(variant, CRASHED, str(facts))
            elif variant.refused:
                self.leave_out(variant, REFUSED, variant.refused)
            elif first.setdefault(variant.fingerprint, variant) is not variant:
                self.leave_out(variant, SAME, f"{variant.name} computes what {first[variant.fingerprint].name} does")

    @property
    def baseline(self):
        return self.variants[0]

    def leave_out(self, variant, verdict, why):
        """Note why a variant cannot take part. The others go on, unless it is the baseline."""
        self.trouble.setdefault(variant, (verdict, why))
        if variant is self.baseline and verdict == CRASHED:
            raise SystemExit(1)  # its traceback has been printed
        if variant is self.baseline:
            raise Refused(f"the baseline, {variant.name}, is {verdict}: {why}")

    def sound(self):
        """Return the variants that can be trained."""
        return [variant for variant in self.variants if variant not in self.trouble]

    def result(self, run):
        """Return the result of a run, or None if it has not ended. Note what disqualifies its variant."""
        found = self.results.get(run) or result_of(run, self.meta["sha256"])
        if found:
            self.results[run] = found
        if found and found["refused"]:
            self.leave_out(run.variant, REFUSED, found["refused"])
        return found

    # -- what to run ---------------------------------------------------------------------------------------------

    def planned(self) -> list[Run]:
        """Return the runs up to the first stage that is not complete: what follows depends on their results."""
        plan = {}
        for stage in self.stages():
            plan |= dict.fromkeys(stage)
            if not all(self.result(run) for run in stage if run.variant not in self.trouble):
                break
        return list(plan)

    def missing(self) -> list[Run]:
        return [run for run in self.planned() if not self.result(run) and run.variant not in self.trouble]

    def stages(self):
        """Yield the runs of one stage after another. Whoever iterates has seen to it that those before have ended."""
        if not self.sound()[1:]:
            return
        yield from self.searches([self.baseline], 1.0)
        yield from self.searches(self.sound()[1:], 1.0)
        for look in range(len(self.looks)):
            if not self.open(look):
                break
            seeds = self.seeds(look)  # alternating, so that a machine that slows down slows all variants
            yield [self.run(one, seed) for seed in seeds for one in [self.baseline, *self.open(look)]]
            while costs := self.needed(look):
                yield from self.rung(min(costs), look)
        for cost in self.ladder:
            yield from self.rung(cost, 0)

    def rung(self, cost, look):
        """Yield the baseline's runs at a multiple of its length: the search for its learning rate, then its seeds."""
        yield from self.searches([self.baseline], cost)
        yield [self.run(self.baseline, seed, cost) for seed in self.seeds(look)]

    def run(self, variant, seed, cost=1.0):
        rate = self.tuning(variant, cost)[0] if self.is_searching() else self.rate_given(variant)
        return self.run_at(variant, rate, seed, cost)

    def run_at(self, variant, rate, seed, cost):
        steps = max(1, round(cost * variant.settings["max_iters"]))
        return Run(variant, rate, seed, steps, self.folder, self.windows)

    def seeds(self, look):
        first = self.options["first_seed"]
        return list(range(first, first + self.looks[look]))

    # -- learning rates ------------------------------------------------------------------------------------------

    def is_searching(self):
        return self.options["rates"] != "none" and len(self.rates) != 1

    def rate_given(self, variant):
        return self.rates[0] if self.rates else variant.settings["learning_rate"]

    def searches(self, variants, cost):
        """Yield the runs that find the learning rates of variants at a multiple of their lengths."""
        while self.is_searching() and (open := [one for one in variants if not self.tuning(one, cost)[0]]):
            yield [run for variant in open for run in self.tuning(variant, cost)[1]]
            variants = [one for one in open if one not in self.trouble]

    def tuning(self, variant, cost):
        """Return a variant's best learning rate, or None while runs are missing, and the runs of the search.

        The grid grows by factors of two until the best rate has a worse one on either side. The vertex of the parabola
        through these three, over the logarithm of the rate, is the answer.
        """
        near = 2.0 ** round(math.log2(cost))
        if near != cost and abs(cost / near - 1) < 0.1 and (near == 1 or near < cost):
            return self.tuning(variant, near)  # the best rate hardly changes with so little
        if (variant, cost) in self.tuned:
            return self.tuned[variant, cost]
        if (variant is not self.baseline or cost != 1) and not self.tuning(self.baseline, 1.0)[0]:
            return None, []
        grid = self.first_rates(variant, cost)
        while True:
            grid.sort()
            runs = [self.run_at(variant, rate, self.options["first_seed"] - 1, cost) for rate in grid]
            results = [self.result(run) for run in runs]
            if not all(results):
                return None, runs
            losses = [math.inf if result["loss"] is None else result["loss"] for result in results]
            best = losses.index(min(losses))
            if 0 < best < len(grid) - 1 or len(grid) == MOST_RATES:
                if losses[best] < math.inf:
                    self.tuned[variant, cost] = vertex(grid, losses, best), runs
                    return self.tuned[variant, cost]
                self.leave_out(variant, DIVERGED, f"every run, down to a learning rate of {grid[0]:g}")
                return None, []
            grid.append(2 * grid[-1] if best and losses[best] < math.inf else grid[0] / 2)

    def first_rates(self, variant, cost):
        """Return the rates that a search begins with: around the one that the baseline's search has ended with."""
        if cost != 1:  # the best rate falls with length
            own = self.tuning(variant, 1.0)[0]
            return [own / 2, own] if cost > 1 else [own, 2 * own]
        own = variant.settings["learning_rate"]
        if variant is not self.baseline:
            own = float(f"{own * self.tuning(self.baseline, 1.0)[0] / self.baseline.settings['learning_rate']:.3g}")
        elif self.rates:
            return list(self.rates)
        return [own / 2, own, 2 * own]

    # -- what the runs say ---------------------------------------------------------------------------------------

    def times(self, candidate):
        """Return the ratio of a candidate's step time to the baseline's, and its relative uncertainty, or None.

        Both are of the first look's runs, which alternate. They must be of one machine.
        """
        if not all(self.losses(variant, 0) for variant in (candidate, self.baseline)):
            return None
        runs = [[self.result(self.run(one, seed)) for seed in self.seeds(0)] for one in (candidate, self.baseline)]
        if len({result["machine"] for results in runs for result in results}) > 1:
            return None
        ours, theirs = ([result["step_seconds"] for result in results] for results in runs)
        ratios = [a / b for a, b in zip(ours, theirs)]
        return statistics.median(ratios), max(SPREAD, (max(ratios) - min(ratios)) / 2 / statistics.median(ratios))

    def costs(self, candidate) -> dict:
        """Return what a candidate's training costs, over the baseline's: {"operations": ..., "time": ...}.

        The time is left out where it differs from the operations by no more than a twentieth, or its own spread.
        """
        operations, times, asked = candidate.flops / self.baseline.flops, self.times(candidate), self.options["cost"]
        if asked == "operations" or not times:
            return {"operations": operations}
        time = float(f"{times[0] * candidate.settings['max_iters'] / self.baseline.settings['max_iters']:.3g}")
        differs = abs(time / operations - 1) > max(ALIKE, times[1])
        if asked == "time":
            return {"time": time}
        return {"operations": operations} | ({"time": time} if differs else {})

    def losses(self, variant, look, cost=1.0):
        """Return {seed: loss} of a variant at a look, or None if a run is missing or has diverged."""
        if variant in self.trouble or self.is_searching() and not self.tuning(variant, cost)[0]:
            return None
        runs = [self.run(variant, seed, cost) for seed in self.seeds(look)]
        results = [self.result(run) for run in runs]
        for run, result in zip(runs, results):
            if result and result["loss"] is None:
                self.leave_out(variant, DIVERGED, run.label())
        return None if variant in self.trouble or not all(results) else {run["seed"]: run["loss"] for run in results}

    def rung_costs(self):
        """Return the costs at which the baseline may have to be trained, without near duplicates."""
        needed = [rung for one in self.sound()[1:] for cost in self.costs(one).values() for rung in needed_rungs(cost)]
        kept = []
        for cost in [1.0, *self.ladder, *needed]:
            if nearest(cost, kept) is None:
                kept.append(cost)
        return kept

    def rungs(self, look):
        """Return the baseline's losses by cost, as far as all seeds of a look are there."""
        found = {cost: self.losses(self.baseline, look, cost) for cost in self.rung_costs()}
        return {cost: losses for cost, losses in found.items() if losses}

    def are_paired(self, candidate, look):
        """Return whether a candidate's runs are compared with the baseline's of equal seeds, which saw equal batches.

        Whether seeds matter is a test over all variants of the baseline's length and batches.
        """
        names = ("batch_size", "grad_accum_steps", "max_iters")
        alike = [one for one in self.sound() if all(one.settings[n] == self.baseline.settings[n] for n in names)]
        groups = [losses for losses in (self.losses(one, look) for one in alike) if losses]
        return candidate in alike and seeds_matter(groups)

    def judgements(self, candidate, look):
        """Return {price: its Judgement} of a candidate at a look, or None while its own runs are missing."""
        if (candidate, look) in self.judged:
            return self.judged[candidate, look]
        runs, rungs = self.losses(candidate, look), self.rungs(look)
        if not runs or 1.0 not in rungs:
            return None
        paired, found = self.are_paired(candidate, look), {}
        for price, cost in self.costs(candidate).items():
            spread = self.times(candidate)[1] if price == "time" else 0.0
            found[price] = judge(runs, rungs, cost, self.level, paired, spread)
        if all(one.verdict for one in found.values()):
            self.judged[candidate, look] = found
        return found

    def verdict(self, candidate, look):
        """Return the worse of a candidate's verdicts by operations and by time, or "" while runs are missing."""
        verdicts = [one.verdict for one in (self.judgements(candidate, look) or {}).values()]
        return min(verdicts, key=WORST_FIRST.index, default="")

    def open(self, look):
        """Return the candidates that no earlier look has decided."""
        sound = self.sound()[1:]
        return [one for one in sound if all(self.verdict(one, earlier) == UNDECIDED for earlier in range(look))]

    def needed(self, look):
        """Return the costs at which the baseline must be trained before a look decides."""
        found = [self.judgements(candidate, look) or {} for candidate in self.open(look)]
        needs = [one.needs for judgements in found for one in judgements.values() if one.needs]
        return {nearest(cost, self.rung_costs()) for cost in needs}

    def standing(self, candidate):
        """Return (verdict, why, look, judgements) of a candidate, by the last look that is complete."""
        verdict, why, seen, judgements = *self.trouble.get(candidate, (UNDECIDED, "")), None, {}
        for look in range(len(self.looks)):
            if verdict != UNDECIDED or not self.verdict(candidate, look):
                break
            verdict, seen, judgements = self.verdict(candidate, look), look, self.judgements(candidate, look)
        return verdict, why, seen, judgements

    def known_noise(self):
        """Return the deviation of the baseline's losses in the last comparison on these tokens, or a usual one."""
        ledger, noise = self.options["out"].parent / "verdicts.jsonl", USUAL_NOISE
        for facts in read_json_lines(ledger):
            if facts["data"]["sha256"] == self.meta["sha256"]:
                noise = facts["baseline"]["noise"] or noise
        return noise

    def forecast(self):
        """Return (runs, seconds of one worker) at least and at most."""
        own = [(variant, 1.0) for variant in self.sound()]
        rungs = [(self.baseline, cost) for cost in self.rung_costs() if cost != 1]
        found = []
        for lengths, searched, seeds in ((own, 3, self.looks[0]), (own + rungs, 6, self.looks[-1])):
            each = seeds + searched * self.is_searching()
            seconds = [each * self.run_seconds(self.run_at(variant, 0.0, 0, cost)) for variant, cost in lengths]
            found.append((each * len(lengths), sum(seconds)))
        return found

    def run_seconds(self, run):
        """Return how long a run will take, by those that have ended: they also import, evaluate and are measured."""
        if not self.ended:
            return run.flops / SPEED + OVERHEAD
        return run.flops * sum(seconds for _, seconds in self.ended) / sum(flops for flops, _ in self.ended)


# -- reading the arguments -------------------------------------------------------------------------------------


def read_variants(words, common, options):
    """Return the variants of the arguments, each with its frozen code."""
    named = [(name, *split_code(rest)) for name, rest in map(split_name, words)]
    if options["against"]:
        name, _, rest = named[0] if named else split_name("") + ([],)
        named = [(f"{name} @{options['against']}", [f"@{options['against']}"], rest), *(named or [(name, [], [])])]
    if len(named) < 2:
        needed = "config/standard_shakespeare.py config/m1_shakespeare.py, or --against=HEAD and a candidate"
        raise UserError(f"a baseline and a candidate are needed: {needed}")
    for name, number in Counter(name for name, _, _ in named).items():
        if number > 1:
            raise UserError(f"two variants are named {name!r}: rename one of them, as in 'NAME: words'")
    variants = []
    for name, code, rest in named:
        home = freeze(code, options["out"].resolve() / "code")
        defaults, settings = read_variant(name, rest, common, home)
        variants.append(Variant(name, settings, defaults, home, " ".join(code)))
    for name in ("dataset", "block_size", "eval_tokens"):
        values = sorted({str(variant.settings[name]) for variant in variants})
        if len(values) > 1:
            why = "losses are comparable only on the same windows of the same text"
            raise UserError(f"{name} differs, {' and '.join(values)}: {why}")
    return variants


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
        raise UserError(f"{name} = {text!r} does not work: it must be distinct numbers above 0, such as 1,2,3")
    return values


def read_looks(options):
    """Return the numbers of seeds after which a verdict is tried."""
    looks = [int(number) for number in numbers(options, "seeds")]
    if looks != sorted(looks) or len(looks) not in ERROR_OF_A_LOOK or not 2 <= looks[0] <= looks[-1] < 1000:
        needed = "one number, or up to five that rise, such as 3,5,8; a single seed is no comparison"
        raise UserError(f"seeds = {options['seeds']!r} does not work: it must be {needed}")
    return looks


# --------------------------------------------------------------------------------------------------------------


def save_windows(data, settings, folder):
    """Write the windows on which the referee measures every loss, and return the path of their file."""
    path = folder / f"windows-{settings['block_size']}-{settings['eval_tokens']}.pt"
    if not path.exists():
        pairs = data.windows("val", 1, settings["block_size"], settings["eval_tokens"])
        x, y = (torch.cat(part).int() for part in zip(*pairs))
        with file_errors():
            folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as file:
                torch.save({"x": x, "y": y, "vocab_size": data.meta["vocab_size"]}, file)
    return path


@contextmanager
def stdout_to_stderr():
    """Redirect what this process and those that it starts print."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def vertex(rates, losses, best):
    """Return the rate at the vertex of the parabola through the best and its neighbors, over log rate, to two digits.

    It is nearer to the best than to its neighbors. If a neighbor is missing or has diverged, it is the best.
    """
    if not 0 < best < len(rates) - 1 or not math.isfinite(losses[best - 1] + losses[best + 1]):
        return rates[best]
    x = np.log(np.array(rates[best - 1 : best + 2]) / rates[best])
    curvature, slope, _ = np.polyfit(x, losses[best - 1 : best + 2], 2)
    return float(f"{rates[best] * math.exp(-slope / (2 * curvature)):.2g}") if curvature > 0 else rates[best]
