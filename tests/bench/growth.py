"""Does a gain grow or fade with training? Comparisons of the same candidates that differ only in their length."""

import math

import numpy as np
from matplotlib.figure import Figure

from report import Report, as_table, decimal, plus_minus
from stats import CostCurve, interpolated

OF_LENGTH = ("max_iters", "warmup_iters", "learning_rate")  # settings that may differ


def by_length(reports):
    """Return the reports that are whole, shortest training first, or none if they differ in more than their length."""

    def settings(report):
        return {name: candidate.settings | dict.fromkeys(OF_LENGTH) for name, candidate in report.candidates.items()}

    whole = [report for report in reports if not report.lacking and report.fits.keys() == set(report.others)]
    lengths = {report.comparison.baseline.settings["max_iters"] for report in whole}
    first = settings(whole[0]) if whole else {}
    comparable = all(first.get(name, one) == one for report in whole for name, one in settings(report).items())
    return sorted(whole, key=Report.tokens_per_parameter) if comparable and 1 < len(lengths) == len(whole) else []


def at_all_lengths(reports):
    return [name for name in reports[0].others if all(name in report.others for report in reports)]


def curves(reports, name):
    """Return a candidate's fit at each length. Its ladder has the baseline's runs of all lengths."""
    found = []
    for report in reports:
        ordered = [report] + [other for other in reports if other is not report]
        ladder = [result for one in ordered for result in one.main[one.base]]
        same_batches = report.candidates[name].batch == report.comparison.baseline.batch
        found.append(CostCurve(ladder, report.main[name], same_batches))
    return found


def prices(report, curve, name):
    """Return what a candidate's training costs, relative to the baseline's of as many steps: {price: times}."""
    timing, costs = report.comparison.timing, {"steps": 1.0, "operations": curve.cost}
    if timing.is_known():
        costs["time"] = timing.ratio(report.candidates[name], report.comparison.baseline)[0]
    return costs


def gains(curves, cost):
    """Return a candidate's gains, and half their 95% intervals, over the baseline trained `cost` times as long.

    The baseline's loss there is on the parabola through all its lengths, over the log of the length.
    """
    estimates = [curve.gain(interpolated(curve.rungs, cost)) for curve in curves]
    return np.transpose([(value, half) for value, _, half, _ in estimates])


def per_doubling(reports, values, halves):
    """Return the slope of gains over the length of training, per doubling, and half its 95% interval."""
    x = np.log2([report.tokens_per_parameter() for report in reports])
    weights = (x - x.mean()) / np.sum((x - x.mean()) ** 2)
    return weights @ values, math.hypot(*(weights * halves))


def growth_table(reports):
    """Return a table: of each candidate, at each price, the gain at each length, its slope and its mean."""
    rows = []
    for name in at_all_lengths(reports):
        of_lengths = curves(reports, name)
        for price, cost in prices(reports[0], of_lengths[0], name).items():
            values, halves = gains(of_lengths, cost)
            mean = values.mean(), math.hypot(*halves) / len(halves)
            cells = [*zip(values, halves), per_doubling(reports, values, halves), mean]
            said = [decimal(value, "+") + plus_minus(half) for value, half in cells]
            rows.append([name, price, f"{cost:.2f}", *said])
    lengths = [f"{report.tokens_per_parameter():.2g} tokens per parameter" for report in reports]
    return as_table(["candidate", "at equal", "baseline's steps", *lengths, "per doubling", "mean"], rows)


def write_growth_figure(reports, path):
    """Draw the gains at equal steps over the tokens per parameter: a line for each candidate, with what it costs."""
    figure, names = Figure(figsize=(7.2, 4.3), layout="constrained"), at_all_lengths(reports)
    axis, tokens = figure.add_subplot(), np.array([report.tokens_per_parameter() for report in reports])
    for i, name in enumerate(names):
        of_lengths = curves(reports, name)
        values, halves = gains(of_lengths, 1.0)
        priced = prices(reports[0], of_lengths[0], name)
        costs = [f"{cost:.2f}× {price}" for price, cost in priced.items() if price != "steps"]
        apart = 1.03 ** (i - len(names) / 2)  # so that intervals do not hide each other
        axis.errorbar(tokens * apart, values, halves, marker="o", capsize=2.5, label=f"{name} ({', '.join(costs)})")
    axis.axhline(0, color="#999999", linewidth=0.8, zorder=0)
    axis.set(xscale="log", xlabel="training tokens per parameter")
    axis.set_ylabel("reduction of validation loss at equal steps (nats)")
    axis.set_xticks(tokens, [f"{token:.2g}" for token in tokens])
    axis.minorticks_off()
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    print(f"figure: {path}")
