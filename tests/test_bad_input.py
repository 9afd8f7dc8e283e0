"""
What people mistype, and files that are damaged or not ours: one line that names the culprit, exit code 2, and no file
changed. The tables map an input to a regular expression for that line.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from config import read_settings
from conftest import ROOT, TINY, change_checkpoint, load, log_of, refused

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
    "--block_size=100000": "block_size.*100000 .* 2592",
    "--init_from=gpt2": "init_from = 'gpt2' .*auto or run:FOLDER",
    "--device=cuda:99": "device = 'cuda:99' .*this machine has .*cpu",
    "--init_from=resume": r"out/\S+ holds no checkpoint",
    "--eval_only": r"out/\S+ holds no checkpoint",
    "--dtype=int8": "dtype = 'int8' .*bfloat16",
    "--lr_decay=cosin": "lr_decay = 'cosin' .*cosine",
    "--n_head=3 --dataset=shakespeare_bpe": "n_head = 3 .* divisor of n_embd = 16",  # and nothing is prepared
    "--init_from=run:out/no\nwhere --dataset=shakespeare_bpe": "out/no where holds no checkpoint",
    "--out_dir=train.py/run": "train.py/run.*: Not a directory",
    f"--out_dir={'x' * 300}": "x.*: File name too long",
}

POSITIVE = "batch_size gradient_accumulation_steps max_iters checkpoint_interval eval_tokens log_interval n_layer"


@pytest.mark.parametrize("arguments", TRAIN_ARGUMENTS)
def test_train_names_the_mistake(repo, capsys, arguments):
    check(repo, f"{TRAIN} {arguments}", TRAIN_ARGUMENTS[arguments], capsys)


def test_no_number_is_negative(repo, capsys):
    for name, value in read_settings(ROOT / "train.py", []).values.items():
        if type(value) in (int, float):
            check(repo, f"{TRAIN} --{name}=-1", f"{name} = -1(.0)? .* [01]", capsys)
    for name in POSITIVE.split(" "):
        check(repo, f"{TRAIN} --{name}=0", f"{name} = 0 .* at least 1", capsys)


def test_train_beside_a_run(trained, capsys):
    written = "out/run: no such config file; settings are written as"
    check(trained, f"{TRAIN} out/run", written, capsys)
    ways = "out/run already holds a run: .*--init_from=resume --out_dir=out/run.*--out_dir.*--init_from=scratch"
    check(trained, f"{TRAIN} --out_dir=out/run", ways, capsys)
    for start in ("scratch", "auto"):
        for path in Path("out/run").glob("*.pt"):
            path.unlink()
        check(trained, RESUME, "out/run holds no checkpoint", capsys)
        ways = "out/run already holds a run: choose another folder .*--init_from=scratch"  # which has been evaluated
        check(trained, f"{TRAIN} --out_dir=out/run --init_from=auto", ways, capsys)
        log = Path("out/run/log.jsonl")  # as of a run that was killed before its first checkpoint
        log.write_bytes(b"".join(log.read_bytes().splitlines(keepends=True)[:2]))
        trained(f"{TRAIN} --out_dir=out/run --init_from={start}")
        assert [line["step"] for line in log_of("out/run", "step")] == [1, 2, 3, 4]  # those of the first try are gone


def test_scratch_replaces_a_run_if_typed(trained, capsys):
    Path("config/mine.py").write_text("init_from = 'scratch'\n")
    check(trained, f"{TRAIN} config/mine.py --out_dir=out/run", "out/run already holds a run", capsys)
    change_checkpoint(BEST, best_val_loss=0.0)  # lower than any that follows
    trained(f"{TRAIN} --out_dir=out/run --init_from=scratch --max_iters=1 --n_layer=1")
    assert [load(path)["iter_num"] for path in (LATEST, BEST)] == [1, 1]
    assert [line["event"] for line in log_of("out/run")] == ["start", "step", "eval", "end"]


# -- sample.py's, and checkpoints ----------------------------------------------------------------------------

SAMPLE_ARGUMENTS = {
    "--out_dir=out/nowhere": "out/nowhere holds no checkpoint",
    "--checkpoint=worst": "checkpoint = 'worst' .*best or latest",
    "--start=é☃\u0301": r"'é' \(U\+00E9\), '☃' \(U\+2603\), .* \(U\+0301\)",  # the last one is an accent
    "--start=caf\udce9": r"'\\udce9'",  # a byte that is not UTF-8, as Python shows it
    "--start=FILE:out/run/ckpt.pt": "out/run/ckpt.pt: not UTF-8 text at byte",
    "--top_k=-3": "top_k = -3 .* at least 0",
    "--num_samples=0": "num_samples = 0 .* at least 1",
    "config/m1_shakespeare.py": "config/m1_shakespeare.py: residual: unknown setting",
}


def test_sample_names_the_mistake(trained, capsys):
    for arguments, words in SAMPLE_ARGUMENTS.items():
        check(trained, f"sample.py {arguments}", words, capsys)
    shutil.rmtree("out")
    check(trained, "sample.py", "out/ holds no run: train one first", capsys)


def test_a_reader_may_leave(trained):
    shell = ["bash", "-c", f"{sys.executable} sample.py | head -n 1"]
    assert subprocess.run(shell, capture_output=True, check=True).stderr == b""


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


def test_a_checkpoint_of_another_program(trained, capsys):
    saved = load(LATEST)
    for other in (saved["model"], Call(), saved | {"version": 9}):
        torch.save(other, LATEST)
        for command in (SAMPLE, RESUME):
            check(trained, command, NO_CHECKPOINT, capsys)


# -- slips in model.py, which people edit, are no bad input: their traceback stays -------------------------------


@pytest.mark.parametrize("program", [TRAIN, "sample.py"])
def test_a_slip_shows_its_line(repo, program):
    if program == "sample.py":
        repo(TRAIN)
    path = repo.folder / "model.py"
    before, _, after = path.read_text().partition("x = self.embed(idx)")
    path.write_text(f"{before}x = self.embed(idx + 1000){after}")
    number = before.count("\n")
    end = subprocess.run([sys.executable, *program.split()], capture_output=True, text=True)
    assert end.returncode == 1
    assert end.stderr.startswith("Traceback") and f'{path}", line {number + 1}, in' in end.stderr, end.stderr
