"""Where else the numbers of a run go: TensorBoard, Weights & Biases, a picture."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

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
    """Return the numbers in log.jsonl: {(event/name, step): number}."""
    return {
        (f"{line['event']}/{name}", line["step"]): number
        for line in log_of(out)
        for name, number in line.items()
        if name != "step" and isinstance(number, (int, float))
    }


def test_tensorboard_has_what_the_log_has(repo):
    run = f"train.py {TINY} --out_dir=run --lr_decay=none --tensorboard"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    events = EventAccumulator("run").Reload()
    found = {(tag, event.step): event.value for tag in events.Tags()["scalars"] for event in events.Scalars(tag)}
    assert found == pytest.approx(numbers_of("run"), rel=1e-6)


def test_wandb_has_what_the_log_has(repo, monkeypatch):
    Path("wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(repo.folder)
    run = f"train.py {TINY} --out_dir=out/run --lr_decay=none --wandb"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    del sys.modules["wandb"]
    lines = [json.loads(line) for line in Path("wandb.jsonl").read_text().splitlines()]
    begun, numbers = ([line for line in lines if ("config" in line) == begins] for begins in (True, False))
    assert [(line["name"], line["config"]["n_layer"]) for line in begun] == [("run", 2)] * 2
    found = {(name, line["step"]): number for line in numbers for name, number in line.items() if name != "step"}
    assert found == numbers_of("out/run")


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed(repo, monkeypatch, capsys, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    error = refused(repo, f"train.py {TINY} --out_dir=run --{tracker}", capsys)
    assert f"this needs a package that is not installed: pip install {tracker}" in error


PLOT = str(ROOT / "tests" / "bench" / "plot.py")


def test_runs_in_one_picture(repo, capsys):
    """The operations of training until each evaluation, also where a run has resumed, and the loss."""
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
