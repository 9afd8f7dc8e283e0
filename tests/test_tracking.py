"""Where else the numbers of a run go: TensorBoard, Weights & Biases, a picture."""

import json
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from config.runtime import log
from conftest import ROOT, TINY, error_of, log_of, refused, run_program

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

from plot import read_run

WANDB = """
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


def test_tensorboard_keeps_the_old_curve_until_a_run_is_replaced(repo, capsys):
    run = f"train.py {TINY} --out_dir=run --tensorboard"
    repo(f"{run} --max_iters=6")
    old = scalars("run")
    error_of(repo, f"{run} --overwrite --learning_rate=1e38 --warmup_iters=0", capsys)
    assert scalars("run") == old
    repo(f"{run} --overwrite --max_iters=3")
    assert scalars("run") == pytest.approx(numbers_of("run"), rel=1e-6)


def test_wandb_has_what_the_log_has(repo, monkeypatch):
    Path("wandb.py").write_text(WANDB)
    monkeypatch.syspath_prepend(repo.folder)
    run = f"train.py {TINY} --out_dir=out/run --lr_decay=none --wandb"
    repo(f"{run} --max_iters=3")
    repo(f"{run} --max_iters=6 --init_from=resume")
    del sys.modules["wandb"]
    lines = [json.loads(line) for line in Path("wandb.jsonl").read_text().splitlines()]
    starts = [line for line in lines if "name" in line]
    begun = [(start["name"], start["id"], start["resume"]) for start in starts]
    assert begun == [("run", None, None), ("run", "drawn", "allow")]
    assert starts[0]["config"]["n_layer"] == 2
    found = {(name, line["step"]): number for line in lines if "name" not in line for name, number in line.items()}
    assert {key: number for key, number in found.items() if key[0] != "step"} == numbers_of("out/run")


def test_a_tracker_that_fails_does_not_end_the_run(repo, monkeypatch):
    Path("wandb.py").write_text(WANDB.replace("numbers, step):", "numbers, step):\n        1 / 0"))
    monkeypatch.syspath_prepend(repo.folder)
    output = repo(f"train.py {TINY} --out_dir=out/run --wandb")
    del sys.modules["wandb"]
    assert output.count("NOT TRACKED") == 1 and "wandb: division by zero; training continues" in output
    assert log_of("out/run")[-1]["event"] == "end"


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


START = {
    "event": "start", "step": 0, "parameters": 10, "flops_per_token": 1e4, "machine": "cpu", "code": {},
    "settings": {"batch_size": 2, "grad_accum_steps": 5, "block_size": 10, "max_iters": 40},
    "data": {"source": "a text", "vocab_size": 7, "sha256": "s", "tokenizer": {"kind": "char"}},
}  # fmt: skip


def write_log(folder, *evals):
    """Write a log by hand: 100 tokens per step, 1,000 per second; `evals` are validation losses."""
    lines = [START]
    for step, loss in zip((10, 20, 30, 40), evals):
        lines.append({"event": "step", "step": step, "loss": 9.0, "tokens_per_second": 1000.0})
        losses = {"val_loss": loss, "train_loss": 1.0, "bits_per_byte": loss / 2}
        lines.append({"event": "eval", "step": step} | losses)
        if step == 20:
            lines.append(START | {"event": "resume", "step": 20})
    Path(folder).mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    Path(folder, "log.jsonl").write_text(text + '{"event": "st')  # it is being written


def test_runs_in_one_picture(plot):
    write_log("out/a", 3.0, 2.0)
    write_log("out/deeper/b$_{x$", 3.0)
    code, output, error = plot("out", "--x=time", "--out=both.svg", "--train")
    assert (code, output.splitlines()[-1], error) == (0, "picture: both.svg", "")
    assert Path("both.svg").read_bytes().startswith(b"<?xml")


def test_what_is_drawn(tmp_path):
    """Tokens, operations and minutes of training until each evaluation, also where a run has resumed."""
    write_log(tmp_path / "run", 3.0, 2.0, 1.5, 1.6)
    evals = read_run(tmp_path / "run")["evals"]
    assert [one["loss"] for one in evals] == [3.0, 2.0, 1.5, 1.6]
    assert [evals[-1][name] for name in ("tokens", "flops", "time")] == pytest.approx([4000, 4e7, 4 / 60])


def test_what_cannot_be_drawn(plot):
    write_log("log", 2.0)
    for arguments, named in {
        ("log", "--x=steps"): "x = 'steps' does not work: it must be one of tokens",
        ("empty",): "no run has been evaluated in empty",
    }.items():
        code, _, error = plot(*arguments)
        assert code == 2 and error.count("\n") == 1 and named in error


def test_the_version_is_that_of_all_code(repo, monkeypatch):
    monkeypatch.setattr(log, "ROOT", repo.folder)
    versions = [log.code_version()]
    names = ["model.py", "train.py", "config/__init__.py", "config/runtime/checks.py", "data/dataset.py"]
    for name in names:
        with open(name, "a") as file:
            print("# a comment", file=file)
        versions.append(log.code_version())
    Path("config/mine.py").write_text("n_layer = 4")  # is in the settings of a run
    assert log.code_version() == versions[-1]
    assert len({version["sha256"] for version in versions}) == 6
    for before, after, name in zip(versions, versions[1:], names):
        assert [file for file in after["files"] if after["files"][file] != before["files"][file]] == [name]
