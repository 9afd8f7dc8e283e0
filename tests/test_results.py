"""The figures of tests/bench/RESULTS.md and of README.md's table, recomputed from the runs in tests/bench/results."""

import csv
import json
import math
from collections import defaultdict
from statistics import fmean, stdev

import numpy as np
from scipy.stats import ttest_ind

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
LAST, KINDS = "last 100 steps", ("standard", "diagonal", "overlap")
SHAPES = {  # of the copying models: layers, context, widths of standard attention and W2
    "recall": (2, 127, 96, 64),
    "base": (2, 127, 96, 64),
    "long": (2, 511, 96, 64),
    "deep": (4, 127, 96, 64),
}
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


def tasks(file, number, **settings):
    """Return {kind: its numbers, of seeds 1, 2, ...} at each kind's best rate, of a task's runs with these settings."""
    found = defaultdict(dict)
    for result in json.loads((BENCH / "results" / f"{file}.json").read_text()):
        run = result["run"] | result["run"]["model"]
        kind = run.get("w2_score") or run.get("sigma") or run.get("attention", "standard")
        if run["seed"] in (1, 2, 3, 4, 5) and all(run[name] in values for name, values in settings.items()):
            found[kind].setdefault(run["learning_rate"], []).append(result[number])
    best = min if "loss" in number or "steps" in number else max
    return {kind: best(rates.values(), key=fmean) for kind, rates in found.items()}


def spread(numbers):
    return f"{fmean(numbers):.3f} ± {stdev(numbers):.3f}"


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


def test_copying():
    for name, *cells in rows_under("Does W2 copy"):
        layers, block, *widths = SHAPES[name]
        runs = tasks("micro", LAST, n_layer=[layers], block_size=[block], n_embd=widths, learning_rate=[1e-3])
        if name == "recall":
            runs = tasks("recall", LAST, task=["copy"], recipe=["published"])
        given = [spread(runs[kind]) for kind in KINDS]
        assert cells[:3] == [cell if cell[-5:] > "0.100" else cell[:5] for cell in given], name


def test_copying_with_equal_widths():
    """6.93 is chance, and 3.44 a perfect copy."""
    losses, copying = {}, {}
    for name in ("base", "long", "deep"):
        layers, block, *_ = SHAPES[name]
        runs = tasks("micro", LAST, n_layer=[layers], block_size=[block], n_embd=[64])
        losses[name] = [f"{fmean(runs[kind]):.3f}" for kind in KINDS]
        copying[name] = [sum(loss < 4 for loss in runs[kind]) for kind in KINDS]
    assert copying["base"] == [3, 3, 3] and copying["long"] == [0, 0, 0] and copying["deep"] == [3, 0, 2]  # of 3 seeds
    assert "of {} (standard), {} (distance) and {} (overlap).".format(*losses["base"]) in PAGE
    assert f"the standard model does ({losses['deep'][0]})," in PAGE


def test_other_claims_about_w2():
    tests = {
        "*recall*: loss after training": tasks("recall", "loss", task=["copy"], recipe=["fair"]),
        "*entailment*: accuracy on new pairs": tasks("entailment", "accuracy", recipe=["fair"]),
    }
    memory = [tasks("memory", "MB kept", batch_size=[32], block_size=[127], n_layer=[2])]
    memory += [tasks("memory", "MB kept", batch_size=[4])]
    memory += [tasks("memory", "MB kept", batch_size=[32], n_layer=[4])]
    times = json.loads((BENCH / "results" / "speed_cpu.json").read_text())["tables"]["micro, by tasks.py"]
    for name, _, *cells in rows_under("Do the W2 document's"):
        if name == "*entailment*: training accuracy, loss":
            seen = [tasks("entailment", f"seen {number}", recipe=["published"]) for number in ("accuracy", "loss")]
            standard, distance, overlap = (", ".join(f"{fmean(of[kind]):.3f}" for of in seen) for kind in KINDS)
            assert cells == [f"{distance} ({standard})", overlap]
        elif name in tests:
            standard, distance, overlap = (spread(tests[name][kind]) for kind in KINDS)
            assert cells == [f"{distance} ({standard})", overlap], name
        elif name == "memory":
            ratios = [[mb[kind][0] / mb["standard"][0] for mb in memory] for kind in KINDS[1:]]
            assert cells == [", ".join(f"{ratio:.2f}" for ratio in row) for row in ratios]
        else:
            assert cells == [", ".join(str(row[f"W2, {kind}"]) for row in times) for kind in ("distance", "overlap")]


def test_sentences():
    two, four, eight = (comparison("depth", 2000, block_size="128", n_layer=layers) for layers in "248")
    growth = comparison("growth", 6400)
    inputs = "Method 1, input kept", "Method 3.1, input kept"
    small = small_models("bpe")
    five = sorted((float(row[2].split()[0]), row[2]) for name, row in small.items() if name.startswith("Method 5"))
    half = comparison("methods", 400, dataset="shakespeare_bpe")["Method 3.1"][2]  # of the tuned rate
    sentences = [
        f"at half the rate, Method 3.1 gains {half}.",
        "as written are {}, {} and {};".format(*(small[f"Method {name}"][2] for name in ("3.2", "4.1", "4.2"))),
        f"lie between {five[0][1]} (5.3; mistuned too) and {five[-1][0]:+.3f}.",
        "(operations: {}) gains {}".format(*eight["standard, wider"][::2]),
        "({}) gain {} and {}.".format(*eight[inputs[0]][::2], eight[inputs[1]][2]),
        f"After 6,400 steps on the dictionary (3 layers), {inputs[1]}, gains {growth[inputs[1]][2]} (three",
        "gains are {}, {} and {}.".format(*(rows["Method 1"][2] for rows in (two, four, eight))),
    ]
    assert [sentence for sentence in sentences if sentence not in PAGE] == []


def test_speed():
    files = [json.loads((BENCH / "results" / f"speed_{name}.json").read_text())["tables"] for name in ("cpu", "h100")]
    cpu, gpu = ({row[""]: row for row in tables[name]} for tables, name in zip(files, ("training", "GPT-2's size")))
    names = {"Method 5.1": "summed QKᵀ", "W2, distance": "W2"}  # on the GPU
    for name, *cells in rows_under("How much slower"):
        numbers = [cpu[name][column] for column in ("operations", "float32: time", "bfloat16: time")]
        here = gpu.get(names.get(name, name), {})
        numbers += [here.get(column) for column in ("operations", "time")]
        assert cells == ["" if number is None else f"{number:.2f}" for number in numbers]
    assert f"Method 1 takes {gpu['Method 1']['GB'] / gpu['standard']['GB']:.1f} times the memory." in PAGE


def test_leak():
    found = json.loads((BENCH / "results" / "leak.json").read_text())
    runs, without_mask = found["runs"], found["ours, without a mask"]["validation loss"]
    moved = {"sdpa": [], "eager": []}
    for run in runs:
        moved[run["attention"]] += run["differences"]
        assert run["commit"] in PAGE
    assert f"earlier logits move by {min(moved['sdpa']):.2f} to {max(moved['sdpa']):.2f}; with" in PAGE
    assert not any(moved["eager"])
    assert f"reaches a loss of {without_mask:.3f} in" in PAGE
