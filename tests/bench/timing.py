"""How long a step of each variant takes on this machine: short runs of train.py, the variants alternating."""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from config.runtime.devices import machine_name, pick_compile
from config.runtime.errors import file_errors
from config.runtime.files import atomic_write, sha256
from runs import Run, read_log

STEPS, LOOK = 24, 8  # steps of a run, and between its log lines
TURNS = 3  # runs of each variant
SPREAD = 0.02  # by how much the ratio of two step times differs between sessions, at least
OVERHEAD = 15  # seconds that a run takes beside its steps: imports, evaluations, saving
SPEED = 3e10  # operations a second, where nothing has been measured


class Timing:
    def __init__(self, folder, device):
        self.device = device
        self.path = folder / f"times-{sha256(machine_name(device).encode())[:8]}.json"
        self.seconds = json.loads(self.path.read_text()) if self.path.exists() else {}  # by variant: of each turn
        self.ended = []  # (seconds of all steps, seconds that it took) of the runs that have ended

    def measure(self, variants, workers):
        """Measure the missing step times, with nothing else running. If stopped, finished measurements are kept."""
        for turn in range(TURNS):
            for variant in variants:
                done = self.seconds.setdefault(key_of(variant), [])
                if len(done) > turn:
                    continue
                print(f"measuring a step, {turn + 1} of {TURNS}: {variant.name}", flush=True)
                done.append(self.measure_once(variant, turn, workers))
                with file_errors(), atomic_write(self.path) as file:
                    file.write(json.dumps(self.seconds).encode())

    def measure_once(self, variant, turn, workers):
        """Return the seconds per step of a run in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="timing-") as parent:
            run = self.short_run(variant, turn, Path(parent), workers.threads)
            try:
                workers.offer(run)
                workers.wait()
                lines = [line for line in read_log(run.folder) if line["event"] == "step"]
            finally:
                workers.stop()
        return variant.tokens_per_step / statistics.median(line["tokens_per_second"] for line in lines[1:])

    def short_run(self, variant, turn, parent, threads):
        settings = dict(variant.settings)
        if settings["compile"] == "auto":  # as the whole run, with its number of threads, will choose
            flops = variant.flops * torch.get_num_threads() / threads
            settings["compile"] = str(pick_compile(self.device, flops)).lower()
        settings |= {"max_iters": STEPS, "log_interval": LOOK, "eval_tokens": 1, "warmup_iters": 0, "eval_interval": 0}
        return Run(replace(variant, settings=settings), 0.0, turn, STEPS, parent)  # a rate of 0 cannot diverge

    def is_known(self, variants):
        return all(self.seconds.get(key_of(variant)) for variant in variants)

    def step(self, variant):
        known = self.seconds.get(key_of(variant))
        return statistics.median(known) if known else variant.flops_per_token * variant.tokens_per_step / SPEED

    def ratio(self, variant, other):
        """Return the ratio of two variants' step times, and its relative uncertainty."""
        turns = [a / b for a, b in zip(self.seconds[key_of(variant)], self.seconds[key_of(other)])]
        ratio = self.step(variant) / self.step(other)
        return ratio, max(SPREAD, (max(turns) - min(turns)) / 2 / ratio)

    def learn(self, run, seconds):
        self.ended.append((self.step(run.variant) * run.steps, seconds))

    def run_seconds(self, run):
        """Return how long a run will take: from those that have ended, which also import and evaluate."""
        steps = self.step(run.variant) * run.steps
        if not self.ended:
            return steps + OVERHEAD
        return steps * sum(seconds for _, seconds in self.ended) / sum(ideal for ideal, _ in self.ended)


def key_of(variant):
    return sha256(json.dumps([variant.identity, variant.settings], sort_keys=True).encode())[:16]
