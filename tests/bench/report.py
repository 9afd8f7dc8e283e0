"""What a comparison says: a table, the smallest detectable differences, notes, and all runs as CSV."""

import csv
import io
import math
import statistics

from config.runtime.errors import file_errors
from config.runtime.files import atomic_write
from runs import DEFAULTS, NO_MATTER
from stats import TIE, holm

HEADER = ["candidate", "parameters", "rate", "loss", "measured gain", "× operations", "× time", "break-even gain"]
HEADER += ["verdict", "compute worth"]
FACTS = ["loss", "best_loss", "best_step", "parameters", "flops", "seconds", "machine", "commit"]


class Report:
    def __init__(self, comparison):
        self.comparison = comparison
        self.planned = comparison.planned()
        self.done = [plan for plan in self.planned if comparison.is_done(plan)]
        self.lacking = len(self.planned) - len(self.done)
        self.candidates = {candidate.name: candidate for candidate in comparison.candidates}
        self.base, *self.others = self.candidates
        self.main = {name: comparison.results(self.done, "main", of) for name, of in self.candidates.items()}
        fits = {name: comparison.curve(self.candidates[name], self.done) for name in self.others}
        self.fits = {name: fit for name, fit in fits.items() if fit}
        self.p = holm({name: fit.gain({1.0: 1})[3] for name, fit in self.fits.items()})  # at equal steps

    def costs(self, name):
        return self.comparison.costs(self.candidates[name], self.fits[name].cost)

    def row(self, name):
        runs, fit = self.main[name], self.fits.get(name)
        if not runs:
            return [name] + [""] * (len(HEADER) - 1)
        losses = [result["loss"] for result in runs]
        of_earlier_code = " (earlier code)" * any(result.get("earlier", False) for result in runs)
        cells = [name + of_earlier_code, f"{runs[0]['parameters']:,}", f"{runs[0]['rate']:g}"]
        diverged = None in losses
        cells.append("diverged" if diverged else f"{statistics.fmean(losses):.3f}{plus_minus(deviation(losses))}")
        cells.append(self.measured_gain(name) if fit else "")
        cells += [self.operations(name), self.times(name)]
        if not fit or len(fit.rungs) == 1:
            return cells + ["", "", ""]
        gains = [(price, fit.break_even(cost)) for price, cost in self.costs(name).items() if fit.reference(cost)]
        by_price = [decimal(gain) + f" by {price}" * (len(gains) > 1) for price, gain in gains]
        return cells + ["; ".join(by_price), self.verdict(name), self.worth(name)]

    def measured_gain(self, name):
        """Return the gain over the baseline's main runs ± the half-width of its 95% interval."""
        gain, _, half, _ = self.fits[name].gain({1.0: 1})
        word = "" if not self.p[name] < 0.05 else " better" if gain > 0 else " worse"
        return decimal(gain, "+") + plus_minus(half) + word

    def operations(self, name):
        """Return the operations of a whole training over the baseline's, if both have ended."""
        ended = [[run["flops"] for run in self.main[of] if run["loss"] is not None] for of in (name, self.base)]
        return f"{ended[0][0] / ended[1][0]:.2f}" if all(ended) else ""

    def times(self, name):
        timing = self.comparison.timing
        if not timing.is_known():
            return ""
        ratio, spread = timing.ratio(self.candidates[name], self.candidates[self.base])
        return f"{ratio:.2f}" + f" ± {spread:.2f}" * (spread >= 0.005)

    def verdict(self, name):
        """Return the verdict. Name the cost if it is *pays*, if the costs disagree, or if only time counts."""
        fit, costs, prices = self.fits[name], self.costs(name), {}
        for price, cost in costs.items():
            prices.setdefault(fit.verdict(cost) or "undecided", []).append(price)
        if len(prices) == 1 and "pays" not in prices and "operations" in costs:
            return next(iter(prices))
        return "; ".join(f"{verdict} by {' and '.join(of)}" for verdict, of in prices.items())

    def worth(self, name):
        """Return the cost that brings the baseline to a candidate's loss; beyond the ladder, that of its end."""
        rungs, found = self.fits[name].rungs, self.fits[name].worth()
        if not found:
            return ""
        beyond = {0.0: f"< {rungs[0]:.3g}", math.inf: f"> {rungs[-1]:.3g}"}
        low, worth, high = (beyond.get(times, f"{times:.2f}") for times in found)
        return f"{'roughly ' * (len(rungs) < 4)}{worth} ({low} to {high})"

    def sentence(self, name):
        """Return which difference would have been found, or "" where that is not known."""
        fit = self.fits.get(name)
        cost = fit and next(iter(self.costs(name).values()))
        if not fit or len(fit.rungs) == 1 or not fit.reference(cost) or math.isnan(fit.could_see(cost)):
            return ""
        found = f"{fit.could_see(cost):.3f} at equal cost is found in roughly 80% of such comparisons"
        return f"{name}: a difference of {found}."

    def notes(self):
        """Return the caveats of the table, one per line."""
        comparison, lines = self.comparison, []
        if self.lacking:
            lines.append(f"{self.lacking} of {len(self.planned)} runs are missing")
            lines += [line + ": --reuse keeps the old ones" for line in comparison.what_changed()]
        if comparison.quick:
            lines.append("quick: the results are meaningless")
        for plan in self.done:
            if comparison.result(plan.run)["loss"] is None and plan.stage in ("main", "ladder"):
                lines.append(f"diverged: {plan.run.label()}")
        if not comparison.is_searching() and comparison.lengths() and not comparison.committed:
            lines.append("no learning rates are tried: a rate unsuited to a length makes the baseline worse there")
        lines += self.notes_on_sizes() + self.notes_on_ends()
        if len(self.others) > 4:
            chance = "about one in forty seems to pay by chance: rerun those that do with other --seeds"
            lines.append(f"{len(self.others)} candidates: where nothing pays, {chance}")
        means = [mean for _, _, mean, _ in self.lengths()]
        if any(later > earlier for earlier, later in zip(means, means[1:])):
            lines.append("the baseline's loss rises with its length somewhere: a shorter run is used there")
        for fact in ("machine", "commit"):
            values = sorted({str(comparison.result(plan.run)[fact]) for plan in self.done})
            if len(values) > 1:
                lines.append(f"runs of more than one {fact}: {'; '.join(values)}")
        return lines

    def tokens_per_parameter(self):
        result = self.main[self.base][0]
        return self.comparison.baseline.tokens_per_step * result["steps"] / result["parameters"]

    def notes_on_sizes(self):
        """Return lines on tokens for each parameter, and on candidates that have more or fewer parameters."""
        if not self.main[self.base]:
            return []
        lines, parameters, tokens = [], self.main[self.base][0]["parameters"], self.tokens_per_parameter()
        if tokens < 20:
            early = "this early, more training lowers the loss a lot, so a costly candidate must gain as much"
            lines.append(f"{tokens:.2g} tokens for each parameter of the baseline: {early}")
        for name in self.others:
            times = self.main[name][0]["parameters"] / parameters if self.main[name] else 1
            if abs(times - 1) > 0.2:
                also = "compare it with a wider or narrower baseline (--n_embd) too"
                lines.append(f"{name} has {times:.2f} times the baseline's parameters: {also}")
        return lines

    def notes_on_ends(self):
        """Return lines on trainings whose loss is lowest long before their end."""
        lines, groups = [], {}
        for plan in self.done:
            result = self.comparison.last_result(plan.run)
            if plan.stage in ("main", "ladder") and result["loss"] is not None:
                groups.setdefault((plan.candidate.name, result["steps"]), []).append(result)
        for (name, steps), results in groups.items():
            at = statistics.median(result["best_step"] for result in results)
            rise = statistics.fmean(result["loss"] - result["best_loss"] for result in results)
            if at < 0.8 * steps and (self.comparison.options["best"] or rise > TIE):
                early = "before its learning rate has decayed: a shorter run may reach a lower loss"
                lines.append(f"{name}: of {steps:,} steps its loss is lowest after {at:,.0f}, {early}")
        return lines

    def lengths(self):
        """Return (steps, learning rate, mean loss, deviation) of the baseline's lengths."""
        found = {}
        baseline = self.comparison.baseline
        ladder = self.main[self.base] + self.comparison.results(self.done, "ladder", baseline)
        for result in sorted(ladder, key=lambda result: result["steps"]):
            if result["loss"] is not None:
                found.setdefault((result["steps"], result["rate"]), []).append(result["loss"])
        return [(*key, statistics.fmean(losses), deviation(losses)) for key, losses in found.items()]

    def markdown(self):
        parts = [f"## {self.comparison.title}" * bool(self.comparison.title)]
        parts.append(as_table(HEADER, [self.row(name) for name in self.main]))
        rows = [[f"{steps:,}", f"{rate:g}", f"{mean:.3f}{plus_minus(sd)}"] for steps, rate, mean, sd in self.lengths()]
        if len(rows) > 1:
            parts += [f"{self.base} by its steps:", as_table(["steps", "rate", "loss"], rows)]
        sentences = [f"- {sentence}" for sentence in map(self.sentence, self.others) if sentence]
        parts.append("\n".join(sentences))
        parts.append("\n".join(f"NOTE {line}" for line in self.notes()))
        return "\n\n".join(part for part in parts if part) + "\n"

    def csv(self):
        """Return all runs, a line each: stage, candidate, the settings that are not defaults, and its results."""
        given = [plan.run.settings() for plan in self.done]  # as planned, so that `read_committed` finds the run
        names = sorted({name for settings in given for name in settings} - set(NO_MATTER))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(["stage", "candidate", *names, *FACTS])
        for plan, settings in zip(self.done, given):
            values = [settings.get(name, DEFAULTS[name]) for name in names]
            result = self.comparison.last_result(plan.run)
            writer.writerow([plan.stage, plan.candidate.name, *values, *(result[fact] for fact in FACTS)])
        return text.getvalue()

    @file_errors()
    def write(self, command):
        text, folder = self.markdown(), self.comparison.options["out"]
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in (("table.md", f"    {command}\n\n{text}"), ("runs.csv", self.csv())):
            with atomic_write(folder / name) as file:
                file.write(content.encode())
        print(f"saved: {folder / 'table.md'}, {folder / 'runs.csv'}")


def plus_minus(half):
    """Return " ± half", or nothing where nothing is known."""
    return "" if math.isnan(half) else f" ± {half:.3f}"


def decimal(number, sign=""):
    """Return a number to three digits, and never -0.000."""
    return f"{round(number, 3) + 0.0:{sign}.3f}"


def deviation(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def as_table(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)
