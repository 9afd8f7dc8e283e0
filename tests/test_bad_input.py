"""
What people mistype, and files that are damaged or not ours: one line that names the culprit, exit code 2, and no file
changed. The tables map an input to a regular expression for that line.
"""

import os
import re
import shutil
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

from config import read_settings
from conftest import ROOT, TINY, change_checkpoint, hear_signals, load, log_of, refused

TRAIN, LATEST, BEST = f"train.py {TINY}", Path("out/run/ckpt.pt"), Path("out/run/best.pt")
RESUME = f"{TRAIN} --out_dir=out/run --init_from=resume --max_iters=6"
SAMPLE = "sample.py --checkpoint=latest --num_samples=1 --max_new_tokens=2"


def check(run, command, words, capsys):
    error = refused(run, command, capsys)
    assert re.search(words, error), error


@pytest.fixture
def trained(repo):
    """Return the function `repo`, in a folder with a run in out/run."""
    repo(f"{TRAIN} --out_dir=out/run")
    return repo


# -- train.py's settings -------------------------------------------------------------------------------------

TRAIN_ARGUMENTS = {
    # ranges
    "--block_size=100000": "block_size.*100000 .* (287|288)",
    # choices
    "--init_from=gpt2": "init_from = 'gpt2' .*auto or run:FOLDER",
    "--device=cuda:99": "device = 'cuda:99' .*this machine has .*cpu",
    # folders and files
    "--init_from=resume": r"out/\S+/ckpt.pt: No such file",
    "--eval_only": r"out/\S+/best.pt: No such file",
    f"--seed={'9' * 210}": "too long",  # for a folder's name
    "--dtype=int8": "dtype = 'int8' .*bfloat16",
    "--lr_decay=cosin": "lr_decay = 'cosin' .*cosine",
    "--n_head=3 --dataset=shakespeare_bpe": "n_head = 3 .* divisor of n_embd = 16",  # and nothing is prepared
    "--init_from=run:out/nowhere --dataset=shakespeare_bpe": "out/nowhere/best.pt: No such file",
    "--out_dir=train.py/run": "train.py/run.*: Not a directory",
}


@pytest.mark.parametrize("arguments", TRAIN_ARGUMENTS)
def test_train_names_the_mistake(repo, capsys, arguments):
    check(repo, f"{TRAIN} {arguments}", TRAIN_ARGUMENTS[arguments], capsys)


def test_no_number_is_negative(repo, capsys):
    for name, value in read_settings(ROOT / "train.py", []).values.items():
        if type(value) in (int, float):
            check(repo, f"{TRAIN} --{name}=-1", f"{name} = -1(.0)? .* [01]", capsys)


def test_train_beside_a_run(trained, capsys):
    written = "out/run: no such config file; settings are written as"
    check(trained, f"{TRAIN} out/run", written, capsys)
    ways = "out/run already holds a run: .*--init_from=resume --out_dir=out/run.*--out_dir.*--init_from=scratch"
    check(trained, f"{TRAIN} --out_dir=out/run", ways, capsys)
    assert "out/run is at step 4, max_iters = 4: nothing left" in trained(f"{RESUME} --max_iters=4")
    for start in ("scratch", "auto"):
        for path in Path("out/run").glob("*.pt"):  # as in a run that was killed before its first checkpoint
            path.unlink()
        check(trained, RESUME, "out/run/ckpt.pt: No such file", capsys)
        trained(f"{TRAIN} --out_dir=out/run --init_from={start}")
        assert [line["step"] for line in log_of("out/run", "step")] == [1, 2, 3, 4]  # those of the first try are gone


def test_scratch_on_the_command_line_replaces_a_run(trained):
    change_checkpoint(BEST, best_val_loss=0.0)  # lower than any that follows
    trained(f"{TRAIN} --out_dir=out/run --init_from=scratch --max_iters=1 --n_layer=1")
    assert [load(path)["iter_num"] for path in (LATEST, BEST)] == [1, 1]
    assert [line["event"] for line in log_of("out/run")] == ["start", "step", "eval", "end"]


def test_scratch_in_a_config_file_does_not(trained, capsys):
    Path("config/mine.py").write_text("init_from = 'scratch'\n")
    check(trained, f"{TRAIN} config/mine.py --out_dir=out/run", "out/run already holds a run", capsys)


