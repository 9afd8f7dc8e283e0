"""Lets the tests import the programs, wherever pytest is started from, and run them in a copy of the repository."""

import json
import os
import runpy
import shutil
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests are parallel enough

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import data
from config import use_plain_attention

TINY = "--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --batch_size=2 --max_iters=4 --warmup_iters=2"
TINY += " --sample_tokens=5 --eval_tokens=64 --log_interval=1 --eval_interval=2 --device=cpu"
TEXT = "the quick brown fox jumps over the lazy dog.\nand again, the dog sleeps!\n" * 40


def copy_repository(folder, text=TEXT):
    """A copy of the programs, with a short text in the place of Shakespeare, prepared by characters."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "sample.py", "model.py"):
        shutil.copy(ROOT / name, folder)
    made = shutil.ignore_patterns("*.bin", "*.json", "*.tiktoken", "input.txt", "parts", "__pycache__")
    shutil.copytree(ROOT / "data", folder / "data", ignore=made)
    (folder / "data" / "shakespeare_char" / "input.txt").write_text(text)
    (folder / "data" / "shakespeare_bpe" / "input.txt").write_text(text)
    data.prepare(folder / "data" / "shakespeare_char", text, "test")
    return folder


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return copy_repository(tmp_path_factory.mktemp("original"))


@pytest.fixture
def repo(original, tmp_path, monkeypatch, capsys):
    """A function run(command) -> what it printed, in a fresh copy of the repository that is the current folder."""
    folder = tmp_path / "repo"
    shutil.copytree(original, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(data.preprocess, "DATA", folder / "data")
    locked, file_lock = [], data.file_lock
    for module in (data, data.files):
        monkeypatch.setattr(module, "file_lock", lambda file, wait=False: locked.append(file) or file_lock(file, wait))

    def run(command):
        program, *arguments = command.split(" ") if isinstance(command, str) else command
        monkeypatch.setattr(sys, "argv", [program, *arguments])
        path, excepthook = sys.path[:], sys.excepthook
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit:
            raise
        except BaseException:  # as Python would; the programs' own excepthook raises a SystemExit
            sys.excepthook(*sys.exc_info())
            raise
        finally:  # as the end of a process would
            sys.path, sys.excepthook = path, excepthook
            for file in locked:
                file.close()
            use_plain_attention(False)
        return capsys.readouterr().out

    run.folder = folder
    return run


def refused(run, command, capsys):
    """The one line of error that `command` ends with, having changed no file."""
    before = contents(run.folder)
    with pytest.raises(SystemExit) as end:
        run(command)
    error = capsys.readouterr().err
    assert end.value.code == 2
    assert error.count("\n") == 1, error
    assert contents(run.folder) == before
    return error


def contents(folder):
    """Of every folder None, of every file its bytes."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in str(path)]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def same(a, b):
    """Whether two parts of checkpoints are equal to the last bit."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def log_of(folder):
    return [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
