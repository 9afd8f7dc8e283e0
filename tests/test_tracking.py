"""Where else the numbers of a run go: Weights & Biases, a picture."""

import json
import sys
import time
from pathlib import Path

import pytest

from conftest import ROOT, TINY, error_of, log_of, refused

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

from plot import read_run


def numbers_of(out):
    """Return the numbers in log.jsonl: {(event/name, step): number}."""
    return {
        (f"{line['event']}/{name}", line["step"]): number
        for line in log_of(out)
        for name, number in line.items()
        if name != "step" and isinstance(number, (int, float))
    }


@pytest.fixture
def wandb(monkeypatch, tmp_path):
    """Return the real Weights & Biases, which writes to files alone, and keeps to itself."""
    package = pytest.importorskip("wandb")
    monkeypatch.setenv("HOME", str(tmp_path))  # which has no key
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    yield package
    package.teardown()  # it has read the environment once for all


def wandb_numbers(path):
    """Return the numbers in a file of Weights & Biases, of up to 32 KiB: {(event/name, step): number}."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, at, numbers = path.read_bytes(), 7, {}
    while at < len(content):  # a record follows 7 bytes, of which the first 4 are a checksum and the next 2 its length
        start = at + 7
        at = start + int.from_bytes(content[at + 4 : at + 6], "little")
        history = Record.FromString(content[start:at]).history
        items = {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in history.item}
        numbers |= {(name, history.step.num): number for name, number in items.items() if name[0] != "_"}
    return numbers


def test_wandb_has_what_the_log_has_in_one_run(repo, wandb):
    """... also after it has resumed."""
    run = f"train.py {TINY} --out_dir=out/run --lr_decay=none --wandb"
    repo(f"{run} --max_iters=3")
    time.sleep(1)  # the package names folders by the second
    repo(f"{run} --max_iters=6 --init_from=resume")
    wandb.teardown()  # waits until all is written
    first, second = Path("out/run").glob("wandb/offline-run-*/run-*.wandb")
    assert first.name == second.name
    assert wandb_numbers(first) | wandb_numbers(second) == numbers_of("out/run")


def test_wandb_without_a_key(repo, wandb, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "online")
    error = error_of(repo, f"train.py {TINY} --out_dir=run --wandb", capsys)
    assert "error: wandb: No API key" in error and "set WANDB_MODE=offline\n" in error


def test_wandb_is_not_installed(repo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb", None)
    error = refused(repo, f"train.py {TINY} --out_dir=run --wandb", capsys)
    assert "this needs a package that is not installed: pip install wandb" in error


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
