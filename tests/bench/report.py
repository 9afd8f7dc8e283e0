"""What a comparison says: a table, a sentence for each candidate, notes, all runs as CSV, and a figure."""

import csv
import io
import math
import statistics
from importlib.util import find_spec

import numpy as np

from config.runtime.common import atomic_write, file_errors
from runs import DEFAULTS, NO_MATTER
from stats import CostCurve, has_diverged, holm

TIE = 0.02  # nats: a candidate whose whole interval is nearer to 0 ties with the baseline
HEADER = ["candidate", "parameters", "rate", "loss", "lowers it by", "× operations", "× time", "must lower it by"]
HEADER += ["verdict", "compute worth"]
FACTS = ["loss", "best_loss", "best_step", "parameters", "flops", "seconds", "machine", "commit"]


class Report:
    """What is known of a comparison so far."""

    def __init__(self, comparison):
        self.comparison = comparison
        self.planned = comparison.planned()
        self.done = [plan for plan in self.planned if comparison.is_done(plan)]
        self.lacking = len(self.planned) - len(self.done)
        self.main = {candidate.name: self.results("main", candidate) for candidate in comparison.candidates}
        self.base, *self.others = self.main
        self.unit = self.cost(self.base)
        self.ladder = [
            r for r in self.main[self.base] + self.results("ladder", comparison.baseline) if r["loss"] is not None
        ]
        whole = [name for name in self.others if self.is_whole(name)] if self.is_whole(self.base) else []
        self.fits = {name: CostCurve(self.ladder, self.main[name]) for name in whole}
        # the cost that brings the baseline to a candidate's loss, over the baseline's own: low, worth, high
        self.worth = {name: [flops / self.unit for flops in fit.worth()] for name, fit in self.fits.items()}
        self.p = holm({name: fit.estimate(self.unit)[3] for name, fit in self.fits.items()})  # at equal steps

    def results(self, stage, candidate):
        plans = [plan for plan in self.done if plan.stage == stage and plan.candidate is candidate]
        return [self.comparison.result(plan.run) for plan in plans]

    def is_whole(self, name):
        return bool(self.main[name]) and not has_diverged(self.main[name])

    def cost(self, name):
        """Return the floating-point operations of a candidate's whole training, or None if none has come to its end."""
        return next((result["flops"] for result in self.main[name] if result["loss"] is not None), None)

    # -- the table -------------------------------------------------------------------------------------------

    def row(self, name):
        """Return the cells of a candidate."""
        runs, fit = self.main[name], self.fits.get(name)
        if not runs:
            return [name] + [""] * (len(HEADER) - 1)
        losses = [result["loss"] for result in runs]
        cells = [name, f"{runs[0]['parameters']:,}", f"{runs[0]['rate']:g}"]
        cells.append("diverged" if None in losses else mean_sd(losses))
        cells.append(self.lowered(name) if fit else "")
        cells.append(f"{self.cost(name) / self.unit:.2f}" if self.cost(name) and self.unit else "")
        cells.append(self.times(name))
        if not fit or len(fit.lengths) == 1:
            return cells + ["", "", ""]
        if not fit.estimate(fit.flops):
            return cells + ["", "ladder too short", ""]
        return cells + [decimal(fit.gain(fit.flops, self.unit)), verdict(fit), self.worth_in_words(name)]

    def lowered(self, name):
        """Return by how much the loss is lower than the baseline's after its steps: ± half an interval of 95 %.

        It is positive where the candidate is better.
        """
        difference, _, half, _ = self.fits[name].estimate(self.unit)
        word = "" if not self.p[name] < 0.05 else " better" if difference < 0 else " worse"
        return decimal(-difference, "+") + plus_minus(half) + word

    def times(self, name):
        steps = self.comparison.timing.steps
        return f"{steps[name] / steps[self.base]:.2f}" if steps else ""

    def worth_in_words(self, name):
        low, worth, high = map(self.bounded, self.worth[name])
        return f"{worth} ({low} to {high})"

    def bounded(self, times):
        """Return a cost over the baseline's in words; what lies beyond the ladder is less, or more, than its ends."""
        costs = [result["flops"] / self.unit for result in self.ladder]
        return f"< {min(costs):.3g}" if times == 0 else f"> {max(costs):.3g}" if math.isinf(times) else f"{times:.2f}"

    # -- in words --------------------------------------------------------------------------------------------

    def sentence(self, name):
        """Return what the table says of a candidate, or "" where nothing can be said."""
        fit = self.fits.get(name)
        if not fit or not fit.estimate(fit.flops) or len(fit.lengths) == 1:
            return ""
        difference, _, half, _ = fit.estimate(self.unit)
        must, cost = fit.gain(fit.flops, self.unit), fit.flops / self.unit
        owes = f"must lower the loss by {decimal(must)}" if must > -5e-4 else f"may raise the loss by {decimal(-must)}"
        does = f"lowers it by {-difference:.3f}" if difference < 0 else f"raises it by {difference:.3f}"
        said = f"{name} costs {cost:.2f} times, {owes}, {does}{plus_minus(half)}: {verdict(fit)}."
        if math.isnan(half):
            return said
        sees = f"A difference of {fit.could_see():.3f} at equal cost would have been found in 80 % of such comparisons"
        return f"{said} It is worth {self.worth_in_words(name)} times. {sees}."

    def notes(self):
        """Return, as lines, what speaks against taking the table as it stands."""
        comparison, lines = self.comparison, []
        if self.lacking:
            stale = len(comparison.stale())
            other = f"; {stale} have been done with another model.py or train.py, which --reuse takes" if stale else ""
            lines.append(f"{self.lacking} of {len(self.planned)} runs are missing{other}")
        if comparison.quick:
            lines.append("quick: no figure counts")
        for plan in self.done:
            if comparison.result(plan.run)["loss"] is None and plan.stage in ("main", "ladder"):
                lines.append(f"diverged: {plan.run.label()}")
        if len(comparison.seeds) == 1:
            lines.append("one seed: nothing is known of the noise, so there are no intervals")
        for setting in ("block_size", "eval_tokens"):
            values = {candidate.settings[setting] for candidate in comparison.candidates}
            if len(values) > 1:
                lines.append(f"{setting} differs: the candidates' losses are over different windows of the text")
        if self.unit:
            baseline = next(result for result in self.main[self.base] if result["loss"] is not None)
            tokens = comparison.baseline.tokens_per_step * baseline["steps"] / baseline["parameters"]
            if tokens < 20:
                early = "so early, more training lowers the loss much, and a costly method must gain as much"
                lines.append(f"{tokens:.2g} tokens for each parameter of the baseline: {early}")
        if len(self.others) > 4:
            chance = "one of forty seems to pay by chance: look again at what does, with other --seeds"
            lines.append(f"{len(self.others)} candidates: where nothing pays, {chance}")
        means = [mean for _, _, mean, _ in self.lengths()]
        if any(later > earlier for earlier, later in zip(means, means[1:])):
            lines.append("the baseline's loss rises with its length somewhere: its ladder cannot be trusted there")
        results = [comparison.result(plan.run) for plan in self.done]
        for plan, result in zip(self.done, results):
            if plan.stage == "main" and result["loss"] is not None and result["best_loss"] < result["loss"] - TIE:
                lines.append(f"{plan.run.label()}: its loss was lower before the end, {result['best_loss']:.3f}")
        for name in self.main if comparison.options["best"] else ():
            runs = [result for result in self.main[name] if result["loss"] is not None]
            steps = ", ".join(f"{result['best_step']:,}" for result in runs)
            lines += [f"{name}: lowest after {steps} of {runs[0]['steps']:,} steps"] if runs else []
        for fact in ("machine", "commit"):
            values = sorted({str(result[fact]) for result in results})
            if len(values) > 1:
                lines.append(f"runs of more than one {fact}: {'; '.join(values)}")
        return lines

    def lengths(self):
        """Return (steps, learning rate, mean loss, deviation) of the baseline's lengths."""
        found = {}
        for result in sorted(self.ladder, key=lambda result: result["steps"]):
            found.setdefault((result["steps"], result["rate"]), []).append(result["loss"])
        return [(*key, statistics.fmean(losses), deviation(losses)) for key, losses in found.items()]

    # -- files -----------------------------------------------------------------------------------------------

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
        """Return all runs, a line each: stage, candidate, the settings that are not defaults, and what came of it."""
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
        """Write the report to table.md and runs.csv. Print a line if they were another comparison's."""
        text, folder = self.markdown(), self.comparison.options["out"]
        folder.mkdir(parents=True, exist_ok=True)
        table = folder / "table.md"
        before = table.read_text(encoding="utf-8").split("\n")[0].strip() if table.exists() else command
        if before != command:
            print(f"NOTE {table} was of another command, which gives it again: {before}")
        for name, content in (("table.md", f"    {command}\n\n{text}"), ("runs.csv", self.csv())):
            with atomic_write(folder / name) as file:
                file.write(content.encode())
        print(f"the same, and all runs: {table}, {folder / 'runs.csv'}")


