"""Where else the numbers of a run go: TensorBoard, Weights & Biases, a picture."""

import csv
import json
import sys
from dataclasses import asdict
from itertools import count
from pathlib import Path

import pytest

from config.runtime import log
from conftest import ROOT, TINY, log_of, refused, run_program
from config.runtime.common import UserError
from model import GPTConfig

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

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
    """Return what log.jsonl has of numbers: {(event/name, step): number}."""
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


SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 10, "vocab_size": 7}
START = {
    "event": "start", "step": 0, "parameters": 10, "flops_per_token": 1e4,
    "settings": {"batch_size": 2, "grad_accum_steps": 5, "block_size": 10, "max_iters": 40},
    "config": asdict(GPTConfig(**SHAPE)),
    "data": {"source": "a text", "vocab_size": 7, "sha256": "s", "tokenizer": {"kind": "char"}},
}  # fmt: skip


def write_log(folder, *evals, steps=(10, 20, 30, 40), end="", **changes):
    """Write a log by hand: 100 tokens per step, 1,000 per second; `evals` are validation losses."""
    lines = [START | changes]
    for i, step in enumerate(steps):
        lines.append({"event": "step", "step": step, "loss": 9.0, "tokens_per_second": 1000.0})
        if i < len(evals):
            losses = {"val_loss": evals[i], "train_loss": 1.0, "bits_per_byte": evals[i] / 2}
            lines.append({"event": "eval", "step": step} | losses)
        if step == 20:
            lines.append(START | changes | {"event": "resume", "step": 20})
    Path(folder).mkdir(parents=True)
    Path(folder, "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + end)


def test_runs_in_one_picture(plot, repo, monkeypatch):
    monkeypatch.chdir(repo.folder)
    for out in ("out/a", "out/b$_{x$"):
        repo(f"train.py {TINY} --out_dir={out}")
    with open("out/a/log.jsonl", "a") as file:
        file.write('{"event": "st')  # it is being written
    Path("out/other").mkdir()
    for name, x in (("both.png", "tokens"), ("both", "flops"), ("time.png", "time")):
        code, output, error = plot("out/a", "out/b$_{x$/log.jsonl", "out/other", f"--x={x}", f"--out={name}", "--train")
        assert (code, output.splitlines()[-1], error) == (0, f"picture: {name}", "")
        assert Path(name).read_bytes().startswith(b"\x89PNG")


def test_the_table(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    config, other = START["config"], START["data"] | {"sha256": "t"}
    write_log("out/a", 3.0, 2.0, 1.5, 1.6)
    write_log("out/b", 3.0, steps=(10, 20), end='{"ev', config=config | {"residual": "m1", "keep_input": True})
    write_log("out/c", steps=(10,), config=config | {"attention": "w2"})
    write_log("out/d", 1.2, data=other)
    code, output, error = plot("out/a", "out/b", "out/c", "out/d")
    rows = [line.split("   ") for line in output.splitlines()[1:5]]
    rows = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    flops = 1e4 * 4000
    assert (code, error) == (0, "") and [row[-1] for row in rows] == ["out/d", "out/a", "out/b", "out/c"]
    assert rows[1][:4] == ["standard", "2 × 16", "10", "4k"] and float(rows[1][4]) == pytest.approx(flops, rel=0.01)
    assert rows[1][5:8] == ["1,000", "1.5000 [2]", "0.7500"] and rows[0][6] == "1.2000 [1]"
    assert (rows[2][0], rows[2][3]) == ("m1 + input", "2k of 4k")
    assert (rows[3][0], rows[3][6:8]) == ("w2 (scalar σ)", ["-", "-"])
    assert "NOTE    a picture needs matplotlib: pip install matplotlib\n" in output


def test_settings_that_differ_and_means_over_seeds(plot, monkeypatch):
    """In the table, in a CSV file, and in the picture; runs lie at any depth."""
    best = {(3e-3, 1): 1.0, (3e-3, 2): 1.2, (3e-3, 3): 1.7, (1e-3, 1): 2.0, (1e-3, 2): 2.5, (1e-4, 1): 4.0}
    for (rate, seed), loss in best.items():
        settings = START["settings"] | {"learning_rate": rate, "seed": seed, "out_dir": f"{rate}-{seed}", "bias": False}
        write_log(f"out/compare/{rate}/{seed}", 5.0, loss, steps=(20, 40), settings=settings)
    code, output, _ = plot("out", "--csv=runs.csv")
    assert code == 0 and output.splitlines()[1].split()[:5] == ["method", "size", "learning_rate", "seed", "parameters"]
    with open("runs.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert {(float(row["learning_rate"]), int(row["seed"])): float(row["best_val_loss"]) for row in rows} == best
    assert {row["last_train_loss"] for row in rows} == {"1.0"} and "out_dir" in rows[0] and "bias" not in rows[0]

    code, output, _ = plot("out", "--group=seed", "--out=means.png")
    head, *rows, last = [line.split() for line in output.splitlines()]
    assert "seed" not in head and [row[4] for row in rows] == ["0.003", "0.001", "0.0001"]
    sd = (0.3**2 + 0.1**2 + 0.4**2) ** 0.5 / 2**0.5  # the mean is 1.3
    assert rows[0][-8:-4] == ["1.3000", "±", f"{sd:.4f}", "(3)"] and rows[2][-3:-1] == ["4.0000", "2.0000"]
    assert last == ["picture:", "means.png"] and Path("means.png").read_bytes().startswith(b"\x89PNG")
    code, _, error = plot("out", "--group=sed")
    assert code == 2 and "--group=sed: there is no such setting" in error


@pytest.mark.parametrize("content, named", [
    (None, "log.jsonl: No such file or directory"),
    ("", "log.jsonl: no run has been logged yet"),
    ("[]\n", "log.jsonl: not a log of train.py"),
    ('{"event": "step"}\n', "log.jsonl: not a log of train.py"),
    ('{"event": "start", "step": 0, "settings": {}}\n', "log.jsonl: not a log of train.py"),
    ("[" * 10**5 + "\n", "log.jsonl: not a log of train.py"),
    ("\udcff", "log.jsonl: not a log of train.py"),
], ids=count())  # fmt: skip
def test_a_log_that_cannot_be_drawn(plot, monkeypatch, content, named):
    if content is not None:
        Path("log.jsonl").write_text(content, errors="surrogateescape")
    monkeypatch.setitem(sys.modules, "matplotlib", sys)  # it is not come to
    code, _, error = plot("log.jsonl")
    assert code == 2 and error.count("\n") == 1 and named in error


def test_a_picture_that_was_asked_for_without_matplotlib(plot, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_log("a", 2.0)
    code, output, error = plot("a", "--out=a.png")
    assert code == 2 and "2.0000" in output and "a picture needs matplotlib: pip install matplotlib" in error


def test_the_version_is_that_of_all_code(repo, monkeypatch):
    monkeypatch.setattr(log, "ROOT", repo.folder)
    versions = [log.code_version()]
    for name in ("model.py", "train.py", "config/__init__.py", "config/runtime/checks.py", "data/dataset.py"):
        with open(name, "a") as file:
            print("# a comment", file=file)
        versions.append(log.code_version())
    Path("config/mine.py").write_text("n_layer = 4")  # is in the settings of a run
    assert log.code_version() == versions[-1]
    assert len({version["sha256"] for version in versions}) == 6 and len({version["model"] for version in versions}) == 2


def test_code_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "ROOT", tmp_path)
    with pytest.raises(UserError, match="model.py: No such file"):
        log.code_version()
