"""
Compare variants with a baseline on any text, each at its best learning rate, at equal cost:

    python tests/bench/compare.py config/standard_shakespeare.py config/m1_shakespeare.py "--residual=m1 --keep_input"

Every argument is a variant, written as after train.py, in quotes if it has several words. The first one is the
baseline. "NAME: ..." gives it a name. Settings outside quotes apply to all; a variant's own take precedence. The name
of a file in tests/bench/studies stands for the comparisons in it.

Rerun it to continue. Finished runs are reused unless the variant's computation or the tokens have changed.
"""

import json
import re
import runpy
import shlex
import sys
import time
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

BENCH = Path(__file__).resolve().parent
sys.path.insert(0, str(BENCH.parents[1]))
from config import read_settings, split_settings
from config.runtime.devices import pick_device
from config.runtime.errors import UserError, install_excepthook
from figure import write_figure
from growth import by_length, growth_table, write_growth_figure
from plan import Comparison
from report import Report
from runs import Stopped, Workers, read_committed, runs_at_a_time, share_a_cpu, tidy

# -----------------------------------------------------------------------------
out = ""  # folder of table.md, runs.csv, figure.png and the runs; empty: out/compare, or out/<the study's name>
rates = ""  # learning rates to start from, as 1e-3,2e-3; empty: 0.5, 1 and 2 times the variant's; none: no search
seeds = "1,2,3"  # of the main runs and the ladder
ladder = ""  # multiples of baseline's max_iters, as 0.5,2,4; empty: powers of 2 up to the highest cost; none: no ladder
ladder_seeds = ""  # seeds of the ladder; empty: those of the main runs
cost = "both"  # operations, time or both: what "equal cost" means
workers = 0  # runs at a time; 0: one for each thread of the CPU, or each GPU
device = "auto"  # auto, cpu, cuda, mps
plan = False  # print the commands that can run now, one per line; run nothing
show = False  # print the results so far; run nothing
best = False  # use each run's lowest validation loss (set --eval_interval), not its last
reuse = False  # use old runs of variants that have changed
keep = False  # keep the checkpoints of runs that have ended
quick = False  # tiny runs, to see that it works: the results are meaningless
# -----------------------------------------------------------------------------


def read_arguments(argv):
    """Return compare.py's own settings, the variants' arguments, and the train.py options for all of them."""
    own = read_settings(__file__, [])
    mine = [word for word in argv if word in ("-h", "--help") or word.partition("=")[0].removeprefix("--") in own]
    rest = [word for word in argv if word not in mine]
    words, common = ([word for word in rest if word.startswith("--") == dashed] for dashed in (False, True))
    return own | split_settings(__file__, mine)[1], words, common


def read_study(name) -> dict:
    """Return {title: arguments} of the comparisons of a study."""
    studies = sorted(path.stem for path in (BENCH / "studies").glob("*.py"))
    if name not in studies:
        raise UserError(f"{name}: a baseline and a candidate are needed, or one of the studies {', '.join(studies)}")
    return runpy.run_path(str(BENCH / "studies" / f"{name}.py"))["COMPARISONS"]


def read_comparisons(argv):
    """Return the comparisons of the arguments, and the folder for their results."""
    options, words, _ = read_arguments(argv)
    study = words[0] if len(words) == 1 else ""
    top = Path(options["out"] or f"out/{study or 'compare'}")
    rest = [word for word in argv if not study or word != study]
    committed, times, results = None, {}, BENCH / "results" / f"{study}.csv"
    if options["show"] and results.exists() and not next(top.glob("**/log.jsonl"), None):  # it has not been begun here
        committed, times_file = read_committed(results), results.with_name(f"{study}_times.json")
        times = json.loads(times_file.read_text()) if times_file.exists() else {}
    comparisons = []
    for title, arguments in (read_study(study) if study else {"": []}).items():
        options, words, common = read_arguments([*arguments, *rest])
        if len(words) < 2:
            needed = "config/standard_shakespeare.py config/m1_shakespeare.py"
            raise UserError(f"a baseline and a candidate are needed: {needed}")
        options["out"] = top / re.sub(r"\W+", "-", title) if title else top
        if ":" in options["device"]:
            cure = "CUDA_VISIBLE_DEVICES keeps them on one"
            raise UserError(f"device = {options['device']!r} does not work: runs take all GPUs in turn; {cure}")
        device = pick_device(options["device"])
        with redirect_stdout(sys.stderr):  # what preparing a text prints is no part of a plan
            comparisons.append(Comparison(title, words, common, options, device, committed, times.get(title)))
    return comparisons, top


def main(argv):
    again = shlex.join(["python", sys.argv[0], *argv])
    comparisons, top = read_comparisons(argv)
    options = comparisons[0].options
    if options["plan"]:
        for comparison in comparisons:
            number = runs_at_a_time(options["workers"], comparison.device)
            alone = ["env", "OMP_NUM_THREADS=1"] if share_a_cpu(number, comparison.device) else []
            for run in comparison.missing():
                print(shlex.join([*alone, *run.command(options["device"])]))
        return
    if not options["show"]:
        for comparison in comparisons:
            do(comparison, again)
    reports = [Report(comparison) for comparison in comparisons]
    for report in reports:
        print("\n" + report.markdown())
    if not any(report.lacking for report in reports):  # incomplete results do not overwrite complete ones
        for report in reports:
            report.write(again.replace(" --show", ""))
        write_figure(reports, top / "figure.png")
    series = by_length(reports)
    if series:
        print("\n" + growth_table(series))
        write_growth_figure(series, top / "growth.png")


def do(comparison, again):
    """Run all missing runs of a comparison. On a signal, those in progress save and end."""
    options, timing, began = comparison.options, comparison.timing, time.time()
    number = runs_at_a_time(options["workers"], comparison.device)
    workers = Workers(number, comparison.device, options["keep"])
    try:
        lacks_times = options["cost"] != "operations" and not timing.is_known()
        if comparison.missing() or lacks_times:
            print(comparison.title or "comparison", flush=True)
            timing.measure(workers)
            for line in comparison.what_changed():
                print(f"{line}: they will be rerun (--reuse keeps the old ones)")
            print(f"{number} at a time on {comparison.device}: {progress(comparison, number)}; more runs may follow")
        while (todo := comparison.missing()) or workers.running:
            for run in todo:
                workers.offer(run)
            for run in workers.wait():
                loss = comparison.result(run)["loss"]
                said = "diverged" if loss is None else f"loss {loss:.4f}"
                print(f"{run.label()}: {said}; {progress(comparison, number)}", flush=True)
    except Stopped as stopped:
        print(f"\nstopped after {timedelta(seconds=round(time.time() - began))}; to resume: {again}", flush=True)
        raise SystemExit(128 + stopped.args[0]) from None
    finally:
        workers.stop()
    for planned in comparison.planned():  # also of runs that a scheduler has done
        tidy(planned.run.folder, options["keep"])


def progress(comparison, number):
    """Return as text how many runs are done, and the time left with `number` runs at a time."""
    planned = comparison.planned()
    todo = [plan for plan in planned if not comparison.is_done(plan)]
    left = timedelta(seconds=round(sum(map(comparison.timing.run_seconds, todo)) / number))
    return f"{len(planned) - len(todo)} of {len(planned)} runs are done, {left} left"


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
