"""Weights & Biases gets the numbers in log.jsonl, and a picture is drawn of them."""

import sys
from pathlib import Path
from types import SimpleNamespace

from conftest import ROOT, TINY, error_of, log_of, refused

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

from plot import read_run

PLOT = str(ROOT / "tests" / "bench" / "plot.py")


class Pretended:
    """What train.py uses of the package: it keeps the calls."""

    Error = ConnectionError

    def __init__(self):
        self.started, self.numbers = [], {}

    def init(self, name, config, dir, id="first", resume=None):
        self.started.append((name, id, resume))
        folder = Path(dir, "wandb", f"offline-run-{len(self.started)}-{id}")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"run-{id}.wandb").touch()
        return SimpleNamespace(log=self.log, finish=lambda: None)

    def log(self, numbers, step):
        self.numbers |= {(name, step): number for name, number in numbers.items()}


def test_wandb_has_what_the_log_has_in_one_run(repo, monkeypatch):
    """... also after it has resumed."""
    wandb = Pretended()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    run = f"train.py {TINY} --out_dir=out/run --lr_decay=none --wandb"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    assert wandb.started == [("run", "first", None), ("run", "first", "allow")]
    assert wandb.numbers == {
        (f"{line['event']}/{name}", line["step"]): number
        for line in log_of("out/run")
        for name, number in line.items()
        if name != "step" and isinstance(number, (int, float))
    }


def test_wandb_without_a_key(repo, monkeypatch, capsys):
    def init(*_, **__):
        raise ConnectionError("No API key.")

    wandb = Pretended()
    wandb.init = init
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    command = f"train.py {TINY} --out_dir=run --lr_decay=none"
    error = error_of(repo, f"{command} --wandb", capsys)
    assert "error: wandb: No API key" in error and "set WANDB_MODE=offline\n" in error
    repo(command)
    assert refused(repo, f"{command} --wandb --max_iters=6 --init_from=resume", capsys) == error  # its log stays


def test_wandb_is_not_installed(repo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = refused(repo, f"train.py {TINY} --out_dir=run --wandb", capsys)
    assert "this needs a package that is not installed: pip install wandb" in error


def test_runs_in_one_picture(repo, capsys):
    """The FLOPs of training until each evaluation, also where a run has resumed, and the loss."""
    run = f"train.py {TINY} --lr_decay=none"
    repo(f"{run} --out_dir=out/a")
    repo(f"{run} --out_dir=out/a --init_from=resume --max_iters=8")
    (*_, operations), (*_, loss) = read_run(Path("out/a"))
    assert loss == log_of("out/a", "eval")[-1]["val_loss"]
    assert operations == 8 * 2 * 16 * log_of("out/a", "start")[0]["flops_per_token"]

    repo(f"{run} --out_dir=out/deeper/b$_{{x$")
    assert "no evaluated run in: nowhere" in error_of(repo, [PLOT, "nowhere"], capsys)
    assert repo([PLOT, "out", "--out=both.svg"]).endswith("figure: both.svg\n")
    assert Path("both.svg").read_bytes().startswith(b"<?xml")
