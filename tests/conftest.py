"""Lets the tests import the programs, wherever pytest is started from, and run them in a copy of the repository."""

import json
import os
import re
import runpy
import shutil
import signal
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the tests are parallel enough
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test asks a network for a dataset; before datasets is imported

import hypothesis
import pytest
import torch
from torch.utils._pytree import keystr, tree_leaves_with_path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from config import file_lock
from data import prepare as preparing

TINY = "--n_layer=2 --n_head=2 --n_embd=16 --block_size=16 --batch_size=2 --max_iters=4 --warmup_iters=2"
TINY += " --eval_tokens=64 --log_interval=1 --eval_interval=2 --device=cpu"
HANDLED = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGPIPE
TEXT = "the quick brown fox jumps over the lazy dog.\nand again, the dog sleeps!\n" * 40
BOTTLES = "".join(f"{i} green bottles, hanging on the wall; if {i} fell: 'twas Ünglück 瓶子!\n" for i in range(60))

hypothesis.settings.register_profile("patient", deadline=None)  # no example is too slow on a busy machine
hypothesis.settings.load_profile("patient")


# -- running the programs ------------------------------------------------------------------------------------


def copy_repository(folder):
    """Copy the programs, with a short text instead of Shakespeare, prepared by characters."""
    shutil.copytree(ROOT / "config", folder / "config", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train.py", "sample.py", "model.py"):
        shutil.copy(ROOT / name, folder)
    made = lambda folder, names: [name for name in names if not name.endswith(".py") and Path(folder, name).is_file()]
    shutil.copytree(ROOT / "data", folder / "data", ignore=made)
    for name in ("shakespeare_char", "shakespeare_bpe"):
        (folder / "data" / name / "input.txt").write_text(TEXT)
    prepare(folder / "data" / "shakespeare_char", TEXT, "test")
    return folder


def prepare(folder, text, source, tokenizer="char", vocab_size=1024, val_fraction=0.1):
    """Prepare a text, whose end is for validation."""
    preparing.prepare(Path(folder), *preparing.split_end([text], val_fraction), source, tokenizer, vocab_size)


def shrink(*programs):
    """Make the options of TINY the defaults of programs or config files, so that no command needs to give them."""
    for path in map(Path, programs):
        text = path.read_text().replace("compile = True", "compile = False")
        for name, value in re.findall(r"--(\w+)=(\w+)", TINY):
            text = re.sub(rf"^{name} = \S+", f"{name} = {value if value.isdigit() else repr(value)}", text, flags=re.M)
        path.write_text(text)


def run_program(program, *arguments):
    """Run a program in this process as if it ran in a separate one. Raise SystemExit if it fails."""
    files = []  # that are locked until a process ends

    def lock(file):
        files.append(file)
        return file_lock(file)

    with pytest.MonkeyPatch.context() as patch:  # what is set here is as before at the end
        patch.setattr("config.runtime.file_lock", lock)
        patch.setattr(sys, "argv", [program, *arguments])
        patch.setattr(sys, "path", sys.path[:])
        patch.setattr(sys, "excepthook", sys.excepthook)
        try:
            runpy.run_path(program, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        except BaseException:  # as Python would; the programs' own excepthook raises a SystemExit
            sys.excepthook(*sys.exc_info())
            raise
        finally:  # what the end of a process undoes
            for file in files:
                file.close()


@pytest.fixture(autouse=True)
def restored():
    """Give every signal its handler back: a program changes them for its process."""
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def hear_signals():
    """Undo what nohup, or a shell that starts the tests in the background, makes its processes ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    return copy_repository(tmp_path_factory.mktemp("original"))


@pytest.fixture
def repo(original, tmp_path, monkeypatch, capsys):
    """Return a function run(command) -> what it printed, in a fresh copy of the repository, the current folder."""
    folder = tmp_path / "repo"
    shutil.copytree(original, folder)
    monkeypatch.chdir(folder)
    monkeypatch.setattr("data.prepare.DATA", folder / "data")

    def run(command):
        run_program(*(command.split(" ") if isinstance(command, str) else command))
        return capsys.readouterr().out

    run.folder = folder
    return run


def error_of(run, command, capsys):
    """Return the one line of error that `command` ends with."""
    with pytest.raises(SystemExit) as end:
        run(command)
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1, error
    return error


def refused(run, command, capsys):
    """Return the one line of error that `command` ends with, having changed no file."""
    before = contents(run.folder)
    error = error_of(run, command, capsys)
    assert contents(run.folder) == before
    return error


# -- what they leave -----------------------------------------------------------------------------------------


def contents(folder):
    """Return {path: bytes} of every file below a folder, {path: None} of every folder."""
    paths = [path for path in folder.rglob("*") if "__pycache__" not in str(path)]
    return {path: path.read_bytes() if path.is_file() else None for path in paths}


def load(path):
    return torch.load(path, weights_only=True)


def change_checkpoint(path, **changes):
    torch.save(load(path) | changes, path)


def log_of(folder, event=None):
    """Return the lines of a run's log, of one event if asked."""
    lines = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if event in (None, line["event"])]


def progress(folder):
    """Return the steps and the evaluations in a run's log, without what depends on the clock."""
    lines = [line for line in log_of(folder) if line.pop("event") in ("step", "eval")]
    return [{name: value for name, value in line.items() if name != "tokens_per_second"} for line in lines]


def differences(path, expected):
    """Return the names of everything that differs between two checkpoints, except settings and commit."""
    a, b = (dict(tree_leaves_with_path(load(file) | {"settings": None, "commit": None})) for file in (path, expected))
    return [keystr(name) for name in a.keys() | b.keys() if not (name in a and name in b and same(a[name], b[name]))]


def same(a, b):
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b
