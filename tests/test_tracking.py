"""Where else the numbers of a run go: TensorBoard, Weights & Biases, a picture."""

import json
import sys
from itertools import count
from pathlib import Path

import pytest

from conftest import ROOT, TINY, error_of, log_of, refused, run_program

WANDB = '''
import json

def init(**options):
    with open("wandb.jsonl", "a") as file:
        print(json.dumps({**options, "dir": str(options["dir"])}), file=file)
    return Run()

class Run:
    id = "drawn"

    def log(self, numbers, step):
        with open("wandb.jsonl", "a") as file:
            print(json.dumps({"step": step, **numbers}), file=file)
'''


def numbers_of(out):
    """What log.jsonl has of numbers: {(event/name, step): number}."""
    return {
        (f"{line['event']}/{name}", line["step"]): number
        for line in log_of(out)
        for name, number in line.items()
        if name != "step" and isinstance(number, (int, float))
    }


def test_tensorboard_has_what_the_log_has(repo):
    from tensorboard.backend.event_processing import event_accumulator

    run = f"train.py {TINY} --out_dir=run --lr_decay=none --tensorboard"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    events = event_accumulator.EventAccumulator("run")
    events.Reload()
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
    starts = [line for line in lines if "name" in line]
    assert [(start["name"], start["id"], start["resume"]) for start in starts] == [("run", None, None), ("run", "drawn", "allow")]
    assert starts[0]["config"]["n_layer"] == 2
    found = {(name, line["step"]): number for line in lines if "name" not in line for name, number in line.items()}
    assert {key: number for key, number in found.items() if key[0] != "step"} == numbers_of("out/run")


def test_a_tracker_that_fails_does_not_end_the_run(repo, monkeypatch):
    Path("wandb.py").write_text(WANDB.replace("numbers, step):", "numbers, step):\n        1 / 0"))
    monkeypatch.syspath_prepend(repo.folder)
    output = repo(f"train.py {TINY} --out_dir=out/run --wandb")
    del sys.modules["wandb"]
    assert output.count("NOT TRACKED") == 1 and "Weights & Biases: division by zero; training goes on" in output
    assert log_of("out/run")[-1]["event"] == "end"


def test_a_tracker_that_does_not_start(repo, monkeypatch, capsys):
    Path("wandb.py").write_text("class UsageError(Exception):\n    pass\n\ndef init(**_):\n    raise UsageError('no account')\n")
    monkeypatch.syspath_prepend(repo.folder)
    error = error_of(repo, f"train.py {TINY} --out_dir=out/run --wandb", capsys)
    del sys.modules["wandb"]
    assert error == "train.py: error: Weights & Biases does not start: no account\n"


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed(repo, monkeypatch, capsys, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    error = refused(repo, f"train.py {TINY} --out_dir=run --{tracker}", capsys)
    assert f"{tracker} = True needs a package: pip install {tracker}" in error


# -- the picture ---------------------------------------------------------------------------------------------


@pytest.fixture
def plot(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        code = 0
        try:
            run_program(str(ROOT / "tests" / "bench" / "plot.py"), *arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run


def test_runs_in_one_picture(plot, repo, monkeypatch):
    monkeypatch.chdir(repo.folder)
    for out in ("out/a", "out/b$_{x$"):
        repo(f"train.py {TINY} --out_dir={out}")
    with open("out/a/log.jsonl", "a") as file:
        file.write('{"event": "st')  # it is being written
    for name in ("both.png", "both"):
        assert plot("out/a/log.jsonl", "out/b$_{x$/log.jsonl", f"--out={name}") == (0, f"{name}\n", "")
        assert Path(name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("content, named", [
    (None, "log.jsonl: No such file or directory"),
    ("", "log.jsonl: no step has been logged yet"),
    ("[]\n", "log.jsonl: not a log of train.py"),
    ('{"event": "step"}\n', "log.jsonl: not a log of train.py"),
    ('{"event": "step", "step": 1, "loss": {}}\n', "log.jsonl: not a log of train.py"),
    ("[" * 10**5 + "\n", "log.jsonl: not a log of train.py"),
    ("\udcff", "log.jsonl: not a log of train.py"),
], ids=count())  # fmt: skip
def test_a_log_that_cannot_be_drawn(plot, monkeypatch, content, named):
    if content is not None:
        Path("log.jsonl").write_text(content, errors="surrogateescape")
    monkeypatch.setitem(sys.modules, "matplotlib", sys)  # it is not come to
    code, _, error = plot("log.jsonl")
    assert code == 2 and error.count("\n") == 1 and named in error


def test_without_matplotlib(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    Path("log.jsonl").write_text('{"event": "step", "step": 1, "loss": 2.5}\n')
    assert "plotting needs matplotlib: pip install matplotlib" in plot("log.jsonl")[2]
