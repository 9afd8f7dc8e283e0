"""The tables of RESULTS.md and the README, and the plot, recomputed from the data in tests/bench/results.

python tests/test_results.py prints the tables of RESULTS.md and draws the plot.
"""

import csv
import json
import re
import sys
from collections import defaultdict
from statistics import fmean

import pytest
from scipy.stats import ttest_ind

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
sys.path.insert(0, str(BENCH))
from plot import draw_differences

RESULTS = (BENCH / "RESULTS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLOT = ROOT / ".github" / "tokens.png"  # its description lists what it shows


def read(name):
    text = (BENCH / "results" / name).read_text(encoding="utf-8")
    return json.loads(text) if name.endswith(".json") else list(csv.DictReader(text.splitlines()))


def difference(losses, baseline):
    """Return the difference of means and the half-width of its 95% interval, by Welch's t test."""
    interval = ttest_ind(losses, baseline, equal_var=False).confidence_interval(0.95)
    return fmean(losses) - fmean(baseline), (interval.high - interval.low) / 2


def signed(mean, half_width):
    return f"{round(mean, 3) + 0.0:+.3f} ± {half_width:.3f}"  # + 0.0: no -0.000


def in_words(mean, half_width):
    word = f"{abs(mean):.3f} {'higher' if mean > 0 else 'lower'}" if round(mean, 3) else "0.000"
    return f"{word} ± {half_width:.3f}"


THREE_LAYERS = {"text": "dictionary", "layers": "3", "width": "64"}
STEPS = {5: "711", 20: "2844", 60: "8532"}  # of the models of width 64, for so many tokens per parameter


def training_runs(**settings):
    """Return the runs of training.csv with these settings, without those that only tuned a rate."""
    runs = [run for run in read("training.csv") if run["seed"] not in ("0", "1000") and settings.items() <= run.items()]
    runs = [run for run in runs if (run["layers"], run["rate"]) != ("8", "0.0085")]  # two more that only tuned
    return [run | {"loss": float(run["loss"]), "flops": float(run["flops"])} for run in runs]


def compare(steps, **settings):
    """Return {variant: (compute, difference after the same steps, difference for the same compute)}.

    The standard runs are those of the machines that trained the variant. Without any of its compute, the last is None.
    """
    runs, found = training_runs(**settings), {}
    for variant in sorted({run["variant"] for run in runs if run["steps"] == steps} - {"standard"}):
        own = [run for run in runs if run["variant"] == variant and run["steps"] == steps]
        machines, standard = {run["machine"] for run in own}, defaultdict(list)
        for run in runs:
            if run["variant"] == "standard" and run["machine"] in machines:
                standard[run["flops"]].append(run["loss"])
        (shorter,) = {run["flops"] for run in runs if run["variant"] == "standard" and run["steps"] == steps}
        cost, losses = own[0]["flops"], [run["loss"] for run in own]
        nearest = min(standard, key=lambda flops: abs(flops - cost))
        same_compute = difference(losses, standard[nearest]) if 0.98 < nearest / cost < 1.02 else None
        found[variant] = cost / shorter, difference(losses, standard[shorter]), same_compute
    return found


def as_cells(rows, form=signed):
    return {name: [f"{cost:.2f}", *(form(*one) if one else "" for one in both)] for name, (cost, *both) in rows.items()}


def fewer_or_more_tokens():
    rows = {tokens: compare(STEPS[tokens], **THREE_LAYERS) for tokens in (5, 60)}
    return as_cells({f"{tokens}: {name}": row for tokens in rows for name, row in rows[tokens].items()})


def over_tokens():
    """Return {variant: {tokens per parameter: difference for the same compute}}, rounded."""
    lengths = {tokens: compare(steps, **THREE_LAYERS) for tokens, steps in STEPS.items()}
    return {
        name: {tokens: [round(float(x), 3) for x in rows[name][2]] for tokens, rows in lengths.items() if name in rows}
        for name in lengths[5]
    }


def width_128():
    standard = training_runs(variant="standard", steps="8809", **THREE_LAYERS | {"width": "128"})
    xeon, epyc = ([run["loss"] for run in standard if run["dtype"] == dtype] for dtype in ("float32", "bfloat16"))
    rows = as_cells(compare("8809", dtype="bfloat16", **THREE_LAYERS | {"width": "128"}))
    return rows | {"standard, Xeon, float32": ["1.00", signed(*difference(xeon, epyc)), ""]}


def ways_to_count():
    """Return the compute of methods in the first table: as counted, with half of the attention, with kept weights."""
    d, inner, T, vocabulary, layers = 64, 192, 128, 1024, 3
    outputs, mlp, product = 4 * d * d, 6 * d * inner, 2 * T * d  # a product makes attention weights, or uses them
    pairs, rows = layers * (layers - 1) // 2, defaultdict(list)  # of a layer and an earlier one
    for share, kept in ((1, False), (0.5, False), (1, True)):
        standard = layers * (2 * outputs + mlp + 2 * share * product) + 2 * d * vocabulary
        makes = 0 if kept else share * product
        attention = makes + share * product + outputs
        reruns = {"Methods 1 and 3": attention + mlp, "Methods 2 and 4": attention, "Method 5": makes}
        for name, rerun in reruns.items():
            rows[name].append(f"{1 + pairs * rerun / standard:.2f}")
    return rows


# -- the W2 document's benchmarks ----------------------------------------------------------------------------

KINDS = "standard", "w2", "w2_overlap"
SHAPES = {
    "base": {"n_layer": 2, "block_size": 127},
    "long": {"n_layer": 2, "block_size": 511},
    "deep": {"n_layer": 4, "block_size": 127},
}
TUNING_SEEDS = 0, 6, 7, 8
LAST = "last 100 steps"  # of training: their mean loss


def task_runs(file, tuning=False, **settings):
    """Return the runs of a benchmark with these settings, each as one flat dict. Some only tune rates."""
    flat = [{"attention": "standard"} | run["run"] | run["run"]["model"] | run for run in read(file)]
    return [run for run in flat if settings.items() <= run.items() and tuning == (run["seed"] in TUNING_SEEDS)]


def published(file, column, rate, **shape):
    """Return a column of the runs of each kind, with the document's settings. The rate is W2's."""
    own = dict.fromkeys(KINDS, {"learning_rate": rate}) | {"standard": {"n_embd": 96}}
    found = [task_runs(file, attention=kind, recipe="published", **own[kind], **shape) for kind in KINDS]
    return [[run[column] for run in runs] for runs in found]


def tuned(file, column, by, **settings):
    """Return a column of the runs of each kind, at the rate that is best on the tuning seeds."""
    found = []
    for kind in KINDS:
        scores = defaultdict(list)
        for run in task_runs(file, tuning=True, attention=kind, **settings):
            scores[run["learning_rate"]].append(run[by])
        best = (max if by == "accuracy" else min)(scores, key=lambda rate: fmean(scores[rate]))
        found.append([run[column] for run in task_runs(file, attention=kind, learning_rate=best, **settings)])
    return found


def next_to_standard(standard, *w2):
    """Return the standard model's mean, and the differences from it."""
    return [f"{fmean(standard):.3f}", *(signed(*difference(kind, standard)) for kind in w2)]


def copying_as_published():
    document = {"recall": "3.68, 3.45", "base": "6.94, 6.80", "long": "6.96, 6.94", "deep": "6.49, 5.84"}
    runs = {name: published("micro.json", LAST, 1e-3, **shape) for name, shape in SHAPES.items()}
    runs["recall"] = published("recall.json", LAST, 5e-3)
    return {name: [*next_to_standard(*kinds), document[name]] for name, kinds in runs.items()}


def copying_tuned():
    runs = {name: tuned("micro.json", LAST, by=LAST, n_embd=64, **shape) for name, shape in SHAPES.items()}
    runs["recall"] = tuned("recall.json", LAST, by="loss", recipe="fair")
    rows = {}
    for name, kinds in runs.items():
        copied = [str(sum(loss < 3.6 for loss in losses)) for losses in kinds]
        rows[name] = [*next_to_standard(*kinds), f"{', '.join(copied)} of {len(kinds[0])}"]
    return rows


def other_claims():
    new = tuned("entailment.json", "accuracy", by="accuracy", recipe="fair")
    rows = {"entailment": ["1.00, 1.00", *next_to_standard(*new)]}
    times = {row.pop(""): row.values() for row in read("speed_cpu.json")["tables"]["micro, by tasks.py"]}
    for name, document, sequences in (("base", "1.00, 1.03", 32), ("long", "1.00, 1.29", 4)):
        runs = task_runs("memory.json", batch_size=sequences, **SHAPES[name])
        rows[f"memory, {name}"] = [document, *(f"{run['MB kept'] / runs[0]['MB kept']:.2f}" for run in runs)]
        rows[f"time, {name}"] = ["1.00, 1.2", *(f"{time:.2f}" for time in (1, *times[name]))]
    return rows


def times_of_a_step():
    """Return compute, time and memory on a GPU, then compute and time on a CPU, in float32 and bfloat16."""
    rows, gpu = {}, read("speed_h100.json")["124M"]
    for name, run in gpu.items():
        compute = f"{run['operations']:.2f}" if "operations" in run else ""
        rows[name] = [compute, f"{run['ms'] / gpu['standard']['ms']:.2f}", f"{run['gb']:.0f}", "", "", ""]
    for row in read("speed_cpu.json")["tables"]["training"]:
        name = row.pop("")
        rows[name] = rows.get(name, [""] * 6)[:3] + [f"{cell:.2f}" for cell in row.values()]
    return rows


def losses_next_to_nanogpt():
    gpu, rows = read("speed_h100.json")["lowest losses"], {}
    for name, one in read("nanogpt.json")["models"].items():
        lowest = [f"{loss:.3f}" for loss in gpu[name].values()]
        rows[name] = [*lowest, *[""] * (2 - len(lowest)), f"{fmean(one['losses']):.3f} in {one['steps']} steps"]
    return rows


TABLES = {
    "20 tokens per parameter": lambda: as_cells(compare(STEPS[20], **THREE_LAYERS)),
    "5 or 60 tokens per parameter": fewer_or_more_tokens,
    "width 128": width_128,
    "8 layers": lambda: as_cells(compare("3128", text="Python source", layers="8")),
    "compute": ways_to_count,
    "WikiText-103, Method": lambda: {row.pop("report"): list(row.values()) for row in read("authors.csv")},
    "document's settings": copying_as_published,
    "tuned, width 64": copying_tuned,
    "other claims": other_claims,
    "a step": times_of_a_step,
    "loss": losses_next_to_nanogpt,
}


def shown(page, title):
    """Return {first cell: other cells} of the table whose header begins with this title."""
    (table,) = [part for part in page.split("\n\n") if part.startswith(f"| {title} |")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()[2:]]
    return {name: cells for name, *cells in rows}


@pytest.mark.parametrize("title", re.findall(r"(?<=\n\n)\| (.*?) \|", RESULTS))
def test_tables(title):
    assert shown(RESULTS, title) == TABLES[title]()


def test_table_of_the_readme():
    on_page, computed = shown(README, "variant"), as_cells(compare(STEPS[20], **THREE_LAYERS), in_words)
    assert on_page == {name: computed[name] for name in on_page}
    in_tables = [map(float, pair) for pair in re.findall(r"\| ([+-]\d\.\d{3}) ± (\d\.\d{3})", RESULTS)]
    in_text = re.findall(r"\d\.\d{3}(?: [a-z]+)? ± \d\.\d{3}", README)
    assert set(in_text) <= {in_words(*pair) for pair in in_tables}


def test_plot():
    assert str(over_tokens()).encode() in PLOT.read_bytes(), "draw it again: python tests/test_results.py"


if __name__ == "__main__":
    for title, computed in TABLES.items():
        print(f"\n| {title} |", *(f"| {' | '.join([name, *cells])} |" for name, cells in computed().items()), sep="\n")
    draw_differences(over_tokens()).savefig(PLOT, dpi=120, metadata={"Description": str(over_tokens())})
