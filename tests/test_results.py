"""The tables of tests/bench/RESULTS.md, recomputed from the runs in tests/bench/results."""

import csv
import importlib
import math
import re
from collections import defaultdict

import numpy as np
import pytest
from scipy import stats

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
PAGE = (BENCH / "RESULTS.md").read_text(encoding="utf-8")
VARIANTS = {  # of the board, as they are called in its runs
    "Muon": "muon",
    "W2, distance": "w2_shakespeare",
    "Method 5.2": "m5.2",
    "Method 3.1, input kept": "m3.1_kept",
}
W2 = "W2", "W2, scalar σ"  # as the methods' runs call W2, distance


def rows_of(text):
    """Return the rows of a text's tables, without headings: lists of cells."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    rules = {i for i, row in enumerate(rows) if set(row[-1]) == {"-"}}
    return [row for i, row in enumerate(rows) if not rules & {i, i + 1}]


def shown_under(title):
    """Return the rows of the section whose title begins like this."""
    (section,) = [section for section in PAGE.split("\n## ") if section.startswith(title)]
    return rows_of(section)


def read_runs(file, **settings):
    with open(BENCH / "results" / f"{file}.csv", newline="", encoding="utf-8") as lines:
        return [run for run in csv.DictReader(lines) if settings.items() <= run.items()]


def gain(baseline, candidate, level=0.95):
    test = stats.ttest_ind(baseline, candidate, equal_var=False)
    interval = test.confidence_interval(level)
    return f"{np.mean(baseline) - np.mean(candidate):+.3f} ± {(interval.high - interval.low) / 2:.3f}"


def comparison(file, steps, **settings):
    """Return {variant: [cost, break-even, gain]} of the runs with these settings, as RESULTS.md shows them."""
    losses, flops, by_length = defaultdict(list), {}, defaultdict(list)
    for run in read_runs(file, **settings):
        if run["stage"] == "main" and int(run["max_iters"]) == steps:
            name = "W2, distance" if run["candidate"] in W2 else run["candidate"]
            losses[name].append(float(run["loss"]))
            flops[name] = float(run["flops"])
        if run["stage"] in ("main", "ladder") and run["candidate"] == "standard":
            by_length[int(run["max_iters"])].append(float(run["loss"]))
    lengths = sorted(by_length)
    curve = [np.mean(by_length[length]) for length in lengths]
    rows = {}
    for name, found in losses.items():
        cost = flops[name] / flops["standard"]
        break_even = np.mean(losses["standard"]) - np.interp(math.log(cost * steps), np.log(lengths), curve)
        rows[name] = [f"{cost:.2f}", f"{break_even:.3f}", gain(losses["standard"], found)]
    return rows


def losses_of(file):
    """Return {(variant, steps): {seed: loss}} of compare.py's runs, without those that tuned rates."""
    losses = defaultdict(dict)
    for run in read_runs(file):
        if int(run["seed"]) % 100:  # seeds 0 and 100 come before the first
            losses[run["variant"], int(run["steps"])][run["seed"]] = float(run["loss"])
    return losses


def board(file, level, **costs):
    """Return {variant: [cost, gain at equal operations]}: over the longest baseline up to its cost, on its seeds."""
    losses = losses_of(file)
    flops = {(run["variant"], int(run["steps"])): float(run["flops"]) for run in read_runs(file)}
    (base, steps), *_ = losses
    lengths, rows = sorted(length for name, length in losses if name == base), {}
    for (name, length), found in losses.items():
        if name == base:
            continue
        cost = costs.get(name) or flops[name, steps] / flops[base, steps]
        longest = max(length for length in lengths if length <= 1.005 * cost * steps)
        baseline = losses[base, longest]
        pairs = [(baseline[seed], loss) for seed, loss in found.items() if seed in baseline]
        rows[name] = [f"{cost:.2f}", gain(*zip(*pairs), level)]
    return rows


def test_methods_and_kinds():
    characters, pairs = (comparison("methods", 400, dataset=f"shakespeare_{name}") for name in ("char", "bpe"))
    deep = comparison("depth", 1000, n_embd="256")
    shown = shown_under("Do Methods")
    assert shown == [[name, *characters[name], pairs[name][2], *deep.get(name, [""] * 3)] for name, *_ in shown]


def test_growth():
    lengths = [comparison("growth", steps) for steps in (400, 1600, 6400)]
    shown = shown_under("Does a gain grow")
    assert shown == [[name, *(rows[name][2] for rows in lengths)] for name, *_ in shown]


def test_ideas():
    wide, deep = board("ideas", 1 - 0.05 / 3, muon=1.23), board("ideas_deep", 1 - 0.05 / 2, muon=1.1)
    for name, *cells in shown_under("Which published ideas"):
        name = VARIANTS.get(name) or re.fullmatch(r"\[(\w+)\].*", name)[1]
        assert cells == [*wide[name], deep.get(name, [""])[-1]], name


def test_ideas_on_new_seeds():
    losses = losses_of("confirm")
    for (name, steps), found in losses.items():
        baseline = losses["config/standard_shakespeare.py", steps]
        if found is not baseline:
            assert gain([baseline[seed] for seed in found], list(found.values()), 1 - 0.05 / 3) in PAGE, (name, steps)


def test_tasks(monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCH)
    tasks = importlib.import_module("tasks")
    monkeypatch.setattr(tasks, "trial", lambda *_: pytest.fail("its runs are not all in tests/bench/results"))
    for name in ("recall", "entailment", "micro"):
        tasks.main([name, f"--out={BENCH}/results"])
    printed = capsys.readouterr().out
    (section,) = [section for section in PAGE.split("\n## ") if section.startswith("Does W2")]
    rows, results = shown_under("Does W2"), re.findall(r"(?<![-+])\d\.\d{3} ± \d\.\d{3}", section)
    assert len(rows) == 9 and [row for row in rows if row not in rows_of(printed)] == []
    assert len(results) > 20 and [result for result in results if result not in printed] == []


def test_w2_on_shakespeare():
    losses = {run: list(found.values()) for run, found in losses_of("w2").items()}
    names = (f"config/{name}_shakespeare.py" for name in ("standard", "w2", "w2_overlap"))
    standard, distance, overlap = (losses[name, 400] for name in names)
    at_equal_cost = gain(losses["config/standard_shakespeare.py", 452], overlap)
    found = f"the distance gains {gain(standard, distance)}, the overlap {gain(standard, overlap)}"
    assert f"{found} (at equal operations, {at_equal_cost})" in PAGE


def test_the_first_page_shows_these_numbers():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    characters, deep = comparison("methods", 400, dataset="shakespeare_char"), comparison("depth", 1000, n_embd="256")
    shown = {name: cells for name, *cells in rows_of(readme) if "±" in cells[0] and name != "W2, overlap"}
    assert {name: cells[:2] for name, cells in shown.items()} == {
        name: [characters[name][2], deep.get(name, [""])[-1]] for name in shown
    }
    numbers = re.findall(r"[-+]\d\.\d{3} ± \d\.\d{3}", readme)
    assert len(shown) == 8 and [number for number in numbers if number not in PAGE] == []
