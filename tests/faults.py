"""
Kill training runs or make their writes fail, and compare them with undisturbed runs: python tests/faults.py

This tests a promise: a run that is killed at any moment, or whose disk is full, and that is then resumed, equals the
undisturbed run bit for bit. Every process is a real one, and is killed by SIGKILL. (This cannot show what a power cut
does to data that have not reached the disk.) At the first broken promise it exits with code 1 and keeps all files.
Linux only; takes about six minutes; test_faults.py is a short version.
"""

import argparse
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config.runtime.run import build_model, load_checkpoint
from conftest import TINY, copy_repository, differences

STEPS = 150
RUN = f"{TINY} --max_iters={STEPS} --eval_interval=7 --init_from=auto"
METHODS = {
    "standard": "--checkpoint_interval=5 --learning_rate=0.3 --warmup_iters=150",  # soon worse than its best.pt
    "w2, m1": "--attention=w2 --residual=m1 --dropout=0.2 --grad_accum_steps=2 --checkpoint_interval=3",
    "5.5, m4.2, muon": "--attention=summed_qk --qk_scale=5.5 --residual=m4.2 --dropout=0.1 --optimizer=muon"
    " --checkpoint_interval=10",
    "m2, float16": "--residual=m2 --dtype=float16 --checkpoint_interval=4",
}
# one thread, so that a busy machine computes the same; and no .pyc files, which Python may leave half-written
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

counts = Counter()


def expect(good, reason):
    if not good:
        raise AssertionError(reason)


# -- training ------------------------------------------------------------------------------------------------