def verdict(fit):
    """Say whether a candidate pays: by the interval of 95 % of its loss less the baseline's at its cost."""
    difference, _, half, _ = fit.estimate(fit.flops)
    if len(fit.lengths) == 1:
        return ""
    if difference + half < 0:
        return "pays"
    if difference - half > 0:
        return "does not pay"
    return f"tie within {abs(difference) + half:.3f}" if abs(difference) + half < TIE else "undecided"


def mean_sd(values):
    return f"{statistics.fmean(values):.3f}{plus_minus(deviation(values))}"


def plus_minus(half):
    """Return " ± half", or nothing where nothing is known."""
    return "" if math.isnan(half) else f" ± {half:.3f}"


def decimal(number, sign=""):
    """Return a number to three digits, and never -0.000."""
    return f"{round(number, 3) + 0.0:{sign}.3f}"


def deviation(values):
    return statistics.stdev(values) if len(values) > 1 else math.nan


def as_table(header, rows):
    """Return a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


# -- the figure ----------------------------------------------------------------------------------------------


def write_figure(reports, path):
    """Draw cost and worth of the candidates of all reports, or a single candidate beside the ladder."""
    known = [(report, name) for report in reports for name in report.fits]
    known = [(report, name) for report, name in known if report.row(name)[-1]]
    if not known:
        return
    if not find_spec("matplotlib"):
        print(f"NOTE {path} needs matplotlib: pip install matplotlib")
        return
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    if len(known) == 1:
        draw_ladder(axis, *known[0])
    else:
        draw_worth(axis, reports, known)
    axis.set_xscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.grid(color="#e4e4e4", linewidth=0.7)
    axis.spines[:].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    figure.savefig(path, dpi=100, bbox_inches="tight", pil_kwargs={"optimize": True})
    pyplot.close(figure)
    print(f"figure: {path}")


def draw_ladder(axis, report, name):
    """Draw the baseline's loss by its cost, with its band of 95 %, and the candidate as a point."""
    fit = report.fits[name]
    costs = np.geomspace(min(fit.lengths), max(fit.lengths), 100)
    estimates = [fit.estimate_row(fit.baseline(flops)) for flops in costs]
    loss, half = (np.array([estimate[i] for estimate in estimates]) for i in (0, 2))
    axis.plot(costs / report.unit, loss, color="black", linewidth=1, label=plain(report.base))
    axis.fill_between(costs / report.unit, loss - half, loss + half, color="black", alpha=0.12, linewidth=0)
    axis.plot([r["flops"] / report.unit for r in report.ladder], [r["loss"] for r in report.ladder], "k.", markersize=4)
    loss, _, half, _ = fit.estimate_row(fit.mean("candidate", fit.steps))
    axis.errorbar(fit.flops / report.unit, loss, half, fmt="o", color="#1f5a92", capsize=3, label=plain(name))
    axis.set(xlabel=f"cost: operations, over those of {plain(report.base)}", ylabel="validation loss")


