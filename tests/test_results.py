"""The tables of README.md and RESULTS.md, recomputed from the runs in tests/bench/results."""

import csv
import json
import math
import sys
from collections import defaultdict
from statistics import fmean, variance

import numpy as np
from scipy.stats import t as student
from scipy.stats import ttest_ind

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
sys.path.insert(0, str(BENCH))
from plot import draw_differences

RESULTS = (BENCH / "RESULTS.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")
PLOT = ROOT / ".github" / "tokens.png"  # its description lists what it shows
LAST = "last 100 steps"  # of training: their mean loss


def table(title, number=0, page=RESULTS):
    """Return {first cell: other cells} of a table in the section with this title."""
    (section,) = [part for part in page.split("\n## ") if part.startswith(title)]
    tables = [part for part in section.split("\n\n") if part.startswith("|")]
    rows = [[cell.strip() for cell in line[1:-1].split("|")] for line in tables[number].splitlines()]
    assert len(rows) > 2, "a table without rows"
    return {name: cells for name, *cells in rows[2:]}


def check(shown, computed):
    """Hold a table on a page to all rows that could be there. A failure prints the right ones."""
    expected = {name: computed[name] for name in shown}
    rows = [f"| {' | '.join([name, *cells])} |" for name, cells in expected.items()]
    assert shown == expected, "\n".join(["the table should be:", *rows])


def stored(name):
    return json.loads((BENCH / "results" / f"{name}.json").read_text(encoding="utf-8"))


# -- Methods 1 to 5 and W2 -----------------------------------------------------------------------------------


def training_runs(file, **settings):
    """Return {(variant, steps): (losses of all seeds at its best rate, operations)} of the runs with these settings."""
    losses, flops = defaultdict(lambda: defaultdict(list)), {}
    with open(BENCH / "results" / f"{file}.csv", newline="", encoding="utf-8") as lines:
        for run in csv.DictReader(lines):
            if settings.items() <= run.items() and run["seed"] != "0":  # seed 0 only tunes the rates
                key = run["variant"], int(run["steps"])
                losses[key][float(run["rate"])].append(float(run["loss"]))
                flops[key] = float(run["flops"])
    return {key: (min(by_rate.values(), key=fmean), flops[key]) for key, by_rate in losses.items()}


def difference(losses, baseline):
    """Return the difference of mean losses and the half-width of its 95% interval, by Welch's t test."""
    interval = ttest_ind(losses, baseline, equal_var=False).confidence_interval(0.95)
    return fmean(losses) - fmean(baseline), (interval.high - interval.low) / 2


def small_models(runs, steps):
    """Return {variant: (compute, difference after the same steps, difference for the same compute)} at 3 layers."""
    found = {}
    same_steps, flops = runs["standard", steps]
    for (name, trained), (losses, cost) in runs.items():
        if name != "standard" and trained == steps:
            longer = [run for (one, _), run in runs.items() if one == "standard"]
            same_compute, spent = min(longer, key=lambda run: abs(run[1] - cost))
            if cost / flops < 1.02:
                same_compute, spent = same_steps, flops
            assert 0.98 < spent / cost < 1.02, f"{name} has no standard runs of its compute"
            found[name] = cost / flops, difference(losses, same_steps), difference(losses, same_compute)
    return found


def on_characters():
    """Return what small_models does. Each file has standard runs of its own."""
    return small_models(training_runs("methods"), 400) | small_models(training_runs("w2"), 400)


def dictionary_runs(dtype, width=64):
    """Return the training_runs of this width on the machine that trained in this precision."""
    return training_runs("training", width=str(width), dtype=dtype)


