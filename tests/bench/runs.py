"""Runs of train.py: parse a variant's arguments, build its commands, read its results, and run several at a time."""

import csv
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "train.py"
sys.path.insert(0, str(ROOT))

import torch

from config import convert, read_settings, split_settings
from config.runtime.checks import check_settings, ineffective_settings, of_model
from config.runtime.errors import StopSignal, UserError, file_errors
from config.runtime.files import sha256
from config.runtime.log import whole_line
from model import GPT, GPTConfig

DEFAULTS = read_settings(TRAIN, [])
OURS = ("out_dir", "init_from", "overwrite", "eval_only", "seed")  # settings that a comparison makes itself
QUICK_STEPS = ["--max_iters=6", "--warmup_iters=1", "--eval_tokens=64"]
METHOD = ("attention", "qk_scale", "sigma", "residual", "keep_input")  # settings that a folder's name starts with
NO_MATTER = ("device", "tensorboard", "wandb")  # settings that do not affect a run's results


@dataclass(frozen=True, eq=False)
class Candidate:
    """A variant: its name, its train.py settings, and its cost."""

    name: str
    settings: dict  # all of them
    parameters: int
    flops_per_token: float
    identity: str = ""  # names what it computes (see examine.py); empty for committed results

    @property
    def flops(self):
        return self.flops_per_token * self.tokens_per_step * self.settings["max_iters"]

    @property
    def tokens_per_step(self):
        return math.prod(self.batch)

    @property
    def batch(self):
        return [self.settings[name] for name in ("batch_size", "grad_accum_steps", "block_size")]


def read_words(words, common, quick=False):
    """Return the name and settings of an argument such as "config/m1_shakespeare.py --keep_input" or "NAME: ...".

    Config files come first, then the `common` options, then its own, then, if `quick`, QUICK_STEPS.
    """
    name, colon, rest = f"{words} ".partition(": ")
    arguments = shlex.split(rest if colon else words)
    files = [argument for argument in arguments if not argument.startswith("-")]
    options = [argument for argument in arguments if argument.startswith("-")]
    if not colon:
        name = ", ".join([Path(file).stem for file in files] + [option.lstrip("-") for option in options]) or "defaults"
    given = {}
    for part in (files, common, options, QUICK_STEPS * quick):
        given |= split_settings(TRAIN, part)[1]
    taken = [setting for setting in OURS if setting in given]
    if taken:
        raise UserError(f"{name}: {taken[0]} is set by the comparison: leave it out")
    settings = DEFAULTS | given
    check_settings(settings, world_size=1)
    for note in ineffective_settings(settings, given, DEFAULTS):
        print(f"NOTE {name}: {note}")
    return name, settings


def make_candidate(name, settings, vocab_size) -> Candidate:
    with torch.device("meta"):  # only counted
        model = GPT(GPTConfig(**of_model(settings), vocab_size=vocab_size))
    return Candidate(name, settings, model.get_num_params(), model.flops_per_token())


@dataclass(frozen=True)
class Run:
    candidate: Candidate
    rate: float
    seed: int
    times: float  # its steps, over those of the candidate
    parent: Path

    @cached_property
    def name(self):
        """Return the name that it has in committed results: of its settings alone."""
        return folder_name(self.settings())

    @cached_property
    def folder(self):
        return self.parent / "-".join(filter(None, (self.name, self.candidate.identity)))

    @property
    def steps(self):
        return max(1, round(self.candidate.settings["max_iters"] * self.times))

    def settings(self):
        """Return the settings, as far as they differ from train.py's defaults."""
        settings = dict(self.candidate.settings) | {"learning_rate": self.rate, "seed": self.seed}
        settings |= {"max_iters": self.steps, "warmup_iters": int(settings["warmup_iters"] * self.times)}
        settings["eval_interval"] = settings["eval_interval"] or self.steps  # only at the end
        return changed(settings)

    def command(self, device="auto"):
        """Return the command that trains it or, if rerun, resumes it."""
        settings = self.settings() | ({} if device == "auto" else {"device": device})
        return [sys.executable, str(TRAIN), *options_of(settings), f"--out_dir={self.folder}", "--init_from=auto"]

    def label(self):
        return f"{self.candidate.name}, rate {self.rate:g}, seed {self.seed}, {self.steps:,} steps"


def changed(settings):
    return {name: value for name, value in settings.items() if value != DEFAULTS[name]}


def options_of(settings):
    return [f"--{name}={value}" for name, value in changed(settings).items()]


def folder_name(settings):
    settings = {name: value for name, value in changed(settings).items() if name not in NO_MATTER}
    method = [name if settings[name] is True else str(settings[name]) for name in METHOD if name in settings]
    digest = sha256(json.dumps(settings, sort_keys=True).encode())[:8]
    rate, seed, steps = ((DEFAULTS | settings)[name] for name in ("learning_rate", "seed", "max_iters"))
    return f"{'-'.join(method) or 'standard'}-lr{rate:g}-seed{seed}-{steps}-{digest}"


@file_errors()
def read_log(folder) -> list[dict]:
    """Return the lines of a run's log.jsonl, none if there is no log. A line that a kill has torn is left out."""
    path = folder / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [facts for facts in map(whole_line, lines) if facts]


