"""What a comparison runs: a pure function of its arguments and of the runs that are done."""

import json
import math
from collections import Counter
from itertools import count
from typing import NamedTuple

import numpy as np

from config.runtime.errors import UserError
from config.runtime.files import sha256
from config.runtime.log import code_version
from data.dataset import load_dataset
from data.prepare import ensure_prepared
from examine import identify, identity_under
from runs import Candidate, Run, make_candidate, read_words, result_of
from stats import CostCurve, has_diverged, is_same_cost
from timing import Timing

QUICK_SHAPE = ["--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2"]
MOST_RATES = 10  # learning rates tried per variant
ALIKE = 0.05  # largest relative difference at which time and operations count as one cost


class Planned(NamedTuple):
    stage: str
    candidate: Candidate
    times: float  # its steps / the candidate's max_iters
    run: Run | None  # None: its learning rate is not known yet


class Comparison:
    """The variants, the first of which is the baseline, and the runs that compare them.

    `words` are the variants' arguments, `common` train.py's options for all of them, `options` compare.py's settings.
    `committed` maps names of runs to committed results, which are used whatever their code and data; no runs are added
    to them. `times` holds their step times.
    """

    def __init__(self, title, words, common, options, device, committed=None, times=None):
        self.title, self.options, self.device, self.quick = title, options, device, options["quick"]
        read = [read_words(text, QUICK_SHAPE * self.quick + common, self.quick) for text in words]
        check_alike([settings for _, settings in read], options["best"])
        none = {"vocab_size": 1, "sha256": ""}  # results have what they cost; the data may not be here
        data = none if committed else load_dataset(ensure_prepared(read[0][1]["dataset"])).meta
        self.vocab_size = data["vocab_size"]
        self.candidates = [make_candidate(name, settings, self.vocab_size) for name, settings in read]
        for name, number in Counter(name for name, _ in read).items():
            if number > 1:
                raise UserError(f"two variants are named {name!r}: rename one of them, as in 'NAME: words'")
        if options["best"] and not all(candidate.settings["eval_interval"] for candidate in self.candidates):
            raise UserError("--best needs evaluations during training: set, for example, --eval_interval=100")
        if options["cost"] not in ("both", "operations", "time"):
            raise UserError(f"cost = {options['cost']!r} does not work: it must be one of both, operations, time")
        self.seeds = numbers(options, "seeds", int)
        self.ladder_seeds = numbers(options, "ladder_seeds", int) or self.seeds
        self.tuning_seed = next(seed for seed in count() if seed not in self.seeds + self.ladder_seeds)
        self.rates = numbers(options, "rates", float)
        tokens = sha256(json.dumps(data["sha256"], sort_keys=True).encode())[:8]
        self.folder = options["out"].resolve() / tokens  # of runs on these tokens
        self.committed, self.known = committed or {}, {}
        if not committed:  # examine the candidates, and find out which earlier runs they would repeat
            self.code = code_version()["sha256"]
            self.candidates = identify(self.candidates, self.folder, self.code, self.vocab_size)
        self.timing = Timing(self, times)
        if options["cost"] == "time" and not self.timing.is_known() and options["plan"]:
            raise UserError("--cost=time is measured where the runs are done: plan them with --cost=operations")

    @property
    def baseline(self):
        return self.candidates[0]

    def result(self, run):
        """Return the result of a run, or None if it has not ended. With --best its loss is its lowest."""
        found = self.last_result(run)
        lowest = found and self.options["best"] and found["loss"] is not None
        return found | {"loss": found["best_loss"]} if lowest else found

    def last_result(self, run):
        """Return the result of a run with its last loss, or None."""
        if run.folder.name not in self.known:
            found = result_of(run.folder)
            if found and found["code"] != self.code and not self.computes_the_same(run, found["code"]):
                cure = "remove it, and rerun the command"
                raise UserError(f"{run.folder}: the code or the data were changed before it began: {cure}")
            if not found and self.options["reuse"]:
                found = next((result | {"earlier": True} for result in self.earlier_results(run)), None)
            if not found and run.name not in self.committed:
                return None
            self.known[run.folder.name] = found or self.committed[run.name]
        return self.known[run.folder.name]

    def computes_the_same(self, run, code):
        """Return whether other `code` computes what the run's candidate does, even if files changed since we began."""
        known = identity_under(code, run.candidate, self.folder)
        if not known and code == code_version()["sha256"]:
            known = identify([run.candidate], self.folder, code, self.vocab_size)[0].identity
        return known == run.candidate.identity

    def earlier_results(self, run):
        """Return results of the same run by code with which the candidate computed something else."""
        folders = [folder for folder in self.folder.glob(f"{run.name}-*") if folder != run.folder]
        return [result for result in map(result_of, sorted(folders)) if result]

    def what_changed(self):
        """Return a line for each candidate that has changed since its missing runs were done."""
        stale = Counter(run.candidate.name for run in self.missing() if self.earlier_results(run))
        return [f"{name} has changed since {number} of its runs were done" for name, number in stale.items()]

    def is_done(self, planned):
        return planned.run is not None and self.result(planned.run) is not None

    def missing(self) -> list[Run]:
        """Return the runs that can be done now."""
        runs = {planned.run.folder: planned.run for planned in self.planned() if planned.run}
        return [run for run in runs.values() if not self.result(run)]

    def planned(self) -> list[Planned]:
        """Return all runs, as far as they are known: more learning rates may have to be tried."""
        plan = []
        for candidate in self.candidates:
            plan += [Planned("rates", candidate, 1.0, run) for run in self.tuning(candidate)[1]]
        for seed in self.seeds:  # alternating, so that a machine that slows down slows all of them
            plan += [self.plan_run("main", candidate, 1.0, seed) for candidate in self.candidates]
        for times in reversed(self.lengths()):
            plan += self.plan_rung(times)
        if self.lengths() and all(self.is_done(planned) for planned in plan):
            for times in self.distinct(self.open_costs(plan)):
                rung = self.plan_rung(times)
                if not self.committed or all(self.is_done(planned) for planned in rung):
                    plan += rung
        return plan

    def plan_run(self, stage, candidate, times, seed):
        rate = self.rate(candidate, times)
        run = None if rate is None else Run(candidate, rate, seed, times, self.folder)
        return Planned(stage, candidate, times, run)

    def plan_rung(self, times):
        """Return the baseline's runs at a length: the search for its learning rate, then one run per seed."""
        runs = self.tuning(self.baseline, times)[1]
        plan = [Planned("ladder's rate", self.baseline, times, run) for run in runs]
        return plan + [self.plan_run("ladder", self.baseline, times, seed) for seed in self.ladder_seeds]

    def lengths(self) -> list[float]:
        """Return the ladder's lengths in units of the baseline's own, by default powers of two without 1."""
        if self.options["ladder"] == "none":
            return []
        given = numbers(self.options, "ladder", float)
        if given:
            max_iters = self.baseline.settings["max_iters"]
            of_steps = {max(1, round(times * max_iters)): times for times in given}  # of few, lengths may coincide
            return sorted(times for steps, times in of_steps.items() if steps != max_iters)
        costs = [math.log2(candidate.flops / self.baseline.flops) for candidate in self.candidates]
        lowest, highest = min(-1, math.floor(min(costs))), max(1, math.ceil(max(costs) - 1e-3))
        return [2.0**power for power in range(lowest, highest + 1) if power]

    def costs(self, candidate, operations) -> dict:
        """Return what a candidate's training costs, over the baseline's: {"operations": ..., "time": ...}.

        The time is left out where it differs from the operations by no more than a twentieth, or its own spread.
        """
        if self.options["cost"] == "operations" or not self.timing.is_known():
            return {"operations": operations}
        ratio, spread = self.timing.ratio(candidate, self.baseline)
        time = float(f"{ratio * candidate.settings['max_iters'] / self.baseline.settings['max_iters']:.3g}")
        if self.options["cost"] == "time":
            return {"time": time}
        differs = abs(time / operations - 1) > max(ALIKE, spread / ratio)
        return {"operations": operations} | ({"time": time} if differs else {})

    def results(self, planned, stage, candidate):
        """Return the results of those `planned` runs of a stage and a candidate that are done."""
        plans = [plan for plan in planned if plan.stage == stage and plan.candidate is candidate]
        return [self.result(plan.run) for plan in plans if self.is_done(plan)]

    def curve(self, candidate, planned) -> CostCurve | None:
        """Return a candidate's fit to those of the `planned` runs that are done, or None while it has too few."""
        runs, base = (self.results(planned, "main", one) for one in (candidate, self.baseline))
        if not runs or not base or has_diverged(runs) or has_diverged(base):
            return None
        longer = self.results(planned, "ladder", self.baseline)
        ladder = base + [result for result in longer if result["loss"] is not None]
        return CostCurve(ladder, runs, same_batches=candidate.batch == self.baseline.batch)

    def open_costs(self, planned) -> list[float]:
        """Return the costs at which the baseline must be trained, because a ladder of `planned` runs cannot decide."""
        fits = {candidate: self.curve(candidate, planned) for candidate in self.candidates[1:]}
        costs = [(fit, cost) for one, fit in fits.items() if fit for cost in self.costs(one, fit.cost).values()]
        return [cost for fit, cost in costs if fit.verdict(cost) is None]

    def distinct(self, costs) -> list[float]:
        """Return `costs` without near duplicates of one another or of the ladder's lengths."""
        max_iters, taken = self.baseline.settings["max_iters"], [1.0, *self.lengths()]
        for cost in sorted(costs):
            if not any(is_same_cost(one, max(1, round(cost * max_iters)) / max_iters) for one in taken):
                taken.append(cost)
        return taken[1 + len(self.lengths()) :]

    def is_searching(self):
        return self.options["rates"] != "none" and len(self.rates) != 1

    def rate(self, candidate, times=1.0):
        """Return the learning rate of a candidate for a length of training, or None if it is not known yet."""
        if not self.is_searching():
            return self.rates[0] if self.rates else candidate.settings["learning_rate"]
        return self.tuning(candidate, times)[0]

    def tuning(self, candidate, times=1.0):
        """Return the candidate's best learning rate, or None while runs are missing, and the runs of the search.

        The grid grows by factors of two until the best rate has a worse one on either side. The vertex of the parabola
        through these three, over the logarithm of the rate, is the answer.
        """
        if not self.is_searching():
            return None, []
        if times != 1:  # the best rate falls with length
            own = self.rate(candidate)
            if own is None:
                return None, [None, None]
            grid = [own / 2, own] if times > 1 else [own, 2 * own]
        else:
            own = candidate.settings["learning_rate"]
            grid = list(self.rates) or [own / 2, own, 2 * own]
        while True:
            grid.sort()
            runs = [Run(candidate, rate, self.tuning_seed, times, self.folder) for rate in grid]
            results = [self.result(run) for run in runs]
            if not all(results):
                return None, runs
            losses = [math.inf if result["loss"] is None else result["loss"] for result in results]
            best = losses.index(min(losses))
            if 0 < best < len(grid) - 1 or self.quick or len(grid) == MOST_RATES:
                if losses[best] == math.inf:
                    raise UserError(f"{candidate.name}: every run has diverged, down to a learning rate of {grid[0]:g}")
                return vertex(grid, losses, best), runs
            grid.append(2 * grid[-1] if best and losses[best] < math.inf else grid[0] / 2)