def on_dictionary(steps=2844):
    """Return what small_models does. A variant is compared with the standard runs of the machines that trained it."""
    machines, found = [dictionary_runs(dtype) for dtype in ("bfloat16", "float32")], {}
    for variant in {name for runs in machines for name, trained in runs if trained == steps} - {"standard"}:
        pooled = defaultdict(lambda: ([], 0))
        for runs in machines:
            if (variant, steps) in runs:
                for (name, trained), (losses, flops) in runs.items():
                    if name in ("standard", variant):
                        pooled[name, trained] = pooled[name, trained][0] + losses, flops
        found |= small_models(pooled, steps)
    return found


def signed(mean, half_width):
    return f"{round(mean, 3) + 0.0:+.3f} ± {half_width:.3f}"


def in_words(mean, half_width):
    return f"{abs(mean):.3f} {'higher' if mean > 0 else 'lower'} ± {half_width:.3f}"


def as_cells(rows, form=signed):
    """Return the table of what small_models found."""
    return {name: [f"{compute:.2f}", *(form(*one) for one in both)] for name, (compute, *both) in rows.items()}


def over_tokens():
    """Return {variant: {tokens per parameter: difference for the same compute}}, rounded."""
    runs = {5: on_dictionary(711), 20: on_dictionary(), 60: on_dictionary(8532)}
    return {
        name: {tokens: [round(float(x), 3) for x in rows[name][2]] for tokens, rows in runs.items() if name in rows}
        for name in sorted(runs[5])
    }


def test_quick_start():
    runs = stored("quick_start")["runs"]
    for run in runs.values():
        assert f" {run['seconds']:.0f} seconds" in README and f" {run['validation loss']['800']:.3f} " in README
    share = runs["standard"]["flops_per_token"] / runs["Method 1"]["flops_per_token"]
    assert f" {share:.0%} of the compute" in README


def test_twenty_tokens_per_parameter():
    rows = on_dictionary()
    check(table("Do Methods"), as_cells(rows))
    check(table("Results", page=README), as_cells(rows, in_words))
    runs = dictionary_runs("float32")  # 3,369 steps: its compute if attention weights were kept
    weights_kept = difference(runs["Method 4.2, input kept", 2844][0], runs["standard", 3369][0])
    assert f"Method 4.2 with the input kept would be within the noise ({in_words(*weights_kept)})" in RESULTS


def test_five_tokens_per_parameter():
    rows = on_dictionary(711)
    check(table("Do Methods", 1), as_cells(rows))
    words = [in_words(*rows[f"Method {version}, input kept"][2]) for version in ("1", "3.1")]
    assert "Method 1 ends {} for the same compute, and Method 3.1 {}.".format(*words) in README


def test_sixty_tokens_per_parameter():
    rows = on_dictionary(8532)
    check(table("Do Methods", 2), as_cells(rows))
    words = in_words(*rows["Method 3.1, input kept"][2])
    ahead = in_words(*rows["Method 3.1, input kept"][1])
    sentence = f"After 60, Method 3.1 is within the noise ({words}), and further ahead after the same steps ({ahead})."
    assert sentence in README
    losses = sorted(dictionary_runs("float32")["standard", 14262][0])
    assert f"the ten standard runs of its compute range from {losses[0]:.2f} to {losses[-1]:.2f}." in RESULTS


def test_width_128():
    runs = dictionary_runs("bfloat16", width=128)
    rows = small_models(runs, 8809)
    check(table("Do Methods", 3), as_cells(rows))
    same_compute = {name: row[2] for name, row in rows.items()}
    m1, m31 = ("{:.3f} ± {:.3f}".format(*same_compute[f"Method {version}, input kept"]) for version in ("1", "3.1"))
    assert f"Methods 1 and 3.1 with the input kept end higher for the same compute, by {m1} and {m31}." in README
    m52, w2 = (in_words(*same_compute[name]) for name in ("Method 5.2", "W2, distance"))
    assert f"Method 5.2 ({m52}) and W2's distance ({w2}) are within the noise." in README
    spread = {key: max(losses) - min(losses) for key, (losses, _) in runs.items()}
    w2, standard = spread["W2, distance", 8809], max(spread[key] for key in spread if key[0] == "standard")
    assert w2 == max(spread.values())
    assert f"W2's seeds differ by up to {w2:.2f}, and those of the standard model by up to {standard:.2f}." in RESULTS
    late = fmean(runs["standard", 9308][0]) - fmean(runs["standard", 8809][0])
    assert f"mean loss is {late:.3f} higher than that of the shorter ones" in RESULTS
    others = dictionary_runs("float32", width=128)
    higher = difference(others["standard", 8809][0], runs["standard", 8809][0])
    assert f"There, the standard model ends {in_words(*higher)} than here" in RESULTS
    pooled = [runs[key][0] + others[key][0] for key in (("Method 3.1, input kept", 8809), ("standard", 15291))]
    assert f"Method 3.1 would be {in_words(*difference(*pooled))} for the same compute." in RESULTS


