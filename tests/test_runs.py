"""Runs of train.py as processes of a comparison: side by side, interrupted, killed, and in use elsewhere."""

import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import runs
from config.runtime.common import pick_device
from runs import Workers


class Printing:
    """A run whose process prints a text and fails."""

    def __init__(self, folder, text, code=2):
        self.folder, self.text, self.code = folder, text, code

    def command(self, device):
        return [sys.executable, "-c", f"print({self.text!r}); raise SystemExit({self.code})"]

    def label(self):
        return "a run"


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path):
    """train.py ends with an exit code of its own, whatever is written to the same file."""
    workers = Workers(1, pick_device("cpu"))
    run = Printing(tmp_path, "step 210/400   loss 1.8", code=3)
    workers.offer(run)
    assert workers.wait() == [run] and workers.places == [0]
    workers.offer(run)
    assert not workers.running  # not now

    failing = Printing(tmp_path, "Traceback ...\nTypeError: no")
    workers.offer(failing)
    with pytest.raises(ValueError, match=r"a run: TypeError: no \(all that it printed: .*output.txt\)"):
        workers.wait()


def test_a_process_that_is_asked_to_end_has_not_failed(tmp_path, monkeypatch):
    workers = Workers(1, pick_device("cpu"))
    workers.offer(Printing(tmp_path, ""))
    ((process, *_),) = workers.running.values()
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: setattr(workers.signal, "number", 15) or process.wait())
    with pytest.raises(runs.Stopped):
        workers.wait()


class Slow(Printing):
    def command(self, device):
        return [sys.executable, "-c", "import time; time.sleep(1)"]


def test_a_process_that_is_slow_to_end_is_waited_for(tmp_path, monkeypatch):
    """Its log has ended before."""
    workers = Workers(1, pick_device("cpu"))
    monkeypatch.setattr(runs, "result_of", lambda folder: workers.asked_for)
    wait = workers.wait
    workers.asked_for, workers.wait = [], lambda: workers.asked_for.append("a result") or wait(seconds=0.2)
    workers.train(Slow(tmp_path, ""))
    assert not workers.running and workers.places == [0]


def test_how_many_runs_at_a_time(monkeypatch):
    """Also where somebody has exported OMP_NUM_THREADS=1 to let runs share a machine: that is no wish for one run."""
    monkeypatch.setattr(runs.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: range(6), raising=False)
    cpu = pick_device("cpu")
    assert [runs.runs_at_a_time(workers, cpu) for workers in (0, 2)] == [6, 2]
