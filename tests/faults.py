"""
Kills training runs, and makes their writes fail, and compares them with undisturbed ones: python tests/faults.py

The evidence for a promise: a run that is killed at any moment, or short of room on its disk, and resumed, is bit for
bit the run that an undisturbed machine would have given. Every process is a real one, and killed by SIGKILL. (What a
power cut does to data that have not reached the disk cannot be seen this way.) At the first broken promise it ends
with exit code 1 and leaves all files as they are. Linux only; ten minutes or so; test_faults.py does it in small.
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
from contextlib import suppress
from functools import partial
from pathlib import Path

from conftest import TEXT, TINY, copy_repository, differences  # first: it makes the repository importable

from config.runtime.checkpoint import build_model, load_checkpoint
from config.runtime.common import sha256
from data.dataset import SPLITS, load_dataset

STEPS = 150
RUN = f"{TINY} --max_iters={STEPS} --eval_interval=7 --init_from=auto"
METHODS = {
    "standard": "--checkpoint_interval=5 --learning_rate=0.3 --warmup_iters=150",  # soon worse than its best.pt
    "w2, m1": "--attention=w2 --residual=m1 --dropout=0.2 --grad_accum_steps=2 --checkpoint_interval=3",
    "5.5, m4.2, muon": "--attention=summed_qk --qk_scale=5.5 --residual=m4.2 --dropout=0.1 --optimizer=muon"
    " --checkpoint_interval=10",
    "m2, float16": "--residual=m2 --dtype=float16 --checkpoint_interval=4",
}
ENOUGH = 2**40  # bytes
# one thread, so that a busy machine computes the same; and no .pyc files, which Python may leave half-written
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}

COUNTED = ["processes started", "processes killed", "... inside a save", "... during start-up", "... otherwise"]
COUNTED += ["checkpoints seen, and loaded", "checkpoint writes made to fail", "log writes made to fail"]
COUNTED += ["runs of prepare.py made to fail", "lives compared"]
counts = dict.fromkeys(COUNTED, 0)
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
    """Keep every checkpoint, however briefly it has its name, for check_seen. Once there is one, there always is."""
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
    """Check that the run in `folder` has come to the undisturbed end, except for a best.pt `shown` as not saved."""
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
    """Kill the process at such a moment, unless it ends before. The first thing that it writes is the log."""
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
    """Lead a run from its first step to its last, killed so many times at most. Return how many times it was."""
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


def fill(filler, room):
    """Leave `room` bytes on the disk that `filler` is on."""
    with open(filler, "ab", buffering=0) as file:
        with suppress(OSError):
            while True:
                file.write(bytes(4096))
        file.truncate(max(file.tell() - room, 0))


def read_until(process, folder, good):
    """Return the lines that the process prints, up to the first that is good."""
    lines = []
    for line in process.stdout:
        lines.append(line)
        look(folder)
        if good(line):
            return lines
    raise AssertionError(f"{folder}: the run ended too early, after:\n{''.join(lines)[-1000:]}")


def rooms(folder):
    """Yield sizes too small for a checkpoint, without end; every other runs out within the next lines of the log."""
    size = (folder / "ckpt.pt").stat().st_size
    yield from (0, 1, size // 2, size - 1)
    while True:
        yield random.randrange(size)
        yield (folder / "log.jsonl").stat().st_size + random.randrange(300)


def starve(process, folder, give):
    """Leave a run too little room, another size at each save, for most of its steps. Return what it printed."""
    lines = read_until(process, folder, lambda line: (folder / "ckpt.pt").exists())
    for room in rooms(folder):
        give(room)
        load_checkpoint(folder / "ckpt.pt")  # a ValueError if it is not whole
        lines += read_until(process, folder, lambda line: f"NOT SAVED: {folder / 'ckpt.pt'}" in line)
        if int(re.search(r"at step (\d+)", lines[-1])[1]) > 0.75 * STEPS:
            break
    give(ENOUGH)
    shown = "".join(lines) + finish(process)
    look(folder)
    check_seen(folder)
    count_failures(shown)
    return shown


def count_failures(shown):
    counts["checkpoint writes made to fail"] += shown.count("NOT SAVED: ")
    counts["log writes made to fail"] += shown.count("NOT WRITTEN: ")


def starve_by_limit(repository, settings, whole):
    folder = whole.with_name("limit")
    with start(repository, settings, folder) as process:
        shown = starve(process, folder, partial(limit, process.pid))
    compare(folder, whole, "files limited in size", shown)


def starve_by_disk(repository, settings, whole):
    """Do the same on a disk that is really full, if one can be mounted for it."""
    disk = whole.with_name("disk")
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        print(f"SKIPPED: no small disk can be mounted here, which takes root: {mounted.stderr.strip()}", flush=True)
        return
    try:
        (disk / "seen").mkdir()
        with start(repository, settings, disk / "run") as process:
            shown = starve(process, disk / "run", partial(fill, disk / "filler"))
        compare(disk / "run", whole, "disk full", shown)
    finally:
        shutil.copytree(disk, whole.with_name("copy of disk"), ignore=shutil.ignore_patterns("filler"))
        subprocess.run(["umount", disk], check=True)


def starve_to_the_end(repository, settings, whole):
    """Check that a run that never gets room again ends in an error, and is resumed when there is room."""
    folder = whole.with_name("end")
    with start(repository, settings, folder) as process:
        shown = read_until(process, folder, lambda line: (folder / "ckpt.pt").exists())
        limit(process.pid, random.randrange(1000))
        shown = "".join(shown) + finish(process, code=2)
    count_failures(shown)
    last = shown.splitlines()[-1]
    said = f"step {STEPS} could not be saved" in last and last.endswith(f" step {step_of(folder)}")
    expect(said, f"{folder}: the last line does not say what was saved: {last}")
    finish(start(repository, settings, folder))
    compare(folder, whole, "no more room, and resumed")


def try_prepare(folder):
    """Check that prepare.py without room for its files leaves the data that were there; with room it replaces them."""
    repository = copy_repository(folder, TEXT[:200])  # so short that meta.json is the largest file
    char = repository / "data" / "shakespeare_char"
    before = load_dataset(char).meta
    (char / "input.txt").write_text(TEXT[:200].upper())
    tokens, facts = (char / "train.bin").stat().st_size, (char / "meta.json").stat().st_size
    expect(tokens < facts, "the text is too long for this test")
    for room in (8, tokens, facts - 1, ENOUGH):
        limits = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
        command = [sys.executable, char / "prepare.py"]
        run = subprocess.run(command, env=ENVIRONMENT, preexec_fn=limits, capture_output=True, text=True)
        meta = load_dataset(char).meta
        whole = all(sha256((char / f"{split}.bin").read_bytes()) == meta["sha256"][split] for split in SPLITS)
        expect(whole, f"{char}: not the tokens that meta.json was written with")
        if room == ENOUGH:
            expect(run.returncode == 0 and meta != before, run.stderr)
            return
        reason = f"with room for {room} bytes prepare.py gave exit code {run.returncode} and {run.stderr}"
        expect(run.returncode == 2 and run.stderr.count("\n") == 1, reason)
        expect(meta == before, f"{char}: replaced, though there was no room")
        expect(not list(char.glob("*.tmp")), f"{char}: files are left over")
        counts["runs of prepare.py made to fail"] += 1


# -- all of it -----------------------------------------------------------------------------------------------


def train_undisturbed(repository, settings, folder):
    """Train what all other runs in the folder are compared with."""
    (folder / "seen").mkdir(parents=True)
    finish(start(repository, settings, folder / "whole"))
    return folder / "whole"


def try_kills(repository, settings, whole, kills):
    """Lead one life after another, until there have been so many kills."""
    number = 0
    while kills:
        number += 1
        folder = whole.with_name(f"life {number}")
        killed = live(repository, settings, folder, kills)
        compare(folder, whole, f"life {number}, killed {killed} times")
        kills -= killed


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--kills", type=int, default=100, help="in all (default: 100)")
    parser.add_argument("--seed", type=int, default=1, help="of the moments and the sizes (default: 1)")
    options = parser.parse_args()
    random.seed(options.seed)
    work = Path(tempfile.mkdtemp(prefix="faults-"))
    began = time.time()
    try:
        repository = copy_repository(work / "repository", TEXT)
        for method, settings in METHODS.items():
            whole = train_undisturbed(repository, settings, work / method)
            try_kills(repository, settings, whole, math.ceil(options.kills / len(METHODS)))
            starve_by_limit(repository, settings, whole)
            starve_by_disk(repository, settings, whole)
            starve_to_the_end(repository, settings, whole)
        try_prepare(work / "prepare")
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
