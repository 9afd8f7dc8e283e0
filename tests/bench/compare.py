"""
Does it pay? Compare variants with a baseline on any text, each at its best learning rate, at equal cost:

    python tests/bench/compare.py --against=HEAD config/m1_shakespeare.py                    # my edit of model.py
    python tests/bench/compare.py config/standard_shakespeare.py config/m1_shakespeare.py "mine: my.diff --residual=m1"

Every argument is a variant, written as for train.py, quoted if it has several words. The first one is the
baseline. "NAME: ..." gives it a name; @COMMIT, a folder or diffs select its code instead of the working tree.
Settings outside quotes apply to all; a variant's own take precedence. Rerun to continue.
"""

import json
import math
import os
import re
import shlex
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from config import read_settings, split_settings
from config.runtime.devices import pick_device
from config.runtime.errors import UserError, file_errors
from config.runtime.files import atomic_write, sha256
from config.runtime.processes import install_excepthook, quiet_pipe
from data.dataset import load_dataset
from data.prepare import ensure_prepared
from figure import write_figure
from plan import REFUSED, Comparison
from report import LEDGER, Report, earlier_looks
from runs import CRASHED, Crashed, Stopped, Workers, examine, runs_at_a_time, tidy, variables_of_runs
from stats import PAYS, UNDECIDED
from variants import link_data, read_variants

# -----------------------------------------------------------------------------
against = ""  # a commit, such as HEAD: the baseline is the first variant as that commit has it
out = "out/compare"  # folder of table.md, verdict.json, runs.csv, figure.png and the runs
rates = ""  # learning rates to start from, as 1e-3,2e-3; empty: 0.5, 1 and 2 times the variant's; none: no search
seeds = "3,5,8"  # seeds at each look; one number: a single look
first_seed = 1  # first seed; 101, for example, confirms a verdict on new seeds
budget = ""  # such as 20m or 2h: start only runs that will end in time; 0s: only report
workers = 0  # runs at a time; 0: one per CPU thread or GPU
device = "auto"  # auto, cpu, cuda, mps
plan = False  # print the commands that can run now, one per line; run nothing
exit_code = False  # report the verdict as exit code: 0 pays, 10 does not, 11 undecided, 4 refused
# -----------------------------------------------------------------------------


def read_arguments(argv):
    """Return compare.py's own settings, the variants' arguments, and the train.py options for all of them."""
    own = read_settings(__file__, [])
    mine = [word for word in argv if word in ("-h", "--help") or word.partition("=")[0].removeprefix("--") in own]
    rest = [word for word in argv if word not in mine]
    words, common = ([word for word in rest if word.startswith("--") == dashed] for dashed in (False, True))
    return own | split_settings(__file__, mine)[1], words, common


