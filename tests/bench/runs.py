"""What runs a variant's code: examine.py, and train.py, several at a time; and what their folders say."""

import ctypes
import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch

from config.runtime.errors import UserError, file_errors
from config.runtime.files import sha256
from config.runtime.processes import StopSignal
from config.runtime.run import whole_line
from variants import NO_MATTER, Variant, digest

CRASHED = "crashed"
EXAMINE = Path(__file__).with_name("examine.py")
TOLERANCE = 0.01  # nats between the loss that train.py logs, perhaps in 16 bits, and that of its weights


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
        options = self.variant.options(**self.settings | ({} if device == "auto" else {"device": device}))
        train = [sys.executable, str(self.variant.home / "train.py"), *options, f"--out_dir={self.folder}"]
        measured = str(self.folder / "measured.json")
        measure = [sys.executable, str(EXAMINE), str(self.variant.home), str(self.windows), measured, str(self.folder)]
        return [[*train, "--init_from=auto"], measure]

    def label(self):
        return f"{self.variant.name}, rate {self.rate:g}, seed {self.seed}, {self.steps:,} steps"


def examine(variant, folder, windows, device):
    """Return a variant with what examine.py says of it."""
    programs = [path.read_bytes() for path in (EXAMINE, EXAMINE.with_name("operations.py"))]
    asked = [variant.home.name, digest(variant.settings), device.type, programs]
    answer = folder / f"examined-{sha256(repr(asked).encode())[:12]}.json"
    if not answer.exists():
        print(f"examining {variant.name}", file=sys.stderr, flush=True)
        command = [sys.executable, *map(str, (EXAMINE, variant.home, windows, answer))]
        alone = {"env": os.environ | {"OMP_NUM_THREADS": "1"}, "stdin": subprocess.DEVNULL, "preexec_fn": WITH_PARENT}
        command += variant.options(device=device.type)
        code = subprocess.run(command, stdout=subprocess.DEVNULL, **alone).returncode
        if code == 1:
            return replace(variant, trouble=(CRASHED, "its traceback is on stderr"))
        if code:
            raise UserError(f"{variant.name}: could not be examined (exit code {code})")
    return replace(variant, **json.loads(answer.read_text()))


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
    starts = [line for line in lines if line["event"] in ("start", "resume")]
    result = {"loss": None, "logged": None, "refused": "", "seconds": None}
    result |= {"machine": starts[0].get("machine"), "notes": starts[0].get("notes", [])}
    if diverged:
        return result
    found = json.loads(measured.read_text())
    result["loss"] = found.get("loss")
    result["logged"] = next((line["val_loss"] for line in reversed(lines) if line["event"] == "eval"), None)
    if len(starts) == 1:  # of a resumed run, nobody knows them
        result["seconds"] = lines[-1].get("seconds")
    result["refused"] = found["refused"] or why_refused(run, starts, found["step"], tokens)
    if not result["refused"] and not abs(result["loss"] - (result["logged"] or math.inf)) < TOLERANCE:
        said = f"a run logs {result['logged']}, but its weights have {result['loss']:.4f}, which counts"
        result["notes"] = [*result["notes"], said]
    return result


def why_refused(run, starts, steps, tokens):
    """Return why a run does not count: it has not done what it was asked to do."""
    if any((line.get("data") or {}).get("sha256") != tokens for line in starts):
        return f"its text changed before it started: remove {run.folder} and rerun the command"
    if steps != run.steps:
        return f"it trained for {steps} steps instead of {run.steps}"
    for name, asked in run.settings.items():
        used = starts[-1]["settings"].get(name)
        if used != asked and asked != "auto" and name not in (*NO_MATTER, "out_dir", "init_from"):
            return f"it trained with {name} = {used!r} instead of {asked!r}"
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


def end_with_parent():
    """Let the kernel end a process, which then saves and leaves, when the comparison has been killed."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


WITH_PARENT = end_with_parent if sys.platform == "linux" else None


class Workers:
    """Do up to `number` runs at a time: on a CPU with one thread each, on GPUs round-robin."""

    def __init__(self, number, device):
        self.places, self.device = list(range(number)), device
        self.environment = os.environ | variables_of_runs(number, device)
        self.running = {}  # {run: (its place, when it began, what does it, its process)}
        self.signal = StopSignal()

    def offer(self, run):
        """Start `run` if a place is free."""
        if self.places and run not in self.running:
            place = self.places.pop(0)
            device = f"cuda:{place % torch.cuda.device_count()}" if self.device.type == "cuda" else self.device.type
            work = self.do(run, device)
            self.running[run] = place, time.time(), work, next(work)

    def do(self, run, device):
        """Do the commands of a run one after another, and yield the process at work. Its output goes to output.txt."""
        with file_errors():
            run.folder.mkdir(parents=True, exist_ok=True)
            output = open(run.folder / "output.txt", "ab")
        before = output.tell()  # what was printed earlier, or by another comparison
        with output:
            for command in run.commands(device):
                into = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL, "env": self.environment}
                # in a session of its own: a terminal's Ctrl-C comes to this process, which passes it on once
                process = subprocess.Popen(command, **into, start_new_session=True, preexec_fn=WITH_PARENT)
                yield process
                while process.poll() is None:
                    yield process
                if process.returncode:
                    break
        code, lines = process.returncode, read_log(run.folder)
        if code == 0 or code == 2 and lines and lines[-1]["event"] == "diverged":
            return
        said = Path(output.name).read_bytes()[before:].decode(errors="replace").strip() or "it printed nothing"
        if code == 1:
            raise Crashed(run, said)
        why = f"ended by signal {abs(code) % 128}: rerun the command" if not 0 < code < 128 else said.splitlines()[-1]
        raise UserError(f"{run.label()}: {why} ({output.name})")

    def wait(self) -> dict:
        """Return the runs that have ended, once one has, and the seconds that they took.

        Raises Stopped after a signal, Crashed where one's code has failed, and UserError for another failure.
        """
        ended, failure = {}, None
        while not ended and not failure and not self.signal.number:
            time.sleep(0.1)
            for run, (place, began, work, _) in list(self.running.items()):
                try:
                    self.running[run] = place, began, work, next(work)
                    continue
                except StopIteration:
                    ended[run] = time.time() - began
                except (Crashed, UserError) as error:
                    failure = error
                del self.running[run]
                self.places.append(place)
        if self.signal.number:  # it may have ended a process that had hardly begun, which is no failure
            raise Stopped(self.signal.number)
        if failure:
            raise failure
        return ended

    def stop(self):
        """Let what is running finish its step, save and end, and wait for it."""
        for *_, process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for *_, process in self.running.values():
            process.wait()
        self.running.clear()
