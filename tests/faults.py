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

from config.runtime.checkpoint import build_model, load_checkpoint
from conftest import TINY, copy_repository, differences  # first: it lets the programs be imported

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
seen = set()  # paths of all checkpoints so far, and the inodes and times of the files that were there


def expect(good, reason):
    if not good:
        raise AssertionError(reason)


# -- training ------------------------------------------------------------------------------------------------


def start(repository, settings, folder):
    """Start a training process, which resumes what the folder holds."""
    command = [sys.executable, "train.py", *RUN.split(), *settings.split(), f"--out_dir={folder}"]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8")
    counts["processes started"] += 1
    process = subprocess.Popen(command, cwd=repository, env=ENVIRONMENT, **pipes)
    process.began = time.time()
    return process


def finish(process, code=0):
    """Wait for the end of a process, which must have that exit code. Return what it printed."""
    shown = process.communicate()[0]
    expect(process.returncode == code, f"exit code {process.returncode}, not {code}, after:\n{shown[-1000:]}")
    return shown


def step_of(folder):
    """Return the step to resume from: of the latest checkpoint or, if it was killed before its first, of the best."""
    for path in (folder / "ckpt.pt", folder / "best.pt"):
        if path.exists():
            return load_checkpoint(path)["iter_num"]
    return 0


# -- what must be true ---------------------------------------------------------------------------------------


def look(folder):
    """Link every checkpoint, however short-lived, for check_seen. Once one exists, it must never be missing."""
    for path in (folder / "ckpt.pt", folder / "best.pt"):
        try:
            found = os.stat(path)
        except FileNotFoundError:
            expect(path not in seen, f"{path} is gone")
            continue
        mark = f"{found.st_ino}-{found.st_mtime_ns}"
        if mark not in seen:
            seen.update((path, mark))
            os.link(path, folder.parent / "seen" / f"{mark}-{path.name}")


def check_seen(folder):
    """Check that every checkpoint seen is whole; load_checkpoint and build_model raise ValueError if not."""
    for path in (folder.parent / "seen").iterdir():
        build_model(load_checkpoint(path))
        counts["checkpoints seen, and loaded"] += 1
        path.unlink()


def check_killed(folder, lowest):
    """Check what a kill must leave, with no validation loss worse than `lowest`. Return the lowest now."""
    check_seen(folder)
    lines = log_lines(folder)
    steps = [line["step"] for line in lines if line["event"] == "step"]
    expect(steps == list(range(1, len(steps) + 1)), f"{folder}: the log has a gap or a repeat: {steps}")
    if steps:
        interval, saved = lines[0]["settings"]["checkpoint_interval"], step_of(folder)
        lost = f"saved at step {saved}, killed after step {len(steps)}, with checkpoints every {interval}"
        expect(saved <= len(steps) <= saved + interval, f"{folder}: {lost}")
    best = folder / "best.pt"
    loss = load_checkpoint(best)["val_loss"] if best.exists() else math.inf
    expect(loss <= lowest, f"{folder}: best.pt was of validation loss {lowest}, and is of {loss}")
    return loss


def compare(folder, whole, what, shown=""):
    """Check that the run in `folder` equals the undisturbed one, except for a best.pt `shown` as not saved."""
    expect(not list(folder.glob("*.tmp")), f"{folder}: files are left over")
    expect(losses(folder) == losses(whole), f"{folder}/log.jsonl: not the losses of {whole}")
    expect_same(folder / "ckpt.pt", whole / "ckpt.pt")
    unsaved = {int(step) for step in re.findall(r"NOT SAVED: .*best\.pt at step (\d+)", shown)}
    evals = [line for line in losses(folder) if line["event"] == "eval" and line["step"] not in unsaved]
    lowest, best = min(line["val_loss"] for line in evals), load_checkpoint(folder / "best.pt")["val_loss"]
    expect(best == lowest, f"{folder}/best.pt: of validation loss {best}, not the lowest, {lowest}")
    if not unsaved:
        expect_same(folder / "best.pt", whole / "best.pt")
    counts["lives compared"] += 1
    print(f"{whole.parent.name}: {what}: equal to the undisturbed run", flush=True)


def log_bytes(folder):
    log = folder / "log.jsonl"
    return log.read_bytes() if log.exists() else b""


def log_lines(folder):
    """Return the lines of the log, except a last one that is torn."""
    *lines, _ = log_bytes(folder).split(b"\n")
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise AssertionError(f"{folder}/log.jsonl: {error}") from None


def losses(folder):
    """Return the log, without what depends on the clock and on where a run was interrupted."""
    lines = [line for line in log_lines(folder) if line["event"] in ("step", "eval")]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def expect_same(path, whole):
    found = differences(path, whole)
    expect(not found, f"{path} is not {whole}: {found}")


