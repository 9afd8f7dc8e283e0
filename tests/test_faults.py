"""faults.py in small; in full it takes minutes, and is run by hand."""

import random
import sys

import pytest

from conftest import copy_repository

if sys.platform != "linux":
    pytest.skip("faults.py works on Linux only", allow_module_level=True)

import faults


def test_disturbed_it_is_the_undisturbed_run(tmp_path, monkeypatch):
    random.seed(1)
    monkeypatch.setattr(faults, "STEPS", 40)
    faults.try_faults(copy_repository(tmp_path / "repository"), "w2, m1", tmp_path / "runs", faults=1)
