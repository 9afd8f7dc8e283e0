"""What runs a variant's code: examine.py, and train.py, several at a time; and what their folders say."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent import futures
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from config.runtime.errors import UserError, file_errors
from config.runtime.processes import StopSignal
from variants import NO_MATTER, Variant, digest

CRASHED = "crashed"
EXAMINE = Path(__file__).with_name("examine.py")


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
        return self.variant.flops_per_step * self.steps

    @cached_property
    def folder(self):
        name = f"lr{self.rate:g}-seed{self.seed}-{self.steps}"
        return self.parent / f"{name}-{digest(self.settings)}-{self.variant.home.name[:8]}"

    @cached_property
    def settings(self):
        settings = self.variant.settings | {"learning_rate": self.rate, "seed": self.seed}
        warmup = settings["warmup_iters"] * self.steps / settings["max_iters"]
        settings |= {"max_iters": self.steps, "warmup_iters": int(warmup + 1e-9)}
        return settings | {"eval_interval": settings["eval_interval"] or self.steps}  # only at the end

    def commands(self, device="auto"):
        """Return the commands that train it, or resume it, and measure its loss."""
        options = self.variant.options(self.settings | {"device": device})
        train = [self.variant.home / "train.py", *options, f"--out_dir={self.folder}", "--init_from=auto"]
        measure = [EXAMINE, self.variant.home, self.windows, self.folder / "measured.json", self.folder]
        return [[sys.executable, *map(str, command)] for command in (train, measure)]

    def label(self):
        return f"{self.variant.name}, rate {self.rate:g}, seed {self.seed}, {self.steps:,} steps"


def examine(variant, folder, windows, device):
    """Return a variant with what examine.py says of it."""
    answer = folder / f"examined-{variant.identity}-{device}.json"
    if not answer.exists():
        print(f"examining {variant.name}", file=sys.stderr, flush=True)
        options = variant.options(variant.settings | {"device": device})
        command = [sys.executable, *map(str, (EXAMINE, variant.home, windows, answer)), *options]
        sleeping = {"OMP_WAIT_POLICY": "PASSIVE"} | os.environ  # its threads, since other processes may compute
        if subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=sleeping).returncode:
            return replace(variant, trouble=(CRASHED, "its error is on stderr"))
    return replace(variant, **json.loads(answer.read_text()))


@file_errors()
def read_log(folder) -> list[dict]:
    """Return the lines of a run's log.jsonl, none if there is no log. A line that a kill has torn is left out."""
    path = folder / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def diverged(log):
    return bool(log) and log[-1]["event"] == "diverged"


def result_of(run, tokens) -> dict | None:
    """Return the result of a run, or None if it has not been trained and measured. A diverged one's loss is inf.

    `tokens` are the SHA-256 of its data. "refused" says why it does not count.
    """
    log, measured = read_log(run.folder), run.folder / "measured.json"
    if not log or not diverged(log) and not measured.exists():
        return None
    starts = [line for line in log if line["event"] in ("start", "resume")]
    result = {"loss": math.inf, "refused": "", "seconds": None, "notes": starts[0].get("notes", [])}
    if not diverged(log):
        found = json.loads(measured.read_text())
        result["loss"] = found.get("loss")
        result["refused"] = why_refused(run, starts, found, tokens)
        if len(starts) == 1:  # of a resumed run, nobody knows them
            result["seconds"] = log[-1].get("seconds")
    return result


def why_refused(run, starts, found, tokens):
    """Return why a run does not count: it has not done what it was asked to do."""
    if "trouble" in found:
        return found["trouble"][1]
    if any((line.get("data") or {}).get("sha256") != tokens for line in starts):
        return f"its text changed before it started: remove {run.folder} and rerun the command"
    if found["step"] != run.steps:
        return f"it trained for {found['step']} steps instead of {run.steps}"
    for name, asked in run.settings.items():
        used = starts[-1]["settings"].get(name)
        if used != asked and asked != "auto" and name not in (*NO_MATTER, "out_dir", "init_from"):
            return f"it trained with {name} = {used!r} instead of {asked!r}"
    return ""


# -- several at a time -------------------------------------------------------------------------------------------


def places(workers, device) -> list[str]:
    """Return the device of each of the runs at a time: `workers`, or one for each GPU or each core of the CPU."""
    here = [device]
    if device == "cpu":
        here *= len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    elif device == "cuda":
        here = [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    return [here[i % len(here)] for i in range(workers or len(here))]


class Stopped(Exception):
    """Raised after a stop signal; holds the signal's number."""


class Crashed(Exception):
    """A run ended with a traceback, a slip in the variant's code. Holds the run and what it printed."""


class Workers:
    """Do a run at a time on each of some places, such as ["cpu", "cpu"]."""

    def __init__(self, places):
        self.places, self.pool = list(places), futures.ThreadPoolExecutor(len(places))
        self.environment = os.environ | ({"OMP_NUM_THREADS": "1"} if places[1:] and places[0] == "cpu" else {})
        self.running = {}  # {run: its Future}
        self.processes = {}  # {run: the last process that it started}
        self.signal = StopSignal()

    def offer(self, run):
        """Start `run` if a place is free."""
        if self.places and run not in self.running:
            self.running[run] = self.pool.submit(self.do, run, self.places.pop())

    def do(self, run, place):
        """Do the commands of a run one after another, and return the seconds. Their output goes to output.txt."""
        began, output = time.time(), run.folder / "output.txt"
        try:
            with file_errors():
                run.folder.mkdir(parents=True, exist_ok=True)
                file = open(output, "wb")
            with file:
                into = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL, "env": self.environment}
                for command in run.commands(place):
                    # in a session of its own: a terminal's Ctrl-C comes to this process, which passes it on once
                    process = self.processes[run] = subprocess.Popen(command, **into, start_new_session=True)
                    if code := process.wait():
                        break
        finally:
            self.places.append(place)
        if code and not (code == 2 and diverged(read_log(run.folder))):
            said = output.read_text(errors="replace").strip() or "it printed nothing"
            if code == 1:
                raise Crashed(run, said)
            raise UserError(f"{run.label()}: exit code {code}: {said.splitlines()[-1]} ({output})")
        return time.time() - began

    def wait(self) -> dict:
        """Return the runs that have ended, once one has, and the seconds that they took.

        Raises Stopped after a signal, Crashed where one's code has failed, and UserError for another failure.
        """
        ended = set()
        while not ended and not self.signal.number:
            ended, _ = futures.wait(self.running.values(), 0.1, futures.FIRST_COMPLETED)
        if self.signal.number:  # it may have ended a process that had hardly begun, which is no failure
            raise Stopped(self.signal.number)
        return {run: self.running.pop(run).result() for run, future in [*self.running.items()] if future in ended}

    def stop(self):
        """Let what is running finish its step, save and end, and wait for it."""
        for process in list(self.processes.values()):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        self.pool.shutdown()