def start(repository, settings, folder):
    """Start a training process, which resumes what the folder holds."""
    command = [sys.executable, "train.py", *RUN.split(), *settings.split(), f"--out_dir={folder}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    counts["processes started"] += 1
    return subprocess.Popen(command, cwd=repository, env=ENVIRONMENT, **pipes)


def finish(process):
    """Wait for the end of a process, which must be a good one. Return what it printed."""
    shown = process.communicate()[0]
    expect(process.returncode == 0, f"exit code {process.returncode} after:\n{shown[-1000:]}")
    return shown


def step_of(folder):
    """Return the step to resume from: of the latest checkpoint or, if it was killed before its first, of the best."""
    for path in (folder / "ckpt.pt", folder / "best.pt"):
        if path.exists():
            return load_checkpoint(path)["iter_num"]
    return 0


# -- what must be true ---------------------------------------------------------------------------------------


def check_killed(folder, lowest):
    """Check what a kill must leave, with no validation loss worse than `lowest`. Return the lowest now."""
    for path in folder.glob("*.pt"):
        build_model(load_checkpoint(path))  # a ValueError if it is not whole
        counts["checkpoints loaded after a kill"] += 1
    lines = log_lines(folder)
    steps = [line["step"] for line in lines if line["event"] == "step"]
    expect(steps == list(range(1, len(steps) + 1)), f"{folder}: the log has a gap or a repeat: {steps}")
    if steps:
        interval = lines[0]["settings"]["checkpoint_interval"]
        saved = step_of(folder)
        lost = f"saved at step {saved}, killed after step {len(steps)}, with checkpoints every {interval}"
        expect(saved <= len(steps) <= saved + interval, f"{folder}: {lost}")
    loss = math.inf
    if (folder / "best.pt").exists():
        loss = load_checkpoint(folder / "best.pt")["val_loss"]
    expect(loss <= lowest, f"{folder}: best.pt was of validation loss {lowest}, and is of {loss}")
    return loss


def compare(folder, whole, what, unsaved=()):
    """Check that the run in `folder` equals the undisturbed one, except for a best.pt that was `unsaved` at steps."""
    expect(not list(folder.glob("*.tmp")), f"{folder}: files are left over")
    found = losses(folder)
    expect(found == losses(whole), f"{folder}/log.jsonl: not the losses of {whole}")
    evals = [line for line in found if line["event"] == "eval" and line["step"] not in unsaved]
    lowest = min(line["val_loss"] for line in evals)
    best = load_checkpoint(folder / "best.pt")["val_loss"]
    expect(best == lowest, f"{folder}/best.pt: of validation loss {best}, not the lowest, {lowest}")
    expect_same("ckpt.pt", folder, whole)
    if not unsaved:
        expect_same("best.pt", folder, whole)
    counts["lives compared"] += 1
    print(f"{whole.parent.name}: {what}: equal to the undisturbed run", flush=True)


def expect_same(name, folder, whole):
    found = differences(folder / name, whole / name)
    expect(not found, f"{folder / name} is not {whole / name}: {found}")


def log_lines(folder):
    """Return the lines of the log, except a last one that is torn."""
    log = folder / "log.jsonl"
    *lines, _ = log.read_bytes().split(b"\n") if log.exists() else [b""]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise AssertionError(f"{log}: {error}") from None


def losses(folder):
    """Return the log, without what depends on the clock and on where a run was interrupted."""
    lines = [line for line in log_lines(folder) if line["event"] in ("step", "eval")]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


# -- kills ---------------------------------------------------------------------------------------------------


def wait(process, seconds, happened=lambda: False):
    """Wait until something has happened, the time is over or the process has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not happened() and process.poll() is None:
        time.sleep(0.001)


def kill(process, folder, moment):
    """Kill the process at `moment`, unless it ends first. The first thing that it writes is the log."""
    began, lines = time.time(), len(log_lines(folder))
    if moment == "starting":
        wait(process, random.uniform(0, 4))
    else:
        wait(process, 60, lambda: len(log_lines(folder)) > lines)
        wait(process, random.uniform(0, 1))
    if moment == "saving":
        wait(process, 60, lambda: any(path.stat().st_mtime > began for path in folder.glob("*.tmp")))
        wait(process, random.uniform(0, 0.005))
    process.kill()
    process.wait()


def live(repository, settings, folder, kills):
    """Train a run to its last step, killing it at most `kills` times. Return the number of kills."""
    killed, lowest = 0, math.inf
    while killed < kills and step_of(folder) < STEPS:
        moment = random.choice(("starting", "training", "saving"))
        with start(repository, settings, folder) as process:
            kill(process, folder, moment)
            if process.returncode == -signal.SIGKILL:
                killed += 1
                counts[f"processes killed while {moment}"] += 1
                lowest = check_killed(folder, lowest)
            else:
                finish(process)
    if step_of(folder) < STEPS:
        finish(start(repository, settings, folder))
    return killed


# -- writes that fail ----------------------------------------------------------------------------------------


def starve(repository, settings, whole):
    """Leave a run too little room for its checkpoints, and often for its log, during most of its steps."""
    folder, shown = whole.with_name("starved"), ""
    with start(repository, settings, folder) as process:
        for line in process.stdout:
            shown += line
            step = re.match(r"step (\d+)/", line)
            if step and int(step[1]) > 0.75 * STEPS:
                break
            if step and (folder / "ckpt.pt").exists():
                saved, logged = ((folder / name).stat().st_size for name in ("ckpt.pt", "log.jsonl"))
                too_little = random.randrange(saved)
                for_the_log = logged + random.randrange(300)
                limit(process, random.choice((too_little, for_the_log)))
                load_checkpoint(folder / "ckpt.pt")  # a ValueError if it is not whole
        limit(process, resource.RLIM_INFINITY)
        shown += finish(process)
    counts["checkpoint writes made to fail"] += shown.count("NOT SAVED: ")
    counts["log writes made to fail"] += shown.count("NOT WRITTEN: ")
    unsaved = {int(step) for step in re.findall(r"NOT SAVED: .*best\.pt at step (\d+)", shown)}
    compare(folder, whole, "files limited in size", unsaved)


def limit(process, room):
    """Let no file of the process grow beyond `room` bytes."""
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


# -- all of it -----------------------------------------------------------------------------------------------


def try_kills(repository, settings, folder, kills):
    """Train one run after another until `kills` kills have been made. Return the undisturbed one's folder."""
    whole = folder / "whole"
    finish(start(repository, settings, whole))
    number = 0
    while kills:
        number += 1
        life = folder / f"life {number}"
        killed = live(repository, settings, life, kills)
        compare(life, whole, f"{life.name}, killed {killed} times")
        kills -= killed
    return whole


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--kills", type=int, default=100, help="number of kills (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="random seed of the moments and the sizes (default: 1)")
    options = parser.parse_args()
    random.seed(options.seed)
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.time()
    try:
        repository = copy_repository(work / "repository")
        for method, settings in METHODS.items():
            whole = try_kills(repository, settings, work / method, math.ceil(options.kills / len(METHODS)))
            starve(repository, settings, whole)
    except (AssertionError, ValueError) as error:
        print(f"BROKEN: {error}\neverything is kept in {work}")
        return 1
    shutil.rmtree(work)
    print("-" * 40)
    for name, count in counts.items():
        print(f"{name:32} {count:7,}")
    print(f"all promises kept, in {time.time() - began:.0f} seconds")
    return 0


if __name__ == "__main__":
    sys.exit(main())