@file_errors()
def make_comparison(options, words, common, device):
    """Return the Comparison of the variants, once their code is frozen and examined."""
    out = Path(options["out"]).expanduser().resolve()
    out.mkdir(parents=True, exist_ok=True)
    variants = read_variants(words, common, options["against"], out / "code")
    settings = variants[0].settings
    with redirect_stdout(sys.stderr):  # what this prints is no part of a plan
        data = load_dataset(ensure_prepared(settings["dataset"]))
    tokens = data.meta["sha256"]
    folder = out / sha256(json.dumps(tokens, sort_keys=True).encode())[:8]
    for home in {variant.home for variant in variants}:
        link_data(home, data.folder)
    windows = save_windows(data, settings, folder)
    with ThreadPoolExecutor(max(1, os.cpu_count() // 2)) as pool:
        variants = list(pool.map(lambda one: examine(one, folder, windows, device), variants))
    earlier = earlier_looks(out.parent / LEDGER, variants[0], tokens, options["first_seed"])
    return Comparison(variants, options, folder, windows, tokens, earlier)


def save_windows(data, settings, folder):
    """Write the windows on which the referee measures every loss, and return the path of their file."""
    path = folder / f"windows-{settings['block_size']}-{settings['eval_tokens']}.pt"
    if not path.exists():
        pairs = data.windows("val", 1, settings["block_size"], settings["eval_tokens"])
        x, y = (torch.cat(part).int() for part in zip(*pairs))
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as file:
            torch.save({"x": x, "y": y}, file)
    return path


def main(argv):
    quiet_pipe()
    began, again = time.time(), shlex.join(["python", sys.argv[0], *argv])
    options, words, common = read_arguments(argv)
    if options["first_seed"] < 1:
        raise UserError(f"first_seed = {options['first_seed']} is invalid: the seed before tunes the rates")
    if ":" in options["device"]:
        raise UserError(
            f"device = {options['device']!r} is invalid: CUDA_VISIBLE_DEVICES restricts the runs to one GPU"
        )
    deadline, device = began + seconds_of(options["budget"]), pick_device(options["device"])
    out, number = Path(options["out"]).expanduser(), runs_at_a_time(options["workers"], device)
    comparison = make_comparison(options, words, common, device)
    if options["plan"]:
        return print_plan(comparison, variables_of_runs(number, device), options["device"])
    workers = Workers(number, device)
    try:
        do_runs(comparison, workers, deadline)
    except Stopped as stopped:
        print(f"\nstopped after {timedelta(seconds=round(time.time() - began))}; to resume: {again}", flush=True)
        raise SystemExit(128 + stopped.args[0]) from None
    finally:
        workers.stop()
    for run in comparison.results:  # also those that a scheduler has done
        tidy(run.folder)
    report = Report(comparison)
    print("\n" + report.markdown())
    report.write(out, again, device, time.time() - began)
    write_figure(report, out / "figure.png")
    print("\n".join(report.lines()))
    return exit_code_of(report, options["exit_code"])


def seconds_of(budget):
    """Return a budget such as 20m in seconds."""
    if budget and not re.fullmatch(r"\d+[smh]", budget):
        raise UserError(f"budget = {budget!r} is invalid: write it as 90s, 20m or 2h")
    return int(budget[:-1]) * {"s": 1, "m": 60, "h": 3600}[budget[-1]] if budget else math.inf


def print_plan(comparison, variables, device):
    """Print the commands of the runs that can be done now, each a line for a shell."""
    alone = ["env", *(f"{name}={value}" for name, value in variables.items())] if variables else []
    for run in comparison.missing():
        print(" && ".join(shlex.join([*alone, *command]) for command in run.commands(device)))


def do_runs(comparison, workers, deadline):
    """Do all missing runs of a comparison that would end before the deadline."""
    while todo := comparison.missing():
        for run in todo:
            if time.time() + comparison.run_seconds(run.flops) < deadline:
                workers.offer(run)
        if not workers.running:
            print("the budget is spent: no further run would end in time")
            return
        try:
            for run, its_seconds in workers.wait().items():
                comparison.ended.append((run.flops, its_seconds))
                result = comparison.result(run)
                said = "diverged" if result["loss"] is None else f"loss {result['loss']:.4f}"
                print(f"{run.label()}: {result['refused'] or said}", flush=True)
                tidy(run.folder)
        except Crashed as crash:  # the other variants go on
            run, said = crash.args
            print(f"{run.label()}:\n{said}", file=sys.stderr)
            comparison.leave_out(run.variant, CRASHED, said.splitlines()[-1])


def exit_code_of(report, asked):
    verdicts = [facts["verdict"] for facts in report.facts]
    codes = {PAYS: 0, CRASHED: 1, REFUSED: 4, UNDECIDED: 11} if asked else {CRASHED: 1}
    found = [code for verdict, code in codes.items() if verdict in verdicts]
    return found[0] if found else 10 * asked


if __name__ == "__main__":
    install_excepthook()
    sys.exit(main(sys.argv[1:]))
