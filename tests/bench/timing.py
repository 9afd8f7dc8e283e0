"""Measure each variant's step time on this machine: short runs of train.py, the variants alternating."""

import json
import statistics
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from config.runtime.devices import machine_name, pick_compile
from config.runtime.files import atomic_write, sha256
from runs import Run, read_log

STEPS, LOOK = 24, 8  # steps of a run, and between its log lines
TURNS = 3  # runs of each candidate


class Timing:
    def __init__(self, comparison, steps=None):
        """Take what has been measured here before, or the committed `steps`."""
        self.comparison = comparison
        self.turns = 1 if comparison.quick else TURNS
        of = [machine_name(comparison.device), *((c.name, c.identity, c.settings) for c in comparison.candidates)]
        self.path = comparison.folder / f"timing-{sha256(json.dumps(of, sort_keys=True).encode())[:8]}.json"
        known = json.loads(self.path.read_text()) if self.path.exists() else steps
        self.seconds = known or {}  # by candidate, turn and log line

    def measure(self, workers):
        """Measure the missing step times, with nothing else running. If stopped, finished measurements are kept."""
        for turn in range(self.turns):
            for candidate in self.comparison.candidates:
                done = self.seconds.setdefault(candidate.name, [])
                if len(done) > turn:
                    continue
                print(f"measuring a step, {turn + 1} of {self.turns}: {candidate.name}", flush=True)
                done.append(self.measure_once(candidate, turn, workers))
                self.path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(self.path) as file:
                    file.write(json.dumps(self.seconds).encode())

    def measure_once(self, candidate, turn, workers):
        """Return the seconds per step, one for each log interval, of a run in a temporary folder."""
        with tempfile.TemporaryDirectory(prefix="timing-") as parent:
            run = self.short_run(candidate, turn, Path(parent), workers.threads)
            try:
                workers.train(run)
                lines = [line for line in read_log(run.folder) if line["event"] == "step"]
            finally:
                workers.stop()
        return [candidate.tokens_per_step / line["tokens_per_second"] for line in lines[1:]]  # one warms up

    def short_run(self, candidate, turn, parent, threads):
        settings = dict(candidate.settings)
        if settings["compile"] == "auto":  # as the whole run, with its number of threads, will choose
            flops = candidate.flops * torch.get_num_threads() / threads
            settings["compile"] = str(pick_compile(self.comparison.device, flops)).lower()
        settings |= {"max_iters": STEPS, "log_interval": LOOK, "eval_tokens": 1, "warmup_iters": 0, "eval_interval": 0}
        return Run(replace(candidate, settings=settings), 0.0, turn, 1.0, parent)  # a rate of 0 cannot diverge

    def is_known(self):
        return all(self.seconds.get(candidate.name) for candidate in self.comparison.candidates)

    def step(self, candidate):
        return statistics.median(second for turn in self.seconds[candidate.name] for second in turn)

    def ratio(self, candidate, other):
        """Return the ratio of two candidates' step times, and half its range over the turns."""
        turns = zip(self.seconds[candidate.name], self.seconds[other.name])
        ratios = [statistics.median(seconds) / statistics.median(others) for seconds, others in turns]
        return self.step(candidate) / self.step(other), (max(ratios) - min(ratios)) / 2

    def run_seconds(self, planned):
        return self.step(planned.candidate) * planned.candidate.settings["max_iters"] * planned.times