def shrinkage(before, after):
    """Return by how much a gap shrinks, and the half-width. A gap is two lists of losses, the variant's first."""
    groups = [*before, *after]
    errors = [variance(group) / len(group) for group in groups]  # and degrees of freedom by Welch–Satterthwaite
    freedom = sum(errors) ** 2 / sum(error**2 / (len(group) - 1) for error, group in zip(errors, groups))
    variant, standard, variant_later, standard_later = map(fmean, groups)
    shrunk = (variant - standard) - (variant_later - standard_later)
    return shrunk, student.ppf(0.975, freedom) * math.sqrt(sum(errors))


def test_gaps_shrink():
    runs, m31 = dictionary_runs("float32"), "Method 3.1, input kept"
    for name, before, after, expected in (  # the steps of the variant and of the standard model
        ("Method 1, input kept", (711, 1189), (2844, 4754), True),  # for the same compute
        (m31, (711, 1189), (2844, 4754), True),
        (m31, (2844, 4754), (8532, 14262), True),
        ("Method 5.2", (711, 775), (2844, 3099), True),
        ("Method 1, input kept", (711, 711), (2844, 2844), False),  # after the same steps
        (m31, (711, 711), (2844, 2844), False),
        (m31, (2844, 2844), (8532, 8532), True),
        ("Method 5.2", (711, 711), (2844, 2844), False),
    ):
        gaps = [(runs[name, steps][0], runs["standard", longer][0]) for steps, longer in (before, after)]
        shrunk, half_width = shrinkage(*gaps)
        assert (shrunk > half_width) == expected, f"{name}, {before} to {after}: {shrunk:.3f} ± {half_width:.3f}"

    after_20 = [dictionary_runs("bfloat16")[key][0] + runs[key][0] for key in ((m31, 2844), ("standard", 2844))]
    after_60 = [runs[key][0] for key in ((m31, 8532), ("standard", 8532))]
    words = "{:.3f} ± {:.3f}".format(*shrinkage(after_20, after_60))
    assert f"With all ten seeds after 20, its gain is {words}." in RESULTS
    standard = {steps: fmean(losses) for (name, steps), (losses, _) in runs.items() if name == "standard"}
    gains = standard[711] - standard[1189], standard[2844] - standard[4754]
    assert "by {:.3f} after 5 tokens per parameter, and by {:.3f} after 20.".format(*gains) in RESULTS


def test_plot_over_tokens():
    assert str(over_tokens()).encode() in PLOT.read_bytes(), "draw it again: python tests/test_results.py"


def test_one_token_per_parameter():
    rows = on_characters()
    check(table("Do Methods", 4), as_cells(rows))
    gaps = [signed(*rows[name][2]).removeprefix("+") for name in ("W2, diagonal σ", "W2, overlap")]
    assert "W2 with diagonal σ, by {}, and the overlap, by {}.".format(*gaps) in README
    for version in ("5.3", "5.4", "5.5", "5.6", "5.7"):
        *_, (mean, half_width) = rows[f"Method {version}"]
        assert abs(mean) < half_width, f"Method {version} is not within the noise"