def result_of(folder) -> dict | None:
    """Return the result of the run in `folder`, or None if it has not ended. The loss is None where it diverged."""
    lines = read_log(folder)
    if not lines or lines[-1]["event"] not in ("end", "diverged"):
        return None
    start, last = lines[0], lines[-1]
    evals = [line for line in lines if line["event"] == "eval"]
    best = min(evals, key=lambda line: line["val_loss"], default={"val_loss": None, "step": None})
    settings, steps = start["settings"], last["step"]
    tokens = steps * settings["batch_size"] * settings["grad_accum_steps"] * settings["block_size"]
    return {
        "loss": evals[-1]["val_loss"] if last["event"] == "end" else None,
        "best_loss": best["val_loss"],
        "best_step": best["step"],
        "parameters": start["parameters"],
        "flops": start["flops_per_token"] * tokens,
        "seconds": last.get("seconds"),
        "machine": start["machine"],
        "commit": start["code"]["commit"],
        "code": start["code"]["sha256"],
        "rate": settings["learning_rate"],
        "seed": settings["seed"],
        "steps": steps,
    }


def tidy(folder, keep):
    """Remove the checkpoints of a run that has ended, unless `keep` is set now or was set before."""
    mark = folder / "keep"
    if keep:
        mark.touch()
    elif not mark.exists():
        for name in ("ckpt.pt", "best.pt"):
            (folder / name).unlink(missing_ok=True)


def read_committed(path):
    """Return the results in a runs.csv, by the names of the runs' folders."""
    results = {}
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            given = {name: text for name, text in row.items() if name in DEFAULTS}
            settings = {name: convert(name, text, DEFAULTS, f"{path}: {name}") for name, text in given.items()}
            numbers = ("loss", "best_loss", "flops", "seconds")
            facts = {name: float(row[name]) if row[name] else None for name in numbers}
            facts |= {"best_step": int(row["best_step"]) if row["best_step"] else None}
            facts |= {"parameters": int(row["parameters"]), "machine": row["machine"], "commit": row["commit"]}
            facts |= {"rate": settings["learning_rate"], "seed": settings["seed"], "steps": settings["max_iters"]}
            results[folder_name(settings)] = facts
    return results


def share_a_cpu(number, device):
    """Return whether `number` runs share a CPU, so that each must use a single thread."""
    return device.type == "cpu" and number > 1


def runs_at_a_time(workers, device):
    """Return how many runs are done at a time: `workers`, or, for 0, one for each GPU or each thread of the CPU."""
    if workers > 0:
        return workers
    if device.type != "cpu":
        return max(1, torch.cuda.device_count())
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count())
    # OMP_NUM_THREADS=1 may have been exported for parallel runs
    return torch.get_num_threads() if torch.get_num_threads() > 1 else len(cores)


class Stopped(Exception):
    """Raised after a stop signal; holds the signal's number."""


class Workers:
    """Train up to `number` runs at a time: on a CPU with one thread each, on GPUs round-robin."""

    def __init__(self, number, device, keep=False):
        self.places, self.device, self.keep = list(range(number)), device, keep
        self.threads = 1 if share_a_cpu(number, device) else torch.get_num_threads()
        self.environment = os.environ | ({"OMP_NUM_THREADS": "1"} if share_a_cpu(number, device) else {})
        self.running = {}  # {run: (process, place)}
        self.signal = StopSignal()

    def offer(self, run):
        """Start `run` if a place is free. Its output goes to output.txt in its folder."""
        if not self.places or run in self.running:
            return
        place = self.places.pop(0)
        device = f"cuda:{place % torch.cuda.device_count()}" if self.device.type == "cuda" else self.device.type
        with file_errors():
            run.folder.mkdir(parents=True, exist_ok=True)
            output = open(run.folder / "output.txt", "wb")
        with output:
            process = subprocess.Popen(
                run.command(device),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,  # a terminal's Ctrl-C comes to this process, which passes it on once
            )
        self.running[run] = process, place

    def wait(self) -> list[Run]:
        """Return the runs that have ended, once one has.

        Raises Stopped after a signal, and UserError where a run has failed, except by diverging.
        """
        ended = []
        while not ended and not self.signal.number:
            time.sleep(0.1)
            ended = [run for run, (process, _) in self.running.items() if process.poll() is not None]
        if self.signal.number:  # it may have ended a process that had hardly begun, which is no failure
            raise Stopped(self.signal.number)
        for run in ended:
            self.places.append(self.running.pop(run)[1])
            if not result_of(run.folder):
                said = (run.folder / "output.txt").read_text(errors="replace").strip()
                last = said.splitlines()[-1] if said else "it failed without any output"
                raise UserError(f"{run.label()}: {last} (full output: {run.folder / 'output.txt'})")
            tidy(run.folder, self.keep)
        return ended

    def train(self, run):
        """Train `run` with nothing else running."""
        self.offer(run)
        self.wait()

    def stop(self):
        """Let what is running finish its step, save and end, and wait for it."""
        for process, _ in self.running.values():
            process.send_signal(signal.SIGTERM)
        for process, _ in self.running.values():
            process.wait()
        self.running.clear()
