"""Runs of train.py as processes of a comparison: failed, interrupted, side by side."""

import sys

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import runs
from config.runtime.devices import pick_device
from runs import Workers


class Printing:
    """A run whose process prints a text and fails."""

    def __init__(self, folder, text):
        self.folder, self.text = folder, text

    def command(self, device):
        return [sys.executable, "-c", f"print({self.text!r}); raise SystemExit(2)"]

    def label(self):
        return "a run"


def test_the_last_line_of_a_run_that_fails_is_told(tmp_path):
    workers = Workers(1, pick_device("cpu"))
    workers.offer(Printing(tmp_path, "Traceback ...\nTypeError: no"))
    with pytest.raises(ValueError, match=r"a run: TypeError: no \(full output: .*output.txt\)"):
        workers.wait()


def test_a_process_that_is_asked_to_end_has_not_failed(tmp_path, monkeypatch):
    workers = Workers(1, pick_device("cpu"))
    workers.offer(Printing(tmp_path, ""))
    ((process, *_),) = workers.running.values()
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: setattr(workers.signal, "number", 15) or process.wait())
    with pytest.raises(runs.Stopped):
        workers.wait()


def test_how_many_runs_at_a_time(monkeypatch):
    """Also where somebody has exported OMP_NUM_THREADS=1 to let runs share a machine: that is no wish for one run."""
    monkeypatch.setattr(runs.torch, "get_num_threads", lambda: 1)
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: range(6), raising=False)
    cpu = pick_device("cpu")
    assert [runs.runs_at_a_time(workers, cpu) for workers in (0, 2)] == [6, 2]
