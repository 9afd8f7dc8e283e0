"""What somebody adds to model.py's tables, as in tests/EXTENDING.md, is tested and trains."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import chain

from conftest import ROOT, TINY, load
from cover import COVER
from cover import TINY as SHAPE
from model import GPTConfig


def test_every_field_has_values():
    """... in cover.py. Dropout has tests of its own."""
    assert {field.name for field in fields(GPTConfig)} == {*chain(*COVER), *SHAPE, "dropout"}


PAGE = (ROOT / "tests" / "EXTENDING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^# (\S+)\n((?:[ +-].*\n)+)", PAGE, re.MULTILINE)


def apply(examples, folder):
    """Replace what stands behind a space or a minus by what stands behind a space or a plus, if it does not yet."""
    for file, diff in examples:
        lines = diff.splitlines(keepends=True)
        old, new = ("".join(line[1:] or line for line in lines if line[0] != sign) for sign in "+-")
        text = (folder / file).read_text(encoding="utf-8")
        if new not in text:
            assert text.count(old) == 1, f"{file}: {old}"
            (folder / file).write_text(text.replace(old, new), encoding="utf-8")


def python(*command):
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_examples_are_tested_and_train(repo):
    shutil.copytree(ROOT / "tests", repo.folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "results"))
    apply(EXAMPLES, repo.folder)
    shown = python("-m", "pytest", "-n0", "-rA", "tests/test_model.py", "-k", "unscaled-m1 or standard-m1.half")
    for test in ("equal_the_reference", "move_the_past", "tensor_of_T_by_T", "cached_generation", "bfloat16_is_causal"):
        for name in ("unscaled-m1", "standard-m1.half"):
            assert re.search(rf"^PASSED.*{test}.*{name}", shown, re.MULTILINE), shown
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    apply([("model.py", re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1])], repo.folder)
    python("train.py", *TINY.split(), "--attention=unscaled", "--residual=m1.half", "--out_dir=own")
    assert load("own/ckpt.pt")["config"].items() >= dict(attention="unscaled", residual="m1.half").items()