# -- kills ---------------------------------------------------------------------------------------------------


def unfinished(process, folder):
    """Return the files that the process is in the middle of writing, or was when it was killed."""
    return [path for path in folder.glob("*.tmp") if path.stat().st_mtime > process.began]


def wait(process, folder, seconds, happened=lambda: False):
    """Look at the folder again and again until something has happened, the time is over or the process has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not happened() and process.poll() is None:
        look(folder)
        time.sleep(0.001)  # a checkpoint has its name for longer than that


def kill(process, folder, log_before, moment):
    """Kill the process at `moment`, unless it ends first. The first thing that it writes is the log."""
    seconds = random.uniform(0, 4) if moment == "start-up" else 60
    wait(process, folder, seconds, lambda: log_bytes(folder) != log_before)
    if moment != "start-up":
        wait(process, folder, random.uniform(0, 1))
    if moment == "save":
        wait(process, folder, 60, lambda: unfinished(process, folder))
        wait(process, folder, random.uniform(0, 0.005))
    process.kill()
    process.wait()
    look(folder)


def count_kill(process, folder, log_before):
    """Count by what the process has left, since it need not have been killed at the moment that was meant."""
    log = log_bytes(folder)
    counts["processes killed"] += 1
    if unfinished(process, folder):
        counts["... inside a save"] += 1
    elif log_before.startswith(log) or log.splitlines()[-1].startswith((b'{"event": "start"', b'{"event": "resume"')):
        counts["... during start-up"] += 1
    else:
        counts["... otherwise"] += 1


def live(repository, settings, folder, kills):
    """Train a run to its last step, killing it at most `kills` times. Return the number of kills."""
    killed, lowest = 0, math.inf
    while killed < kills and step_of(folder) < STEPS:
        log_before = log_bytes(folder)
        with start(repository, settings, folder) as process:
            kill(process, folder, log_before, random.choice(("start-up", "step", "save")))
            if process.returncode == -signal.SIGKILL:
                killed += 1
                count_kill(process, folder, log_before)
                lowest = check_killed(folder, lowest)
            else:
                finish(process)
    if step_of(folder) < STEPS:
        finish(start(repository, settings, folder))
    return killed


# -- writes that fail ----------------------------------------------------------------------------------------


def limit(pid, room):
    """Let no file of that process grow beyond `room` bytes."""
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))


def read_until(process, folder, good):
    """Return the lines that the process prints, up to the first that is good."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        look(folder)
        if good(line):
            return lines
    raise AssertionError(f"{folder}: the run ended too early, after:\n{''.join(lines)[-1000:]}")


def starve(repository, settings, whole):
    """Leave a run too little room for its checkpoints, and often for its log, during most of its steps."""
    folder = whole.with_name("starved")
    with start(repository, settings, folder) as process:
        lines, step = read_until(process, folder, lambda line: (folder / "ckpt.pt").exists()), 0
        while step <= 0.75 * STEPS:
            log_has_room = (folder / "log.jsonl").stat().st_size + random.randrange(300)
            limit(process.pid, random.choice((random.randrange((folder / "ckpt.pt").stat().st_size), log_has_room)))
            load_checkpoint(folder / "ckpt.pt")  # a ValueError if it is not whole
            lines += read_until(process, folder, lambda line: f"NOT SAVED: {folder / 'ckpt.pt'}" in line)
            step = int(re.search(r"at step (\d+)", lines[-1])[1])
        limit(process.pid, resource.RLIM_INFINITY)
        shown = "".join(lines) + finish(process)
    look(folder)
    check_seen(folder)
    counts["checkpoint writes made to fail"] += shown.count("NOT SAVED: ")
    counts["log writes made to fail"] += shown.count("NOT WRITTEN: ")
    compare(folder, whole, "files limited in size", shown)


# -- all of it -----------------------------------------------------------------------------------------------


def train_undisturbed(repository, settings, folder):
    """Train what all other runs in the folder are compared with."""
    (folder / "seen").mkdir(parents=True)
    finish(start(repository, settings, folder / "whole"))
    return folder / "whole"


def try_kills(repository, settings, whole, kills):
    """Train one run after another until `kills` kills have been made."""
    number = 0
    while kills:
        number += 1
        folder = whole.with_name(f"life {number}")
        killed = live(repository, settings, folder, kills)
        compare(folder, whole, f"life {number}, killed {killed} times")
        kills -= killed


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
            whole = train_undisturbed(repository, settings, work / method)
            try_kills(repository, settings, whole, math.ceil(options.kills / len(METHODS)))
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
