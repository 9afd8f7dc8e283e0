"""What a step of each candidate takes here: some steps of train.py, one candidate after the other, in turns."""

import json
import shutil
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from config.runtime.common import UserError, atomic_write, machine_name, pick_compile, sha256
from runs import Run, read_log

STEPS, LOOK = 24, 8  # steps of a run, and between its log lines


class Timing:
    """Seconds of a step of each candidate, and of what comes before and after the steps, by the candidate's name."""

    def __init__(self, comparison, steps=None):
        """Take what has been measured here before, or `steps`."""
        self.comparison = comparison
        of = [machine_name(comparison.device), *((c.name, c.settings) for c in comparison.candidates)]
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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        parent = Path(tempfile.mkdtemp(prefix="timing-", dir=self.path.parent))  # another comparison may measure too
        try:
            for turn in range(1 if self.comparison.quick else 2):
                for candidate in self.comparison.candidates:
                    began = time.time()
                    run = self.short_run(candidate, turn, parent, workers.threads)
                    workers.train(run)
                    lines = [line for line in read_log(run.folder) if line["event"] == "step"]
                    if len(lines) < 2:
                        raise UserError(f"{candidate.name}: has diverged before step {STEPS}, at learning rate 0")
                    per_second = [line["tokens_per_second"] for line in lines[1:]]  # the first is a warm-up
                    seconds[candidate.name] += [candidate.tokens_per_step / tokens for tokens in per_second]
                    starts.append(time.time() - began - STEPS * statistics.median(seconds[candidate.name]))
        finally:
            workers.stop()
            shutil.rmtree(parent, ignore_errors=True)
        self.steps = {name: statistics.median(of_one) for name, of_one in seconds.items()}
        self.start = max(0.0, statistics.median(starts))
        with atomic_write(self.path) as file:
            file.write(json.dumps([self.steps, self.start]).encode())

    def short_run(self, candidate, turn, parent, threads):
        settings = dict(candidate.settings)
        if settings["compile"] == "auto":  # as the whole run will choose
            settings["compile"] = str(pick_compile(self.comparison.device, candidate.flops, threads)).lower()
        settings |= {"max_iters": STEPS, "log_interval": LOOK, "eval_tokens": 1, "warmup_iters": 0, "eval_interval": 0}
        return Run(replace(candidate, settings=settings), 0.0, turn, 1.0, parent)  # at no rate does it diverge

    def seconds(self, planned):
        """Return the seconds that a planned run takes."""
        steps = planned.candidate.settings["max_iters"] * planned.times
        return self.start + self.steps[planned.candidate.name] * steps
