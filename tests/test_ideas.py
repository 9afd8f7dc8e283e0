"""Every idea in tests/bench/ideas is an edit of model.py and of the reference, and keeps all that the tests promise."""

import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from test_extend import hold

IDEAS = sorted((ROOT / "tests" / "bench" / "ideas").glob("*.diff"))
ROWS = [
    dict(attention="standard", n_kv_head=2, activation_checkpointing=True),
    dict(attention="w2", sigma="diagonal", residual="m2", tie_weights=True),
    dict(attention="w2", w2_score="overlap", residual="m1"),
    dict(attention="summed_qk", qk_scale="5.5", residual="m3.2", keep_input=True, bias=True),
]


@pytest.mark.parametrize("idea", IDEAS, ids=lambda path: path.stem)
def test_an_idea_keeps_every_promise(idea, tmp_path):
    """In a copy of what the tests of model.py need."""
    shutil.copy(ROOT / "model.py", tmp_path)
    ignored = shutil.ignore_patterns("__pycache__", "results", "*.bin", "input.txt", "meta.json")
    for folder in ("tests", "config", "data"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=ignored)
    subprocess.run(["git", "apply", "--verbose", idea], cwd=tmp_path, check=True)
    command = [sys.executable, "-c", "import test_ideas; test_ideas.hold_all()"]
    done = subprocess.run(command, cwd=tmp_path / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def hold_all():
    """Hold the model.py of this folder to the promises, in a few settings."""
    for row in ROWS:
        hold(**row)


@pytest.mark.parametrize("idea", IDEAS, ids=lambda path: path.stem)
def test_the_head_of_an_idea_has_its_formula_and_its_source(idea):
    head, of_model, *_ = idea.read_text(encoding="utf-8").split("\ndiff --git")
    assert "\n    " in head and "Source: " in head
    assert sum(line.startswith("+") and not line.startswith("++") for line in of_model.splitlines()) <= 45