def deeper_models(steps):
    """Return {variant: cells of the table}. The losses for the same compute are interpolated, over log(steps)."""
    runs, rows = training_runs("depth"), {}
    lengths = sorted(length for name, length in runs if name == "standard")
    curve = [fmean(runs["standard", length][0]) for length in lengths]
    for (name, length), (losses, cost) in runs.items():
        if length == steps:
            ratio = cost / runs["standard", steps][1]
            expected = np.interp(math.log(steps * ratio), np.log(lengths), curve)
            same_steps = signed(*difference(losses, runs["standard", steps][0]))
            rows[name] = [f"{ratio:.2f}", same_steps, f"{fmean(losses) - expected:+.3f}"]
    return rows


def test_eight_layers():
    check(table("Do Methods", 5), deeper_models(1000))


# -- the W2 document's benchmarks ----------------------------------------------------------------------------

KINDS = "standard", "distance", "overlap"
W2_RATES = {"recall": 5e-3, "micro": 1e-3, "entailment": 5e-4}  # the document's
TUNING_SEEDS = 0, 6, 7, 8
MICRO = {
    "base": {"n_layer": 2, "block_size": 127},
    "long": {"n_layer": 2, "block_size": 511},
    "deep": {"n_layer": 4, "block_size": 127},
}


def task_runs(name, tuning=False, **settings):
    """Return the runs of a benchmark with these settings, each as one flat dict. Some only tune rates."""
    found = []
    for result in stored(name):
        run, model = result["run"], result["run"]["model"]
        kind = model.get("w2_score", "distance") if "attention" in model else "standard"
        flat = run | model | result | {"kind": kind}
        if settings.items() <= flat.items() and tuning == (run["seed"] in TUNING_SEEDS):
            found.append(flat)
    return found


def published(name, **shape):
    """Return the runs of each kind at the document's widths and rates."""
    wider, w2 = {"n_embd": 96}, {"learning_rate": W2_RATES[name]}
    own = {"standard": wider, "distance": w2, "overlap": w2}
    return [task_runs(name, kind=kind, recipe="published", **own[kind], **shape) for kind in KINDS]


def tuned(name, by, **settings):
    """Return the runs of each kind at the rate that is best on the tuning seeds."""
    found = []
    for kind in KINDS:
        scores = defaultdict(list)
        for run in task_runs(name, tuning=True, kind=kind, **settings):
            scores[run["learning_rate"]].append(run[by])
        best = (max if by == "accuracy" else min)(scores, key=lambda rate: fmean(scores[rate]))
        found.append(task_runs(name, kind=kind, learning_rate=best, **settings))
    return found


def means(kinds, column):
    return [f"{fmean(run[column] for run in runs):.3f}" for runs in kinds]


def losses_and_copies(kinds):
    """Return the mean loss of each kind, and how many of its seeds ended within 0.1 of a perfect copy."""
    cells = []
    for runs in kinds:
        T = runs[0]["block_size"]  # the first half of T + 1 tokens is random, and its first token is no target
        perfect = (T - 1) / 2 / T * math.log(1024)
        copied = sum(run[LAST] < perfect + 0.1 for run in runs)
        cells.append(f"{fmean(run[LAST] for run in runs):.3f}, {copied} of {len(runs)}")
    return cells


def leads(kinds):
    """Return the differences from the standard model, as the text shows them."""
    standard, *others = [[run[LAST] for run in runs] for runs in kinds]
    return ["{:.3f} ± {:.3f}".format(*map(abs, difference(losses, standard))) for losses in others]


