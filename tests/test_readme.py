"""What the README shows must work."""

import importlib
import re
import sys
from contextlib import suppress
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def test_snippet_runs(capsys):
    (snippet,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(snippet, {})
    assert capsys.readouterr().out == "torch.Size([2, 28])\n"


def test_files_it_names_exist():
    root = Path(__file__).resolve().parents[1]
    for name in re.findall(r"(?:config|data|tests)/\w+(?:/\w+)?\.(?:py|txt)\b", README):
        assert (root / name).exists() or name.endswith("/input.txt"), name


def test_its_runs_do_not_get_in_each_others_way():
    lines = [line.split("#")[0].strip() for line in README.splitlines() if re.match(" {4}.*train.py ", line)]
    commands = [line.split("train.py ")[1] for line in lines if not line.endswith("--help")]
    folders = []
    for command in commands:
        settings = dict(argument.removeprefix("--").split("=") for argument in command.split() if "=" in argument)
        configs = [Path(argument).stem for argument in command.split() if not argument.startswith("-")]
        folders.append(settings.get("out_dir") or "-".join(configs) or settings["dataset"])
    assert len(folders) > 10 and len(set(folders)) == len(folders), folders


def test_list_of_what_a_resumed_run_may_change():
    program = (Path(__file__).resolve().parents[1] / "train.py").read_text(encoding="utf-8")
    sets = "".join(re.findall(r"^MAY_CHANGE \|?= \{(.*)\}$", program, re.MULTILINE))
    listed = re.search(r"What may change: (.*)$", README, re.MULTILINE).group(1)
    assert sorted(re.findall(r"`(\w+)`", listed)) == sorted(re.findall(r'"(\w+)"', sets))


@pytest.mark.parametrize("name", ["methods", "recall", "entailment", "micro"])
def test_tables_are_those_of_the_results(name, monkeypatch, capsys):
    bench = Path(__file__).resolve().parent / "bench"
    monkeypatch.syspath_prepend(bench)
    experiment, sweep = importlib.import_module(name), importlib.import_module("sweep")
    monkeypatch.setattr(sys, "argv", [name, "--show", f"--out={bench / 'results'}"])
    with suppress(SystemExit):  # where not all of it has been run
        sweep.experiment(name, experiment.trial, experiment.main, "")
    rows = [line for line in capsys.readouterr().out.splitlines() if "±" in line]
    assert rows and all(row in README for row in rows)