def test_a_run_that_starts_from_another_says_how_to_resume_it(trained, capsys):
    command = f"{TRAIN} --init_from=run:out/run"
    trained(command)
    error = refused(trained, command, capsys)
    resume = re.search("--init_from=resume --out_dir=[^ ,]+", error)[0]
    trained(f"{TRAIN} {resume} --max_iters=6")


# -- sample.py's ---------------------------------------------------------------------------------------------

SAMPLE_ARGUMENTS = {
    "--out_dir=out/nowhere": "out/nowhere/best.pt: No such file",
    "--checkpoint=worst": "checkpoint = 'worst' .*best or latest",
    "--start=é☃\u0301": r"'é' \(U\+00E9\), '☃' \(U\+2603\), .* \(U\+0301\)",  # the last one is an accent
    "--start=caf\udce9": r"'\\udce9'",  # a byte that is not UTF-8, as Python shows it
    "--start=FILE:out/run/ckpt.pt": "out/run/ckpt.pt: not UTF-8 text at byte",
    "--top_k=-3": "top_k = -3 .* at least 0",
    "config/m1_shakespeare.py": "config/m1_shakespeare.py: residual: unknown setting",
}


def test_sample_names_the_mistake(trained, capsys):
    for arguments, words in SAMPLE_ARGUMENTS.items():
        check(trained, f"sample.py {arguments}", words, capsys)
    shutil.rmtree("out")
    check(trained, "sample.py", "out/ holds no run: train one first", capsys)


@pytest.mark.parametrize("command, code, line", [
    ("sample.py --max_new_tokens=3000 | head -n 1", 0, ""),  # the reader leaves
])  # fmt: skip
def test_output_that_cannot_be_written(trained, command, code, line):
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    shell = ["bash", "-c", f"{sys.executable} {command}"]
    run = subprocess.run(shell, capture_output=True, text=True, env=buffered)
    assert (run.returncode, run.stderr) == (code, line)


@pytest.mark.parametrize("program", ["train.py", "sample.py"])
def test_ctrl_c_while_pytorch_is_imported_is_silent(repo, program):
    Path("torch.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    run = subprocess.run([sys.executable, program], capture_output=True, preexec_fn=hear_signals)
    assert (run.returncode, run.stdout + run.stderr) == (130, b"")


# -- checkpoints ---------------------------------------------------------------------------------------------

NO_CHECKPOINT = "ckpt.pt: damaged, or not a checkpoint of this version of train.py"


def test_a_damaged_checkpoint(trained, capsys):
    LATEST.write_bytes(LATEST.read_bytes()[:-1])
    change_checkpoint(BEST, iter_num=2)
    for command in (SAMPLE, RESUME):
        check(trained, command, NO_CHECKPOINT, capsys)
    LATEST.unlink()
    assert "steps   2 to 6" in trained(RESUME)


class Call:
    """What is a call of a function to whoever unpickles it."""

    def __reduce__(self):
        return os.system, ("touch marker",)


@pytest.mark.parametrize("other, words", [
    (lambda saved: saved["model"], NO_CHECKPOINT),
    (lambda saved: Call(), NO_CHECKPOINT),
    (lambda saved: saved | {"version": 9}, NO_CHECKPOINT),
], ids=count())  # fmt: skip
def test_a_checkpoint_of_another_program(trained, capsys, other, words):
    torch.save(other(load(LATEST)), LATEST)
    for command in (SAMPLE, RESUME):
        check(trained, command, words, capsys)


# -- slips in model.py, which people edit, are no bad input: their traceback stays -------------------------------

# what stands in model.py, what somebody makes of it, and a program that comes upon it
SLIPS = {
    "a wrong unpacking": ("x = self.embed(idx)", "B, T = self.embed(idx).shape", TRAIN),
    "in generating": ("x = self.embed(idx)", "x = self.embed(idx + 1000)", "sample.py"),
}


@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_shows_its_line(repo, slip):
    stands, put, program = SLIPS[slip]
    if program == "sample.py":
        repo(TRAIN)
    path = repo.folder / "model.py"
    before, _, after = path.read_text().partition(stands)
    path.write_text(before + put + after)
    number = before.count("\n")
    end = subprocess.run([sys.executable, *program.split()], capture_output=True, text=True)
    assert end.returncode == 1
    assert end.stderr.startswith("Traceback") and f'{path}", line {number + 1}, in' in end.stderr, end.stderr
