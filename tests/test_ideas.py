"""Every idea in tests/bench/ideas is an edit of model.py and of the reference, and keeps all that the tests promise."""

import shutil
import subprocess
import sys

import pytest

from conftest import ROOT
from test_extend import hold

IDEAS = sorted(path.stem for path in (ROOT / "tests" / "bench" / "ideas").glob("*.diff"))
ROWS = [
    dict(attention="standard", n_kv_head=2, activation_checkpointing=True),
    dict(attention="w2", sigma="diagonal", residual="m2", tie_weights=True),
    dict(attention="w2", w2_score="overlap", residual="m1"),
    dict(attention="summed_qk", qk_scale="5.5", residual="m3.2", keep_input=True, bias=True),
]


def apply(patch, folder):
    """Apply a diff to a copy of what the tests of model.py need."""
    for file in ("model.py", "tests", "config", "data"):
        source = ROOT / file
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results", "*.bin", "input.txt", "meta.json")
            shutil.copytree(source, folder / file, ignore=ignored)
        else:
            shutil.copy(source, folder)
    subprocess.run(["git", "apply", "--verbose", patch], cwd=folder, check=True)


@pytest.mark.parametrize("idea", IDEAS)
def test_an_idea_keeps_every_promise(idea, tmp_path):
    apply(ROOT / "tests" / "bench" / "ideas" / f"{idea}.diff", tmp_path)
    command = [sys.executable, "-c", "import test_ideas; test_ideas.hold_all()"]
    done = subprocess.run(command, cwd=tmp_path / "tests", capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def hold_all():
    """Hold the model.py of this folder to the promises, in a few settings."""
    for row in ROWS:
        hold(**row)


@pytest.mark.parametrize("idea", IDEAS)
def test_the_head_of_an_idea_has_its_formula_and_its_source(idea):
    head, _, diff = (
        (ROOT / "tests" / "bench" / "ideas" / f"{idea}.diff").read_text(encoding="utf-8").partition("\ndiff --git")
    )
    assert "\n    " in head and "Source: " in head
    added = [
        line for line in diff.partition("\ndiff --git")[0].splitlines() if line.startswith("+") and line[1:2] != "+"
    ]
    assert len(added) <= 45
