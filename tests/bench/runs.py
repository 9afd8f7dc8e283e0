"""Runs of train.py: their folders, commands and results, and several at a time."""

import ctypes
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from config.runtime.errors import FolderInUse, UserError, file_errors
from config.runtime.files import sha256
from config.runtime.processes import StopSignal
from config.runtime.run import whole_line
from variants import Variant

EXAMINE = Path(__file__).with_name("examine.py")
NO_MATTER = ("device", "tensorboard", "wandb")  # settings that do not affect a run's results
TOLERANCE = 0.005  # nats between the loss that train.py logs and the one its weights give: rounding


@dataclass(frozen=True)
class Run:
    variant: Variant
    rate: float
    seed: int
    steps: int
    parent: Path
    windows: Path  # what its loss is measured on

    @property
    def flops(self):
        return self.variant.flops_per_token * self.variant.tokens_per_step * self.steps

    @cached_property
    def folder(self):
        settings = {name: value for name, value in self.settings().items() if name not in NO_MATTER}
        digest = sha256(json.dumps(settings, sort_keys=True).encode())[:8]
        name = f"lr{self.rate:g}-seed{self.seed}-{self.steps}-{digest}"
        return self.parent / f"{name}-{self.variant.identity}"

    def settings(self):
        """Return the settings, as far as they differ from train.py's defaults."""
        settings = dict(self.variant.settings) | {"learning_rate": self.rate, "seed": self.seed}
        warmup = settings["warmup_iters"] * self.steps / settings["max_iters"]
        settings |= {"max_iters": self.steps, "warmup_iters": int(warmup + 1e-9)}
        settings["eval_interval"] = settings["eval_interval"] or self.steps  # only at the end
        return self.variant.changed(settings)

    def commands(self, device="auto"):
        """Return the commands that train it, or resume it, and measure its loss."""
        settings = self.settings() | ({} if device == "auto" else {"device": device})
        options = [f"--{name}={value}" for name, value in settings.items()]
        train = [sys.executable, str(self.variant.home / "train.py"), *options, f"--out_dir={self.folder}"]
        measured = str(self.folder / "measured.json")
        measure = [sys.executable, str(EXAMINE), str(self.variant.home), str(self.windows), measured, str(self.folder)]
        return [[*train, "--init_from=auto"], measure]

    def label(self):
        return f"{self.variant.name}, rate {self.rate:g}, seed {self.seed}, {self.steps:,} steps"


@file_errors()
def read_log(folder) -> list[dict]:
    """Return the lines of a run's log.jsonl, none if there is no log. A line that a kill has torn is left out."""
    path = folder / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [facts for facts in map(whole_line, lines) if facts]


def result_of(run, tokens) -> dict | None:
    """Return the result of a run, or None if it has not been trained and measured. A diverged one's loss is None.

    `tokens` are the SHA-256 of its data. "refused" says why it does not count.
    """
    lines, measured = read_log(run.folder), run.folder / "measured.json"
    diverged = bool(lines) and lines[-1]["event"] == "diverged"
    if not lines or not diverged and not measured.exists():
        return None
    speeds = [line["tokens_per_second"] for line in lines if line["event"] == "step"]
    speed = statistics.median(speeds[1:] or speeds or [math.nan])  # the first one warms up
    result = {"loss": None, "logged": None, "refused": ""}
    result |= {"machine": lines[0].get("machine"), "notes": lines[0].get("notes", [])}
    result["train_seconds"] = run.variant.tokens_per_step * run.steps / speed
    ended = (run.folder / "log.jsonl").stat().st_mtime
    result["period"] = ended - result["train_seconds"], ended
    if diverged:
        return result
    found = json.loads(measured.read_text())
    result["loss"] = found.get("loss")
    result["logged"] = next((line["val_loss"] for line in reversed(lines) if line["event"] == "eval"), None)
    return result | {"refused": found["refused"] or why_refused(run, lines, found["step"], result, tokens)}


def why_refused(run, lines, steps, result, tokens):
    """Return why a run does not count: what it logs is not what it has done."""
    starts = [line for line in lines if line["event"] in ("start", "resume")]
    cure = f"remove {run.folder} and rerun the command"
    if len({(line.get("code") or {}).get("sha256") for line in starts}) > 1:
        return f"its code changed during training: {cure}"
    if any((line.get("data") or {}).get("sha256") != tokens for line in starts):
        return f"its text changed before it started: {cure}"
    if steps != run.steps:
        return f"it trained for {steps} steps instead of {run.steps}"
    logged = math.nan if result["logged"] is None else result["logged"]
    if not abs(logged - result["loss"]) < TOLERANCE:
        return f"it logs {logged:.4f} but its weights give {result['loss']:.4f}"
    return ""


