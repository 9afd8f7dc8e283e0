"""Where else the numbers of a run go: TensorBoard, Weights & Biases, a picture."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config.runtime import run
from conftest import ROOT, TINY, error_of, log_of, refused

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

from plot import read_run

WANDB = """
import json
import sys

def init(**options):
    log({**options, "dir": str(options["dir"])}, step=None)
    return sys.modules[__name__]

def log(numbers, step):
    with open("wandb.jsonl", "a") as file:
        print(json.dumps({**numbers, "step": step}), file=file)
"""


def numbers_of(out):
    """Return what log.jsonl has of numbers: {(event/name, step): number}."""
    return {
        (f"{line['event']}/{name}", line["step"]): number
        for line in log_of(out)
        for name, number in line.items()
        if name != "step" and isinstance(number, (int, float))
    }


def scalars(folder):
    """Return what TensorBoard has, in the same form."""
    events = EventAccumulator(folder)
    events.Reload()
    return {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}


def test_tensorboard_has_what_the_log_has(repo):
    run = f"train.py {TINY} --out_dir=run --lr_decay=none --tensorboard"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    assert scalars("run") == pytest.approx(numbers_of("run"), rel=1e-6)


def test_wandb_has_what_the_log_has(repo, monkeypatch):
    Path("wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(repo.folder)
    run = f"train.py {TINY} --out_dir=out/run --lr_decay=none --wandb"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    del sys.modules["wandb"]
    lines = [json.loads(line) for line in Path("wandb.jsonl").read_text().splitlines()]
    first, second = (line for line in lines if "config" in line)
    assert first["name"] == second["name"] == "run"
    assert first["config"]["n_layer"] == 2
    found = {}
    for line in lines:
        if "config" not in line:
            step = line.pop("step")
            found |= {(name, step): number for name, number in line.items()}
    assert found == numbers_of("out/run")


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed(repo, monkeypatch, capsys, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    error = refused(repo, f"train.py {TINY} --out_dir=run --{tracker}", capsys)
    assert f"this needs a package that is not installed: pip install {tracker}" in error


# -- the picture ---------------------------------------------------------------------------------------------

PLOT = str(ROOT / "tests" / "bench" / "plot.py")


def test_runs_in_one_picture(repo, capsys):
    """Tokens, operations and minutes of training until each evaluation, also where a run has resumed."""
    run = f"train.py {TINY} --lr_decay=none"
    repo(f"{run} --out_dir=out/a")
    repo(f"{run} --out_dir=out/a --init_from=resume --max_iters=8")
    last = read_run(Path("out/a"))[-1]
    assert last["loss"] == log_of("out/a", "eval")[-1]["val_loss"]
    tokens = 8 * 2 * 16
    assert last["tokens"] == tokens
    assert last["flops"] == tokens * log_of("out/a", "start")[0]["flops_per_token"]
    speeds = [line["tokens_per_second"] for line in log_of("out/a", "step")]
    assert last["time"] == pytest.approx(sum(2 * 16 / speed / 60 for speed in speeds))

    repo(f"{run} --out_dir=out/deeper/b$_{{x$")
    for x, named in {
        "out --x=steps": "x = 'steps' is invalid: it must be one of tokens",
        "nowhere": "no evaluated run in: nowhere",
    }.items():
        assert named in error_of(repo, [PLOT, *x.split()], capsys)
    assert repo([PLOT, "out", "--x=time", "--out=both.svg"]).endswith("figure: both.svg\n")
    assert Path("both.svg").read_bytes().startswith(b"<?xml")


def test_the_version_is_that_of_all_code(repo, monkeypatch):
    monkeypatch.setattr(run, "ROOT", repo.folder)
    versions = [run.code_version()]
    names = ["model.py", "train.py", "config/__init__.py", "config/runtime/checks.py", "data/dataset.py"]
    for name in names:
        with open(name, "a") as file:
            print("# a comment", file=file)
        versions.append(run.code_version())
    Path("config/mine.py").write_text("n_layer = 4")  # is in the settings of a run
    assert run.code_version() == versions[-1]
    for before, after, name in zip(versions, versions[1:], names):
        assert [file for file in after["files"] if after["files"][file] != before["files"][file]] == [name]
