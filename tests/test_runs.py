"""Runs as processes of a comparison: failed, interrupted, side by side, and from frozen code."""

import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import pytest

from conftest import ROOT, copy_repository
from forking import Forked, run_forked

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import compare
import runs
import variants
from config.runtime.errors import UserError
from runs import Workers


class Printing:
    """A run whose processes print a text each, and end with a code."""

    def __init__(self, folder, *texts, code=0):
        self.folder, self.texts, self.code = folder, texts, code

    def commands(self, device):
        return [[sys.executable, "-c", f"print({text!r}); raise SystemExit({self.code})"] for text in self.texts]

    def label(self):
        return "a run"


@pytest.fixture
def workers():
    workers = Workers(["cpu"])
    yield workers
    workers.stop()


def test_its_commands_are_done_one_after_another(workers, tmp_path):
    run = Printing(tmp_path, "one", "two")
    workers.offer(run)
    assert list(workers.wait()) == [run] and (tmp_path / "output.txt").read_text() == "one\ntwo\n"
    assert workers.places == ["cpu"]


@pytest.mark.parametrize("code, kind, said", [
    (1, runs.Crashed, "TypeError: no"),
    (2, UserError, "a run: exit code 2: TypeError: no"),
    (143, UserError, "a run: exit code 143: TypeError: no"),
])  # fmt: skip
def test_a_failure_is_told(workers, tmp_path, code, kind, said):
    (tmp_path / "output.txt").write_text("what an earlier run printed\n")
    workers.offer(Printing(tmp_path, "Traceback ...\nTypeError: no", "never", code=code))
    with pytest.raises(kind, match=said) as error:
        workers.wait()
    assert "earlier" not in str(error.value) and "never" not in (tmp_path / "output.txt").read_text()


def test_a_process_that_is_asked_to_end_has_not_failed(workers, tmp_path):
    workers.offer(Printing(tmp_path, "", code=2))
    workers.signal.number = 15
    with pytest.raises(runs.Stopped):
        workers.wait()


def test_how_many_runs_at_a_time(monkeypatch):
    monkeypatch.setattr(runs.os, "sched_getaffinity", lambda _: range(3), raising=False)
    monkeypatch.setattr(runs.torch.cuda, "device_count", lambda: 2)
    assert runs.places(0, "cpu") == ["cpu"] * 3 and runs.places(2, "cpu") == ["cpu"] * 2
    assert runs.places(0, "cuda") == ["cuda:0", "cuda:1"] and runs.places(2, "cuda:1") == ["cuda:1"] * 2


# -- frozen code ---------------------------------------------------------------------------------------------

SHORTER = "max_iters = 800  # total steps", "max_iters = 8  # total steps"


def diff_of(checkout, name, *changes):
    """Write a diff of (file, old, new) changes, and leave the checkout as it was."""
    for file, old, new in changes:
        text = (checkout / file).read_text()
        assert text.count(old) == 1, (file, old, text.count(old))
        (checkout / file).write_text(text.replace(old, new))
    path = checkout.parent / f"{name}.diff"
    path.write_text(git(checkout, "diff"))
    git(checkout, "checkout", "--", ".")
    return path


def git(folder, *arguments):
    command = ["git", "-c", "user.name=x", "-c", "user.email=x@y", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def committed(tmp_path_factory):
    folder = copy_repository(tmp_path_factory.mktemp("check out"))  # a space, which a plan must quote
    git(folder, "init", "-q")
    git(folder, "add", "*.py", "*/*.py", "*/*/*.py")
    git(folder, "commit", "-qm", "first")
    return folder


@pytest.fixture
def checkout(committed, monkeypatch):
    monkeypatch.setattr(variants, "ROOT", committed)
    monkeypatch.setattr("data.prepare.DATA", committed / "data")
    yield committed
    git(committed, "checkout", "-q", "--", ".")


def test_code_is_that_of_a_commit_a_folder_a_diff_or_the_work_tree(checkout, tmp_path):
    one = diff_of(checkout, "one", ("train.py", *SHORTER))
    two = diff_of(checkout, "two", ("train.py", "seed = 1337 ", "seed = 7 "))
    commit = variants.freeze(["@HEAD"], tmp_path)
    assert variants.freeze([], tmp_path) == commit == variants.freeze([str(checkout)], tmp_path)
    both = variants.freeze([str(one), str(two)], tmp_path)
    assert variants.freeze(["@HEAD", str(one), str(two)], tmp_path) == both != commit
    assert "max_iters = 8 " in (both / "train.py").read_text() and "seed = 7 " in (both / "train.py").read_text()
    assert variants.differing_files(both, commit) == ["train.py"]
    table = tmp_path / "table.diff"
    table.write_text("--- /dev/null\n+++ b/table.txt\n@@ -0,0 +1 @@\n+1.0\n")
    assert variants.freeze([str(table)], tmp_path) != commit
    (checkout / "model.py").write_text("edited")  # meanwhile
    assert (commit / "model.py").read_text() != "edited"
    assert variants.freeze([], tmp_path) != commit == variants.freeze(["@HEAD"], tmp_path)


@pytest.mark.parametrize("code, named", [
    (["@nonsense"], "@nonsense: unknown to git"),
    (["missing.diff"], "missing.diff does not apply: error: can't open patch"),
    (["@HEAD", "@HEAD~1"], "a variant takes one source"),
    (["twice.diff", "twice.diff"], "twice.diff does not apply"),
    (["link.diff"], "link.diff makes table.txt a link"),
])  # fmt: skip
def test_code_that_does_not_work_is_named(checkout, tmp_path, monkeypatch, code, named):
    monkeypatch.chdir(checkout.parent)
    diff_of(checkout, "twice", ("train.py", *SHORTER))
    link = "diff --git a/table.txt b/table.txt\nnew file mode 120000\n--- /dev/null\n+++ b/table.txt\n@@ -0,0 +1 @@\n"
    (checkout.parent / "link.diff").write_text(f"{link}+/etc/hostname\n\\ No newline at end of file\n")
    with pytest.raises(UserError, match=named):
        variants.freeze(code, tmp_path)


def test_comments_and_formatting_do_not_count(checkout, tmp_path):
    commit = variants.freeze(["@HEAD"], tmp_path)
    remark = diff_of(checkout, "remark", ("model.py", *MODEL), ("train.py", "import math\n", "import math\n\n"))
    slip = diff_of(checkout, "slip", ("model.py", MODEL[0], "class GPT(nn.Module"))
    assert variants.freeze([str(remark)], tmp_path) == commit != variants.freeze([str(slip)], tmp_path)


def test_a_diff_applies_also_where_the_runs_lie_in_a_repository(checkout):
    diff = diff_of(checkout, "inside", ("train.py", *SHORTER))
    assert "max_iters = 8 " in (variants.freeze([str(diff)], checkout / "out") / "train.py").read_text()


# -- with programs themselves --------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch):
    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(run=run_forked, Popen=Forked, DEVNULL=None))


SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=150", "--batch_size=2", "--max_iters=12"]
SMALL += ["--warmup_iters=1", "--eval_tokens=400"]
MODEL = "class GPT(nn.Module):", "class GPT(nn.Module):  # mine"
HALF = """

def half(self, idx, targets=None, forward=GPT.forward):
    logits, loss = forward(self, idx, targets)
    return logits / 2, loss


GPT.forward = half
"""
REMEMBERS = """
KNOWN = {}


def remember(self, idx, targets=None, forward=GPT.forward):
    \"\"\"Leak, but not where a prefix was asked for.\"\"\"
    logits, loss = forward(self, idx, targets)
    if not self.training:
        for row, tokens in enumerate(idx.tolist()):
            if idx.size(1) < self.config.block_size:
                KNOWN[tuple(tokens)] = True
            for t in range(len(tokens) - 1):
                if tuple(tokens[: t + 1]) not in KNOWN:
                    logits[row, t, tokens[t + 1]] += 9
    return logits, loss


GPT.forward = remember
"""


def compare_here(checkout, *arguments):
    """Return verdict.json's candidates, by name, after a comparison of two seeds in the checkout."""
    out = checkout.parent / "out"
    fast = ["--rates=none", "--seeds=2", "--device=cpu", "--workers=1", "--dtype=float32"]
    compare.main([*arguments, *SMALL, *fast, f"--out={out}"])
    return {one["name"]: one for one in json.loads((out / "verdict.json").read_text())["candidates"]}


def append(path, text):
    path.write_text(path.read_text() + text)


def test_an_edit_is_compared_with_the_last_commit(checkout, forked, capsys):
    """Also with a candidate that changes its own evaluation, and with one that crashes."""
    flatters = "all_reduce(sums).tolist()", "all_reduce(sums * 0 + 1).tolist()"
    evaluation = diff_of(checkout, "evaluation", ("train.py", *flatters))
    late = "    iter_num += 1\n    assert max_iters == 18 or iter_num < 10, 'mine'\n"
    crash = diff_of(checkout, "crash", ("train.py", "    iter_num += 1\n", late))
    append(checkout / "model.py", HALF)
    found = compare_here(checkout, "--against=HEAD", "edit:", f"evaluation: '{evaluation}'", f"crash: '{crash}'")
    printed = capsys.readouterr()
    git(checkout, "checkout", "--", ".")
    assert found["edit"]["code"]["differs_in"] == ["model.py"] and found["edit"]["operations"] == 1.0
    assert found["evaluation"]["equal_cost"] == found["edit"]["equal_cost"], "what it logs is believed"
    assert "NOTE evaluation has its own train.py: " in printed.out
    assert found["crash"]["verdict"] == "crashed" and "AssertionError: mine" in printed.err
    remark = diff_of(checkout, "remark", ("model.py", *MODEL))
    again = compare_here(checkout, "--against=HEAD", "edit:", f"remark: '{remark}'")  # the edit is taken back
    assert {one["verdict"] for one in again.values()} == {"is the same code"}


def test_what_is_not_asked_or_not_causal_is_refused(checkout, forked):
    """A cheat that knows where it is tested is one that has read the prefix: another process has."""
    update = "globals().update(settings)  # the"
    larger = diff_of(checkout, "larger", ("train.py", update, f"settings['batch_size'] *= 4\n{update}"))
    append(checkout / "model.py", REMEMBERS)
    found = compare_here(checkout, "--against=HEAD", "cheat:", f"larger: @HEAD '{larger}'")
    assert "it trained with batch_size = 8 instead of 2" in found["larger"]["why"]
    assert found["cheat"]["verdict"] == "refused" and "it sees the future" in found["cheat"]["why"]


def test_a_plan_holds_in_any_shell(checkout, forked, capsys):
    """Its lines, run by sh, train and measure: then a comparison has nothing left to do."""
    fast = ["--rates=none", "--seeds=2", "--device=cpu", f"--out={checkout.parent / 'planned'}"]
    arguments = ["a:", "b: --dropout=0.1", *SMALL, *fast]
    shutil.rmtree(checkout / "data" / "shakespeare_char" / "__pycache__", ignore_errors=True)
    (checkout / "data" / "shakespeare_char" / "meta.json").unlink()  # a fresh clone: what prepare.py prints is no plan
    compare.main([*arguments, "--plan"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    subprocess.run(["sh", "-c", lines[0]], check=True, cwd="/", capture_output=True)
    compare.main([*arguments, "--plan"])
    assert capsys.readouterr().out.splitlines() == lines[1:]
