"""
Does it pay? Compare variants with a baseline on any text, each at its best learning rate, at equal cost:

    python tests/bench/compare.py --against=HEAD config/m1_shakespeare.py                    # my edit of model.py
    python tests/bench/compare.py config/standard_shakespeare.py config/m1_shakespeare.py "mine: my.diff --keep_input"

Every argument is a variant, written as after train.py, in quotes if it has several words. The first one is the
baseline. "NAME: ..." gives it a name; @COMMIT, a folder or diffs name its code, which otherwise is the work tree.
Settings outside quotes apply to all; a variant's own take precedence. Rerun it to continue.
"""

import shlex
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from config import read_settings, split_settings
from config.runtime.devices import pick_device
from config.runtime.errors import UserError, file_errors, install_excepthook, quiet_pipe
from figure import write_figure
from plan import CRASHED, REFUSED, Comparison
from report import Report
from runs import Crashed, Stopped, Workers, runs_at_a_time, share_a_cpu, tidy
from stats import PAYS, UNDECIDED, detectable

# -----------------------------------------------------------------------------
against = ""  # a commit, such as HEAD: the baseline is the first variant as that commit has it
out = "out/compare"  # folder of table.md, verdict.json, runs.csv, figure.png and the runs
rates = ""  # learning rates to start from, as 1e-3,2e-3; empty: 0.5, 1 and 2 times the variant's; none: no search
seeds = "3,5,8"  # how many seeds each look has; one number: that many, and no looks
first_seed = 1  # of the seeds; 101, for example, confirms a verdict on seeds that it has not seen
ladder = ""  # multiples of the baseline's max_iters to train it for, as 0.5,2,4, besides those that a verdict needs
cost = "both"  # operations, time or both: what "equal cost" means
budget = ""  # such as 20m or 2h: no run starts that would not end within it
workers = 0  # runs at a time; 0: one for each thread of the CPU, or each GPU
device = "auto"  # auto, cpu, cuda, mps
plan = False  # print the commands that can run now, one per line; run nothing
show = False  # print the results so far; run nothing
details = False  # print a table of all runs too
exit_code = False  # say the verdict by the exit code: 0 pays, 10 does not, 11 undecided, 4 refused
# -----------------------------------------------------------------------------


def read_arguments(argv):
    """Return compare.py's own settings, the variants' arguments, and the train.py options for all of them."""
    own = read_settings(__file__, [])
    mine = [word for word in argv if word in ("-h", "--help") or word.partition("=")[0].removeprefix("--") in own]
    rest = [word for word in argv if word not in mine]
    words, common = ([word for word in rest if word.startswith("--") == dashed] for dashed in (False, True))
    return own | split_settings(__file__, mine)[1], words, common


@file_errors()
def make_comparison(argv):
    options, words, common = read_arguments(argv)
    options |= {"out": Path(options["out"]).expanduser(), "budget": seconds_of(options["budget"])}
    if options["first_seed"] < 1:
        raise UserError(f"first_seed = {options['first_seed']} does not work: the one before it finds the rates")
    if ":" in options["device"]:
        cure = "CUDA_VISIBLE_DEVICES keeps them on one"
        raise UserError(f"device = {options['device']!r} does not work: runs take all GPUs in turn; {cure}")
    options["out"].mkdir(parents=True, exist_ok=True)
    return Comparison(words, common, options, pick_device(options["device"]))


def seconds_of(budget):
    """Return a budget such as 20m in seconds."""
    number, unit = budget[:-1], budget[-1:]
    if not budget:
        return float("inf")
    if not number.isdecimal() or unit not in "smh":
        raise UserError(f"budget = {budget!r} does not work: write it as 90s, 20m or 2h")
    return int(number) * {"s": 1, "m": 60, "h": 3600}[unit]


