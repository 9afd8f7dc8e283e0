"""The tables of README.md and RESULTS.md on Methods 1 to 5 and W2, recomputed from the runs in tests/bench/results."""

import csv
import math
from collections import defaultdict
from statistics import fmean

import numpy as np
from scipy.stats import ttest_ind

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
PAGE = (BENCH / "RESULTS.md").read_text(encoding="utf-8")


def rows_under(title, page=PAGE):
    """Return the rows of the tables of the section whose title begins like this, without headings: lists of cells."""
    (section,) = [section for section in page.split("\n## ") if section.startswith(title)]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in section.splitlines() if line[:1] == "|"]
    rules = {i for i, row in enumerate(rows) if set(row[-1]) == {"-"}}
    assert rules, f"no table under {title}"
    return [row for i, row in enumerate(rows) if not rules & {i, i + 1}]


def comparison(file, steps, **settings):
    """Return {variant: [operations, gain that would pay, gain]} after these steps, of the runs with these settings."""
    losses, flops = defaultdict(list), {}
    with open(BENCH / "results" / f"{file}.csv", newline="", encoding="utf-8") as lines:
        for run in csv.DictReader(lines):
            if settings.items() <= run.items() and run["seed"] != "0":  # seed 0 tunes the rates
                losses[run["variant"], int(run["steps"])].append(float(run["loss"]))
                flops[run["variant"], int(run["steps"])] = float(run["flops"])
    lengths = sorted(length for name, length in losses if name == "standard")
    curve, standard, rows = [fmean(losses["standard", length]) for length in lengths], losses["standard", steps], {}
    for name in [name for name, length in losses if length == steps]:
        cost = flops[name, steps] / flops["standard", steps]
        would_pay = fmean(standard) - np.interp(math.log(cost * steps), np.log(lengths), curve)
        rows[name] = [f"{cost:.2f}", f"{would_pay:.3f}", gain(standard, losses[name, steps])]
    return rows


def gain(baseline, losses):
    interval = ttest_ind(baseline, losses, equal_var=False).confidence_interval(0.95)
    return f"{fmean(baseline) - fmean(losses):+.3f} ± {(interval.high - interval.low) / 2:.3f}"


def small_models(text):
    """Return the comparisons on a text at 3 layers. That of W2 has runs of its own."""
    methods, w2 = (comparison(file, 400, dataset=f"shakespeare_{text}") for file in ("methods", "w2"))
    for name in [name for name in methods if name.endswith(", tuned rate")]:  # instead of runs at half that rate
        methods[name.removesuffix(", tuned rate")] = methods.pop(name)
    return methods | {name: row for name, row in w2.items() if name != "standard"}


def test_readme_table():
    shown, rows = rows_under("Results", (ROOT / "README.md").read_text(encoding="utf-8")), small_models("char")
    assert shown and shown == [[name, *rows[name]] for name, *_ in shown]


def test_methods_and_w2():
    shown, texts = rows_under("Do Methods"), [small_models("bpe"), comparison("depth", 1000, n_embd="256")]
    for name, *cells in shown:
        cells = [cell.rstrip("*†") for cell in cells]  # a note below the table
        assert cells == ["{2} ({1})".format(*text[name]) if name in text else "" for text in texts], name


def test_no_form_of_methods_1_to_4_reaches_the_gain_that_would_pay():
    for rows in small_models("char"), small_models("bpe"):
        forms = [row for name, row in rows.items() if name < "Method 5"]
        assert len(forms) == 12 and all(sum(map(float, row[2].split(" ± "))) < float(row[1]) for row in forms)
