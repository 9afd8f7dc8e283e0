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
import re
import shlex
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
import torch

from config import read_settings
from config.runtime.checks import check_range
from config.runtime.devices import machine_name, pick_device
from config.runtime.errors import UserError, file_errors
from config.runtime.files import atomic_write, sha256
from config.runtime.processes import install_excepthook, quiet_pipe
from data.dataset import load_dataset
from data.prepare import ensure_prepared
from plan import REFUSED, Comparison
from report import LEDGER, Report, earlier_looks
from runs import CRASHED, Crashed, Stopped, Workers, examine, places
from stats import PAYS, UNDECIDED
from variants import link_data, read_variants

# -----------------------------------------------------------------------------
against = ""  # a commit, such as HEAD: the baseline is the first variant as that commit has it
out = "out/compare"  # folder of table.md, verdict.json, runs.csv, figure.png and the runs
rates = ""  # learning rates to start from, as 1e-3,2e-3; empty: 0.5, 1 and 2 times the variant's; none: no search
seeds = "3,5,8"  # seeds at each look; one number: a single look
first_seed = 1  # first seed; 101, for example, confirms a verdict on new seeds
budget = ""  # such as 20m or 2h: start only runs that will end in time; 0s: only report
workers = 0  # runs at a time; 0: one per CPU core or GPU
device = "auto"  # auto, cpu, cuda, mps
plan = False  # print the commands that can run now, one per line; run nothing
exit_code = False  # report the verdict as exit code: 0 pays, 10 does not, 11 undecided, 4 refused, 1 crashed
# -----------------------------------------------------------------------------


def read_arguments(argv):
    """Return compare.py's own settings, the variants' arguments, and the train.py options for all of them."""
    own = read_settings(__file__, [])
    mine = [word for word in argv if word in ("-h", "--help") or word.partition("=")[0].removeprefix("--") in own]
    rest = [word for word in argv if word not in mine]
    words, common = ([word for word in rest if word.startswith("--") == dashed] for dashed in (False, True))
    return read_settings(__file__, mine), words, common


@file_errors()
def make_comparison(options, words, common, device):
    """Return the Comparison of the variants, once their code is frozen and examined."""
    out = Path(options["out"]).expanduser().resolve()
    variants = read_variants(words, common, options["against"], out / "code")
    settings = variants[0].settings
    with redirect_stdout(sys.stderr):  # what this prints is no part of a plan
        data = load_dataset(ensure_prepared(settings["dataset"]))
    tokens = data.meta["sha256"]
    folder = out / sha256(json.dumps(tokens, sort_keys=True).encode())[:8]
    for home in {variant.home for variant in variants}:
        link_data(home, data.folder)
    windows = folder / f"windows-{settings['block_size']}-{settings['eval_tokens']}.pt"
    save_windows(windows, data.windows("val", 1, settings["block_size"], settings["eval_tokens"]))
    variants = [examine(variant, folder, windows, device) for variant in variants]
    earlier = earlier_looks(out.parent / LEDGER, variants[0], tokens, options["first_seed"])
    return Comparison(variants, options, folder, windows, tokens, earlier)


def save_windows(path, batches):
    """Write the windows on which the referee measures every loss."""
    x, y = (torch.cat(part).int() for part in zip(*batches))
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as file:
        torch.save({"x": x, "y": y}, file)


def main(argv):
    quiet_pipe()
    options, words, common = read_arguments(argv)
    check_range(options, "first_seed", 1)
    deadline, device = time.time() + seconds_of(options["budget"]), pick_device(options["device"])
    place = options["device"] if ":" in options["device"] else device.type
    comparison = make_comparison(options, words, common, place)
    if options["plan"]:
        for run in comparison.missing():
            print(" && ".join(map(shlex.join, run.commands(options["device"]))))
        return 0
    workers = Workers(places(options["workers"], place))
    try:
        do_runs(comparison, workers, deadline)
    except Stopped as stopped:
        print("\nstopped: rerun the command to resume", flush=True)
        raise SystemExit(128 + stopped.args[0]) from None
    finally:
        workers.stop()
    report = Report(comparison)
    print("\n" + report.markdown())
    report.write(Path(options["out"]).expanduser(), shlex.join(["python", sys.argv[0], *argv]), machine_name(device))
    print("\n".join(report.lines()))
    verdicts = [facts["verdict"] for facts in report.facts]
    codes = {PAYS: 0, CRASHED: 1, REFUSED: 4, UNDECIDED: 11} if options["exit_code"] else {CRASHED: 1}
    return next((code for verdict, code in codes.items() if verdict in verdicts), 10 * options["exit_code"])


def seconds_of(budget):
    """Return a budget such as 20m in seconds."""
    if budget and not re.fullmatch(r"\d+[smh]", budget):
        raise UserError(f"budget = {budget!r} is invalid: write it as 90s, 20m or 2h")
    return int(budget[:-1]) * {"s": 1, "m": 60, "h": 3600}[budget[-1]] if budget else math.inf


def do_runs(comparison, workers, deadline):
    """Do all missing runs of a comparison that would end before the deadline."""
    pace = 0.0  # seconds per operation of the last run: before one has ended, all may start
    while todo := comparison.missing():
        for run in todo:
            if time.time() + pace * run.flops < deadline:
                workers.offer(run)
        if not workers.running:
            print("the budget is spent: no further run would end in time")
            return
        try:
            for run, seconds in workers.wait().items():
                pace, result = seconds / run.flops, comparison.result(run)
                said = result["refused"] or f"loss {result['loss']:.4f}"
                print(f"{run.label()}: {said}", flush=True)
        except Crashed as crash:  # the other variants go on
            run, said = crash.args
            print(f"{run.label()}:\n{said}", file=sys.stderr)
            comparison.leave_out(run.variant, CRASHED, said.splitlines()[-1])


if __name__ == "__main__":
    install_excepthook()
    sys.exit(main(sys.argv[1:]))
