"""Does a gain grow or fade with training? Comparisons of the same candidates that differ only in their length."""

import math

import numpy as np
from matplotlib.figure import Figure

from report import Report, as_table, decimal, plus_minus
from stats import LinearModel, interpolated

OF_LENGTH = ("max_iters", "warmup_iters", "learning_rate")  # settings that may differ


def by_length(reports):
    """Return the whole reports of the first one's candidates, shortest training first.

    If these differ in more than their length, there are none.
    """

    def settings(report):
        return {name: candidate.settings | dict.fromkeys(OF_LENGTH) for name, candidate in report.candidates.items()}

    same = [report for report in reports if report.candidates.keys() == reports[0].candidates.keys()]
    whole = [report for report in same if not report.lacking and report.fits.keys() == set(report.others)]
    lengths = {report.comparison.baseline.settings["max_iters"] for report in whole}
    comparable = all(settings(report) == settings(whole[0]) for report in whole)
    return sorted(whole, key=Report.tokens_per_parameter) if comparable and 1 < len(lengths) == len(whole) else []


class Growth:
    """A candidate's gains at the lengths of the reports.

    Noise depends on the length, so the baseline's runs of each length have their own variance.
    """

    def __init__(self, reports, name):
        self.name, self.reports = name, reports
        ladder = [result for report in reports for result in report.main[report.base]]
        self.lengths = sorted({result["flops"] for result in ladder})
        self.models = []  # of each report: the mean of each length's runs, and of the candidate's
        for report in self.reports:
            runs = report.main[name]
            labels = [result["flops"] for result in ladder] + ["candidate"] * len(runs)
            losses = [result["loss"] for result in ladder + runs]
            self.models.append(LinearModel([{label: 1} for label in labels], losses, labels))

    def tokens(self):
        return np.array([report.tokens_per_parameter() for report in self.reports])

    def costs(self):
        """Return what training costs, relative to the baseline's of as many steps: {price: times}.

        The time of a step does not depend on the length, so it is the mean of what was measured at each.
        """
        times = []
        for report in self.reports:
            timing, baseline = report.comparison.timing, report.comparison.baseline
            if timing.is_known():
                times.append(timing.ratio(report.candidates[self.name], baseline)[0])
        operations = self.reports[0].main[self.name][0]["flops"] / self.unit(self.reports[0])
        return {"steps": 1.0, "operations": operations} | ({"time": np.mean(times)} if times else {})

    def unit(self, report):
        return report.main[report.base][0]["flops"]

    def gains(self, cost):
        """Return the gains, and half their 95% intervals, over the baseline trained `cost` times as long.

        The baseline's loss there is on the parabola through all its lengths, over the log of the length.
        """
        found = []
        for report, model in zip(self.reports, self.models):
            row = interpolated(self.lengths, cost * self.unit(report)) | {"candidate": -1}
            gain, _, half, _ = model.estimate(row)
            found.append((gain, half))
        return np.transpose(found)

    def per_doubling(self, values, halves):
        """Return the slope of gains over the length of training, per doubling, and half its 95% interval."""
        x = np.log2(self.tokens())
        weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
        return weights @ values, math.hypot(*(weights * halves))


def all_growths(reports):
    return [Growth(reports, name) for name in reports[0].others]


def growth_table(reports):
    """Return a table: of each candidate, at each price, the gain at each length, its slope and its mean."""
    rows = []
    for growth in all_growths(reports):
        for price, cost in growth.costs().items():
            values, halves = growth.gains(cost)
            mean = values.mean(), math.hypot(*halves) / len(halves)
            cells = [*zip(values, halves), growth.per_doubling(values, halves), mean]
            said = [decimal(value, "+") + plus_minus(half) for value, half in cells]
            rows.append([growth.name, price, f"{cost:.2f}", *said])
    lengths = [f"{report.tokens_per_parameter():.2g} tokens per parameter" for report in reports]
    return as_table(["candidate", "at equal", "baseline's steps", *lengths, "per doubling", "mean"], rows)


def write_growth_figure(reports, path):
    """Draw the gains at equal steps over the tokens per parameter: a line for each candidate, with what it costs."""
    figure, growths = Figure(figsize=(7.2, 4.3), layout="constrained"), all_growths(reports)
    axis = figure.add_subplot()
    for i, growth in enumerate(growths):
        values, halves = growth.gains(1.0)
        costs = [f"{cost:.2f}× {price}" for price, cost in growth.costs().items() if price != "steps"]
        apart = 1.03 ** (i - len(growths) / 2)  # so that intervals do not hide each other
        label = f"{growth.name} ({', '.join(costs)})"
        axis.errorbar(growth.tokens() * apart, values, halves, marker="o", capsize=2.5, label=label)
    axis.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    axis.set_xscale("log")
    tokens = [report.tokens_per_parameter() for report in reports]
    axis.set_xticks(tokens, [f"{count:.2g}" for count in tokens])
    axis.minorticks_off()
    axis.set_xlabel("training tokens per parameter")
    axis.set_ylabel("reduction of validation loss at equal steps (nats)")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")