def tidy(folder):
    """Remove the checkpoints of a run that has been measured."""
    for name in ("ckpt.pt", "best.pt"):
        (folder / name).unlink(missing_ok=True)


# -- several at a time -----------------------------------------------------------------------------------------


def runs_at_a_time(workers, device):
    """Return how many runs are done at a time: `workers`, or, for 0, one for each GPU or each thread of the CPU."""
    if workers > 0:
        return workers
    if device.type != "cpu":
        return max(1, torch.cuda.device_count())
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    # OMP_NUM_THREADS=1 may have been exported for parallel runs
    return torch.get_num_threads() if torch.get_num_threads() > 1 else len(cores)


def variables_of_runs(number, device) -> dict:
    """Return the environment variables of `number` runs at a time: those that share a CPU have a thread each."""
    return {"OMP_NUM_THREADS": "1"} if device.type == "cpu" and number > 1 else {}


class Stopped(Exception):
    """Raised after a stop signal; holds the signal's number."""


class Crashed(Exception):
    """A run ended with a traceback, a slip in the variant's code. Holds the run and what it printed."""


class Job:
    """The commands of a run, one after another. What they print goes to output.txt in its folder."""

    def __init__(self, run, place, device, environment):
        self.run, self.place, self.environment, self.began = run, place, environment, time.time()
        self.commands = run.commands(device)
        with file_errors():
            run.folder.mkdir(parents=True, exist_ok=True)
            self.output = open(run.folder / "output.txt", "ab")
        self.printed = self.output.tell()  # what is before was printed earlier, or by another comparison
        self.start()

    def start(self):
        self.process = subprocess.Popen(
            self.commands.pop(0),
            stdin=subprocess.DEVNULL,
            stdout=self.output,
            stderr=self.output,
            env=self.environment,
            start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on once
            preexec_fn=WITH_PARENT,
        )

    def has_ended(self):
        if self.process.poll() is None:
            return False
        if self.process.returncode == 0 and self.commands:
            self.start()
            return False
        self.output.close()
        return True

    def check(self):
        """Raise what the exit code of its last command means, unless that is success, or divergence."""
        code, where, lines = self.process.returncode, self.run.folder / "output.txt", read_log(self.run.folder)
        if code == 0 or code == 2 and lines and lines[-1]["event"] == "diverged":
            return
        said = where.read_bytes()[self.printed :].decode(errors="replace").strip() or "it printed nothing"
        if code < 0 or code > 128:
            raise UserError(f"{self.run.label()}: ended by signal {abs(code) % 128}: rerun the command ({where})")
        if code in (2, FolderInUse.exit_code):
            raise UserError(f"{self.run.label()}: {said.splitlines()[-1]} ({where})")
        raise Crashed(self.run, said)


def end_with_parent():
    """Let the kernel end a process, which then saves and leaves, when the comparison has been killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


WITH_PARENT = end_with_parent if sys.platform == "linux" else None


class Workers:
    """Do up to `number` runs at a time: on a CPU with one thread each, on GPUs round-robin."""

    def __init__(self, number, device):
        self.places, self.device = list(range(number)), device
        self.environment = os.environ | variables_of_runs(number, device)
        self.running = {}  # {run: its job}
        self.signal = StopSignal()

    def offer(self, run):
        """Start `run` if a place is free."""
        if self.places and run not in self.running:
            place = self.places.pop(0)
            device = f"cuda:{place % torch.cuda.device_count()}" if self.device.type == "cuda" else self.device.type
            self.running[run] = Job(run, place, device, self.environment)

    def wait(self) -> dict:
        """Return the runs that have ended, once one has, and the seconds that they took.

        Raises Stopped after a signal, Crashed where one's code has failed, and UserError for another failure.
        """
        ended = []
        while not ended and not self.signal.number:
            time.sleep(0.1)
            ended = [job for job in list(self.running.values()) if job.has_ended()]
        if self.signal.number:  # it may have ended a process that had hardly begun, which is no failure
            raise Stopped(self.signal.number)
        for job in ended:
            del self.running[job.run]
            self.places.append(job.place)
        for job in ended:
            job.check()
        return {job.run: time.time() - job.began for job in ended}

    def stop(self):
        """Let what is running finish its step, save and end, and wait for it."""
        for job in self.running.values():
            job.process.send_signal(signal.SIGTERM)
        for job in self.running.values():
            job.process.wait()
        self.running.clear()