def test_copying():
    document = {"recall": "3.68, 3.45", "base": "6.94, 6.80", "long": "6.96, 6.94", "deep": "6.49, 5.84"}
    runs = {"recall": published("recall")} | {name: published("micro", **shape) for name, shape in MICRO.items()}
    check(table("Does W2 copy"), {name: [*losses_and_copies(runs[name]), document[name]] for name in runs})
    assert all(leads(runs[name])[1] in RESULTS for name in ("recall", "base"))
    runs = {name: tuned("micro", LAST, n_embd=64, **shape) for name, shape in MICRO.items()}
    runs["recall"] = tuned("recall", "loss", recipe="fair")
    check(table("Does W2 copy", 1), {name: losses_and_copies(runs[name]) for name in runs})
    assert all(lead in RESULTS for lead in [*leads(runs["base"]), leads(runs["recall"])[1]])


def test_other_claims():
    computed = {
        "entailment, accuracy": ["1.00, 1.00", *means(published("entailment"), "seen accuracy")],
        "entailment, new pairs, tuned": ["", *means(tuned("entailment", "accuracy", recipe="fair"), "accuracy")],
    }
    for (name, shape), document in zip(MICRO.items(), ("1.00, 1.03", "1.00, 1.29", "1.00, 1.04")):
        runs = task_runs("memory", batch_size=4 if name == "long" else 32, **shape)
        computed[f"memory, {name}"] = [document, *(f"{run['MB kept'] / runs[0]['MB kept']:.2f}" for run in runs)]
    check(table("Do the W2"), computed)


# -- speed ---------------------------------------------------------------------------------------------------


def test_next_to_nanogpt():
    nanogpt, ours = stored("nanogpt")["models"].values()
    assert abs(ours["steps"] - nanogpt["steps"] * nanogpt["ms"] / ours["ms"]) <= 1  # of rounded times
    losses = [f"{fmean(model['losses']):.3f}" for model in (nanogpt, ours)]
    assert f"takes {ours['ms'] / nanogpt['ms']:.2f} times as long as one of nanoGPT's" in README
    assert "its loss is lower: {1} against {0}.".format(*losses) in README
    assert f"the standard model takes {ours['ms']:.0f} ms, and one of nanoGPT's model {nanogpt['ms']:.0f} ms" in RESULTS
    assert f"for the {ours['steps']} that" in RESULTS and "ended at {} and ours at {}".format(*losses) in RESULTS


def test_losses_on_a_gpu():
    runs = stored("speed_h100")["runs with CUDA graphs"]
    ours = runs["standard + size_gpu.py, best validation loss"]
    in_nanogpt = runs["nanoGPT's own program, config/train_shakespeare_char.py, best validation loss"]
    nanogpt, standard, published = in_nanogpt.values()
    untied, kept = ours["0.3"], ours["m1, input kept, 0.3"]
    (tied,) = [loss for name, loss in ours.items() if "tied" in name]
    assert f"a validation loss of {tied:.3f} after 2,500 of them" in README
    assert f"lowest validation loss was {standard:.3f}, against {nanogpt:.3f}" in README
    for words in (
        f"nanoGPT's model reached a validation loss of {nanogpt:.3f}, and our standard model {standard:.3f}",
        f"the standard model reached {untied:.3f} in 5,000 steps, and Method 1 with the input kept {kept:.3f}",
        f"the standard model reached {tied:.3f} in 2,500 steps",
        f"close to the {published} in nanoGPT's README",
    ):
        assert words in RESULTS


def test_speed():
    on_gpu, computed = stored("speed_h100")["124M"], {}
    for name, row in on_gpu.items():
        compute = f"{row['operations']:.2f}" if "operations" in row else ""
        relative = row["ms"] / on_gpu["standard"]["ms"]
        computed[name] = [compute, f"{row['ms']:.1f}", f"{relative:.2f}", f"{row['gb']:.0f}"]
    check(table("How fast"), computed)
    on_cpu = stored("speed_cpu")["tables"]["training"]
    check(table("How fast", 1), {row.pop(""): [f"{cell:.2f}" for cell in row.values()] for row in on_cpu})


if __name__ == "__main__":
    found = over_tokens()
    draw_differences(found).savefig(PLOT, dpi=120, metadata={"Description": str(found)})