def main(argv):
    began, again = time.time(), shlex.join(["python", sys.argv[0], *argv])
    comparison = make_comparison(argv)
    options = comparison.options
    if options["plan"] or options["show"]:
        quiet_pipe()
    if options["plan"]:
        return print_plan(comparison)
    if not options["show"]:
        do(comparison, began, again)
    report = Report(comparison)
    print("\n" + report.markdown(options["details"]))
    if not options["show"]:
        report.write(again, time.time() - began)
        write_figure(report, options["out"] / "figure.png")
    print("\n".join(report.lines()))
    return exit_code_of(report, options["exit_code"])


def print_plan(comparison):
    """Print the commands of the runs that can be done now, each a line for a shell."""
    options = comparison.options
    number = runs_at_a_time(options["workers"], comparison.device)
    alone = "env OMP_NUM_THREADS=1 " if share_a_cpu(number, comparison.device) else ""
    for run in comparison.missing():
        print(" && ".join(alone + shlex.join(command) for command in run.commands(options["device"])))


def exit_code_of(report, asked):
    verdicts = [facts["verdict"] for facts in report.facts]
    codes = {PAYS: 0, CRASHED: 1, REFUSED: 4, UNDECIDED: 11} if asked else {CRASHED: 1}
    found = [code for verdict, code in codes.items() if verdict in verdicts]
    return found[0] if found else 10 * asked


def do(comparison, began, again):
    """Do all missing runs of a comparison. On a signal, those in progress save and end."""
    number = runs_at_a_time(comparison.options["workers"], comparison.device)
    workers = Workers(number, comparison.device)
    try:
        if comparison.missing():
            announce(comparison, number)
        do_runs(comparison, workers, began + comparison.options["budget"])
    except Stopped as stopped:
        print(f"\nstopped after {timedelta(seconds=round(time.time() - began))}; to resume: {again}", flush=True)
        raise SystemExit(128 + stopped.args[0]) from None
    finally:
        workers.stop()
    for run in comparison.planned():  # also those that a scheduler has done
        if comparison.result(run):
            tidy(run.folder)


def do_runs(comparison, workers, deadline):
    shown = Report(comparison).table()
    while todo := comparison.missing():
        for run in todo:
            if time.time() + comparison.run_seconds(run) < deadline:
                workers.offer(run)
        if not workers.running:
            print("the budget is spent: no further run would end within it")
            return
        try:
            say(comparison, workers.wait())
        except Crashed as crash:
            drop(comparison, crash)
        table = Report(comparison).table()
        if table != shown:  # a look is complete
            print(f"\nso far:\n\n{table}\n", flush=True)
        shown = table


def say(comparison, ended):
    """Say what runs have brought."""
    for run, seconds in ended.items():
        result = comparison.result(run)
        tidy(run.folder)
        comparison.ended.append((run.flops, seconds))
        said = "diverged" if result["loss"] is None else f"loss {result['loss']:.4f}"
        print(f"{run.label()}: {result['refused'] or said}", flush=True)


def drop(comparison, crash):
    """Leave out a variant whose code has crashed, and show its traceback. The others go on."""
    run, said = crash.args
    print(f"{run.label()}:\n{said}", file=sys.stderr)
    comparison.leave_out(run.variant, CRASHED, said.splitlines()[-1])


def announce(comparison, number):
    """Say before the first run what the comparison may cost, and what it can find."""
    (fewest, shortest), (most, longest) = comparison.forecast()
    least, top = timedelta(seconds=round(shortest / number)), timedelta(seconds=round(longest / number))
    print(f"{fewest} to {most} runs, {number} at a time on {comparison.device}: {least} to {top}")
    noise = comparison.known_noise()
    found = [f"{seeds} seeds {detectable(noise, seeds, comparison.level):.3f}" for seeds in comparison.looks]
    chance = f"if losses vary by {noise:.3f} nats with the seed, these gains are found with 80% probability"
    print(f"{chance}: {', '.join(found)}", flush=True)


if __name__ == "__main__":
    install_excepthook()
    sys.exit(main(sys.argv[1:]))
