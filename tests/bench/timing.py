"""What a step of each candidate takes here: some steps of train.py, one candidate after the other, in turns."""

import json
import shutil
import statistics
import time
from dataclasses import replace

from config.runtime.common import machine_name, pick_compile
from data.files import atomic_write, sha256
from runs import Run, folder_name, read_log

STEPS, LOOK = 24, 8  # steps of a run, and between its log lines


class Timing:
    """Seconds of a step of each candidate, and of what comes before and after the steps, by the candidate's name."""

    def __init__(self, comparison, steps=None):
        """Take what has been measured here before, or `steps`."""
        self.comparison = comparison
        of = [machine_name(comparison.device), *(candidate.settings for candidate in comparison.candidates)]
        self.path = comparison.folder / f"timing-{sha256(json.dumps(of, sort_keys=True).encode())[:8]}.json"
        self.steps, self.start = steps, 0.0
        if self.path.exists():
            self.steps, self.start = json.loads(self.path.read_text())

    def measure(self, workers):
        """Measure, unless that has been done, with nothing beside what is measured."""
        if self.steps:
            return
        seconds = {candidate.name: [] for candidate in self.comparison.candidates}
        starts = []
        for turn in range(1 if self.comparison.quick else 2):
            for candidate in self.comparison.candidates:
                began = time.time()
                run = self.short_run(candidate, turn)
                workers.train(run)
                lines = [line for line in read_log(run.folder) if line["event"] == "step"][1:]  # the first is a warm-up
                seconds[candidate.name] += [candidate.tokens_per_step / line["tokens_per_second"] for line in lines]
                starts.append(time.time() - began - STEPS * statistics.median(seconds[candidate.name]))
        self.steps = {name: statistics.median(of_one) for name, of_one in seconds.items()}
        self.start = max(0.0, statistics.median(starts))
        shutil.rmtree(self.comparison.folder / "timing", ignore_errors=True)
        with atomic_write(self.path) as file:
            file.write(json.dumps([self.steps, self.start]).encode())

    def short_run(self, candidate, turn):
        device = self.comparison.device
        settings = dict(candidate.settings)
        if settings["compile"] == "auto":  # as the whole run will choose
            settings["compile"] = str(pick_compile(device, candidate.flops)).lower()
        settings |= {"max_iters": STEPS, "log_interval": LOOK, "eval_tokens": 1, "warmup_iters": 0, "eval_interval": 0}
        short = replace(candidate, settings=settings)
        run = Run(short, settings["learning_rate"], turn, 1.0, self.path)
        return replace(run, folder=self.comparison.folder / "timing" / folder_name(run.settings()))

    def seconds(self, planned):
        """Return the seconds that a planned run takes."""
        steps = planned.candidate.settings["max_iters"] * planned.times
        return self.start + self.steps[planned.candidate.name] * steps
