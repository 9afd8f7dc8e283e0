"""Every entry of model.py's tables, and what somebody adds to them as in tests/EXTENDING.md, keeps every promise."""

import re
import shutil
import subprocess
import sys
from dataclasses import fields
from itertools import chain

import torch

import test_model
from conftest import ROOT, TINY, load
from cover import COVER, FEW
from cover import TINY as SHAPE
from model import GPTConfig
from test_model import build, over

PROMISES = [
    test_model.test_logits_and_gradients_equal_the_reference,
    test_model.test_the_future_does_not_move_the_past,
    test_model.test_no_tensor_of_T_by_T,
    test_model.test_cached_generation_equals_full_forwards,
    test_model.test_bfloat16_is_causal_and_near_the_reference,
]


def hold(**choice):
    torch.use_deterministic_algorithms(True)  # under which what torch.empty gives is not a number
    gpt = build(**choice, moved=False)
    torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in gpt.parameters()), "a parameter has no initial value"
    for promise in PROMISES:
        promise(choice)


@over(FEW)  # also those that the examples below add; test_model.py has every kind with every method
def test_every_entry_keeps_every_promise(row):
    hold(**row)


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


def test_the_examples_keep_every_promise_and_train(repo):
    shutil.copytree(ROOT / "tests", repo.folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "results"))
    apply(EXAMPLES, repo.folder)
    shown = python("-m", "pytest", "-n0", "-rA", "tests/test_extend.py", "-k", "entry")
    for name in ("unscaled", "m1.half"):
        assert re.search(rf"^PASSED.*keeps_every_promise.*{name}", shown, re.MULTILINE), shown
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    apply([("model.py", re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1])], repo.folder)
    python("train.py", *TINY.split(), "--attention=unscaled", "--residual=m1.half", "--out_dir=own")
    assert load("own/ckpt.pt")["config"].items() >= dict(attention="unscaled", residual="m1.half").items()