def plain(name):
    """Return a name as matplotlib writes it: no formula, and no _ at the start, which would hide it."""
    return name.replace("$", r"\$").removeprefix("_")


def draw_worth(axis, reports, known):
    """Draw what each candidate is worth over what it costs, in times the baseline's training. A marker is a title."""
    names = list(dict.fromkeys(name for _, name in known))
    shortest = min(min(r["flops"] for r in report.ladder) / report.unit for report, _ in known)
    longest = max(max(r["flops"] for r in report.ladder) / report.unit for report, _ in known)
    axis.plot([shortest, longest], [shortest, longest], color="black", linewidth=1)
    middle = (shortest * longest**2) ** (1 / 3)
    axis.annotate("breaks even", (middle, middle), (-8, 8), textcoords="offset points", fontsize=9, ha="right")
    axis.axhline(1, color="black", linewidth=0.7, linestyle=":")
    axis.annotate("no gain", (shortest, 1), (0, 4), textcoords="offset points", fontsize=9)
    for report, name in known:
        style = {"color": f"C{names.index(name) % 10}", "marker": "osD^vP*X"[reports.index(report) % 8]}
        cost = report.fits[name].flops / report.unit
        low, worth, high = report.worth[name]
        ends = [min(max(times, shortest), longest) for times in (low, high)]
        axis.plot([cost, cost], ends, color=style["color"], linewidth=1.3)
        for times, end, arrow in ((low, ends[0], "v"), (high, ends[1], "^")):
            if times != end:  # beyond the ladder
                axis.plot(cost, end, color=style["color"], marker=arrow, markersize=6, clip_on=False)
        if shortest <= worth <= longest:
            axis.plot(cost, worth, markersize=7, linestyle="", **style)
    for name in names:
        axis.plot([], [], "o", color=f"C{names.index(name) % 10}", label=plain(name))
    for i, report in enumerate(reports):
        if report.comparison.title:
            axis.plot([], [], "osD^vP*X"[i % 8], color="#888888", label=report.comparison.title)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set(xlabel="cost: operations, over the baseline's", ylabel="worth: training of the baseline for the same loss")
