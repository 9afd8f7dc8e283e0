"""
Kill training runs or make their writes fail, and compare them with undisturbed runs: python tests/faults.py

This tests a promise: a run that is killed, or cannot write, ends; what it leaves is whole, and resumed it equals the
undisturbed run bit for bit. Every process is a real one. (This cannot show what a power cut does to data that have not
reached the disk.) It ends at the first broken promise, and keeps all files. Linux only; takes about eight minutes.
"""

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from config.runtime import load_checkpoint
from conftest import TINY, copy_repository, differences, progress

STEPS = 150
RUN = f"{TINY} --eval_interval=7 --init_from=auto"
METHODS = {
    "standard": "--checkpoint_interval=5 --learning_rate=0.3 --warmup_iters=150",  # soon worse than its best.pt
    "w2, m1": "--attention=w2 --residual=m1 --dropout=0.2 --gradient_accumulation_steps=2 --checkpoint_interval=3",
    "5.5, m4.2": "--attention=summed_qk --qk_scale=5.5 --residual=m4.2 --dropout=0.1 --checkpoint_interval=10",
    "m2, float16": "--residual=m2 --dtype=float16 --checkpoint_interval=4",
    "two processes": "--residual=m3.2 --gradient_accumulation_steps=2 --checkpoint_interval=4",
}
# one thread, so that a busy machine computes the same; and no .pyc files, which Python may leave half-written
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


def start(repository, method, folder):
    """Start a training process, which resumes what the folder holds."""
    program = [sys.executable, "train.py"]
    if method == "two processes":
        program[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    options = [*RUN.split(), *METHODS[method].split(), f"--max_iters={STEPS}", f"--out_dir={folder}"]
    with open(f"{folder}.txt", "w") as output:
        streams = dict(stdout=output, stderr=subprocess.STDOUT)
        return subprocess.Popen([*program, *options], cwd=repository, env=ENVIRONMENT, **streams)


def lines_of(folder):
    return (folder / "log.jsonl").read_bytes().count(b"\n") if (folder / "log.jsonl").exists() else 0


def disturb(process, folder, several):
    """Kill a process at a random moment, or let none of its files grow beyond some size from then on."""
    lines = lines_of(folder)
    happened, longest = random.choice((
        (lambda: True, 4.0),  # starting
        (lambda: lines_of(folder) > lines, 1.0),  # training
        (lambda: list(folder.glob("*.tmp")), 0.005),  # saving
    ))  # fmt: skip
    wait(process, 60, happened)
    wait(process, random.uniform(0, longest))
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if process.poll() is not None or several and not children.read_text():
        return False
    numbers = [int(number) for number in children.read_text().split()] if several else [process.pid]
    if random.random() < 0.7:
        os.kill(random.choice(numbers), signal.SIGKILL)
    else:
        logged = (folder / "log.jsonl").stat().st_size if lines else 0
        room = random.choice((random.randrange(30_000), logged + random.randrange(2_000)))  # a checkpoint's, a log's
        for number in numbers:
            resource.prlimit(number, resource.RLIMIT_FSIZE, (room, resource.RLIM_INFINITY))
    return True


def wait(process, seconds, happened=lambda: False):
    """Wait until something has happened, the time is over or the process has ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not happened() and process.poll() is None:
        time.sleep(0.001)


def live(repository, method, folder, faults):
    """Train a run to its last step, disturbing it at most so many times. Return how many times it was."""
    met, code, several = 0, None, method == "two processes"
    while code != 0:
        process = start(repository, method, folder)
        disturbed = met < faults and disturb(process, folder, several)
        met += disturbed
        code, shown = process.wait(300), Path(f"{folder}.txt").read_text()
        assert code == 0 or disturbed, f"exit code {code} after:\n{shown[-1000:]}"
        assert several or "Traceback" not in shown, shown
        for path in folder.glob("*.pt"):
            load_checkpoint(path)  # an error if it is not whole
    return met


def try_faults(repository, method, work, faults):
    """Train one run after another until so many faults have been met, and compare each with an undisturbed one."""
    work.mkdir()
    whole, number = work / "whole", 0
    live(repository, method, whole, 0)
    while faults > 0:
        number += 1
        folder = work / f"life {number}"
        faults -= live(repository, method, folder, faults)
        for name in ("ckpt.pt", "best.pt"):
            found = differences(folder / name, whole / name)
            assert not found, f"{folder / name} is not {whole / name}: {found}"
        assert progress(folder) == progress(whole), f"{folder}/log.jsonl: not the losses of {whole}"
        assert not list(folder.glob("*.tmp")), f"{folder}: files are left over"
        print(f"{method}: {folder.name}: equal to the undisturbed run", flush=True)


if __name__ == "__main__":
    random.seed(1)
    work, began = Path(tempfile.mkdtemp(prefix="faults-")), time.time()
    print(f"the runs are in {work}", flush=True)
    repository = copy_repository(work / "repository")
    for method in METHODS:
        try_faults(repository, method, work / method, faults=20)
    shutil.rmtree(work)
    print(f"all promises kept, in {time.time() - began:.0f} seconds")