def check_alike(all_settings, best):
    """Raise a UserError if the variants differ in a setting that makes their losses incomparable."""
    for name in ("dataset", "block_size", "eval_tokens", *["eval_interval"] * best):
        values = sorted({str(settings[name]) for settings in all_settings})
        if len(values) > 1:
            why = "losses are comparable only on the same windows of the same text, evaluated equally often"
            raise UserError(f"{name} differs, {' and '.join(values)}: {why}")


def vertex(rates, losses, best):
    """Return the rate at the vertex of the parabola through the best and its neighbors, over log rate, to two digits.

    It is nearer to the best than to its neighbors. If a neighbor is missing or has diverged, it is the best.
    """
    if not 0 < best < len(rates) - 1 or not math.isfinite(losses[best - 1] + losses[best + 1]):
        return rates[best]
    x = np.log(np.array(rates[best - 1 : best + 2]) / rates[best])
    curvature, slope, _ = np.polyfit(x, losses[best - 1 : best + 2], 2)
    return float(f"{rates[best] * math.exp(-slope / (2 * curvature)):.2g}") if curvature > 0 else rates[best]


def numbers(options, name, kind):
    """Return a setting such as "1,2,3" as a list of numbers; none for "" and "none"."""
    text = options[name]
    if text in ("", "none") and name != "seeds":
        return []
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    least, bound = (0, "from 0 up") if kind is int else (1e-12, "above 0")
    if not values or len(set(values)) < len(values) or not all(least <= value < math.inf for value in values):
        raise UserError(f"{name} = {text!r} does not work: it must be distinct numbers {bound}, such as 1,2,3")
    return values
