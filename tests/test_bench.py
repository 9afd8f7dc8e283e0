"""speed.py and tasks.py: what they measure is what they say, and they run, in small."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import speed
import tasks
from config import UserError
from conftest import log_of
from model import GPT, GPTConfig


def test_the_speed_of_all_variants(monkeypatch, capsys):
    monkeypatch.setattr(speed, "SHAPE", {"block_size": 64, "n_layer": 2, "n_head": 1, "n_embd": 16, "vocab_size": 65})
    monkeypatch.setattr(speed, "SECONDS", 0)
    speed.main(["--device=cpu"])
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    rows = [line.strip("| ").split(" | ") for line in lines[2:]]
    assert [row[0] for row in rows] == speed.VARIANTS and all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.parametrize("program, arguments, named", [
    (speed, ["--device=cpu", "deep: --n_layer=12 --batch_size=2"], "batch_size, n_layer"),  # another size
    (speed, ["kept: --residual=m1", "--nanogpt=nanoGPT"], "--residual=m1: leave variants out with --nanogpt"),
    (tasks, ["other"], "'other' is invalid: the experiment must be one of recall, entailment, micro"),
])  # fmt: skip
def test_mistakes_are_named(program, arguments, named):
    with pytest.raises(UserError, match=named):
        program.main(arguments)


NANOGPT = """
import torch
from dataclasses import dataclass

@dataclass
class GPTConfig:
    block_size: int = 1024
    vocab_size: int = 50304
    n_layer: int = 12
    n_embd: int = 768
    bias: bool = True

class GPT(torch.nn.Embedding):
    def __init__(self, config):
        super().__init__(config.vocab_size, config.vocab_size)
        self.config = config

    def forward(self, idx, targets=None):
        logits = super().forward(idx)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        return torch.optim.AdamW(self.parameters(), learning_rate, betas, weight_decay=weight_decay)

    def get_num_params(self, non_embedding=True):
        return self.weight.numel()
"""  # the parts of its model.py that programs call


def test_equal_seconds_next_to_nanogpt(repo, monkeypatch, capsys):
    """Train both by train.py: ours, half as fast, for half the steps. A later command takes the times of the first."""
    Path("nanoGPT").mkdir()
    Path("nanoGPT/model.py").write_text(NANOGPT)
    small = {"block_size": 16, "n_layer": 1, "n_head": 1, "n_embd": 16, "batch_size": 2}
    monkeypatch.setattr(speed, "SETTINGS", speed.SETTINGS | small)
    monkeypatch.setattr(speed, "STEPS", 6)
    train = speed.Comparison.train
    by_rate = lambda self, variant, rate, seed: train(self, variant, rate, seed) if seed else (abs(rate - 0.016), 0)
    monkeypatch.setattr(speed.Comparison, "train", by_rate)
    for ratio, *more in (2, "--seeds=0"), (3, "--seeds=1"):
        monkeypatch.setattr(speed, "alternate", lambda *steppers, ratio=ratio: [one() for one in steppers] and ratio)
        speed.main(["--nanogpt=nanoGPT", *more])
    runs, models = {}, json.loads(Path("out/nanogpt/nanogpt.json").read_text())["models"]
    for log in Path("out/nanogpt/runs").glob("*/log.jsonl"):
        (start,), (last,) = log_of(log.parent, "start"), log_of(log.parent, "eval")
        name = "standard" if "attention" in start["config"] else "nanoGPT's model"
        runs[name] = last["step"], start["settings"]["learning_rate"], [round(last["val_loss"], 4)]
    steps = {"nanoGPT's model": 6, "standard": 3}
    assert runs == {name: (steps[name], 0.016, model["losses"]) for name, model in models.items()}
    rates = ["0.002", "0.004", "0.008", "0.016", "0.032"]  # until the best is not at the edge
    assert all(list(model["tuning"]) == rates for model in models.values())
    assert "| standard | " in capsys.readouterr().out


# -- the W2 document's benchmarks ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", tasks.EXPERIMENTS)
def test_an_interrupted_experiment_resumes(monkeypatch, tmp_path, capsys, name):
    for task, *small in (("copy", 7, 16), ("micro", 7, 16), ("entailment", 2, 64)):
        monkeypatch.setitem(tasks.TASKS, task, {"batch_size": 4, "steps": 2})
        monkeypatch.setitem(tasks.SHAPES, task, dict(zip(("block_size", "vocab_size"), small), n_layer=1))
    monkeypatch.setattr(tasks, "alternate", lambda one, other: 1)  # seconds differ from run to run
    monkeypatch.setattr(tasks, "search", lambda rates, losses_of: (rates[0], losses_of(rates[:1])))

    def run():
        """Return the lines of the tables, and those of each run made."""
        tasks.main([name, "--device=cpu", f"--out={tmp_path}"])
        lines = capsys.readouterr().out.splitlines()
        return [[line for line in lines if line.startswith(mark)] for mark in "|{"]

    (tables, _), file = run(), tmp_path / f"{name}.json"
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results[:-1]))  # as if it had been killed during the last run
    again, (_,) = run()
    assert again == tables != [] and json.loads(file.read_text()) == results


def test_published_models_have_the_published_size():
    cells = tasks.published_cells("recall").items()
    sizes = {name: GPT(GPTConfig(**cell["model"])).get_num_params() for name, cell in cells}
    assert sizes == {"standard": 492_000, "W2, distance": 278_856, "W2, overlap": 278_848}


@pytest.mark.parametrize("kind", ["W2, distance", "W2, overlap"])
def test_mean_and_sigma_start_as_one_orthogonal_matrix(kind):
    model = GPT(GPTConfig(**tasks.published_cells("recall")[kind]["model"]))
    tasks.initialize(model, "orthogonal")
    for attn in [block.attn for block in model.blocks]:
        for mean, sigma in (attn.q_proj, attn.sigma_q), (attn.k_proj, attn.sigma_k):
            both = torch.cat((mean.weight, sigma.weight))
            assert both.shape == (128, 64) and torch.allclose(both.T @ both, torch.eye(64), atol=1e-5)


def test_a_rate_at_which_a_run_diverges_is_not_chosen(monkeypatch, tmp_path):
    losses = {0.4: math.nan, 0.2: 2.0, 0.1: 3.0}
    monkeypatch.setattr(tasks, "trial", lambda run, device: {"loss": losses[run["learning_rate"]] + run["seed"]})
    sweep = tasks.Sweep("study", {"out": tmp_path, "device": "cpu"})
    assert {run["run"]["learning_rate"] for run in sweep.tuned({"only": {}}, [0.1, 0.2, 0.4])["only"]} == {0.2}


def test_copies():
    run = {"seed": 1, "batch_size": 3, "model": {"block_size": 9, "vocab_size": 50}}
    x, y = tasks.copies(run, 7)
    assert x.shape == y.shape == (3, 9) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y[:, 4:], x[:, :5])  # the last five targets are the first five tokens again
    assert torch.equal(tasks.copies(run, 7)[0], x) and not torch.equal(tasks.copies(run, 8)[0], x)


def test_entailments():
    above = tasks.make_tree(tasks.random_numbers(5, tasks.UNSEEN), 200)
    depth = above.sum(axis=1)
    for n in range(1, len(above)):  # it descends from its parent, and from whatever that descends from
        (parent,) = (above[n] & (depth == depth[n] - 1)).nonzero()[0]
        assert (above[n] == above[parent] | (np.arange(len(above)) == parent)).all()
    assert not above[0].any()

    run = {"seed": 5, "batch_size": 400, "model": {"vocab_size": 200}}
    seen = {}
    for step in (3, tasks.SEEN, tasks.HELD_OUT):
        x, y = tasks.entailments(run, step)
        assert (y[:, 0] == -1).all() and y[:, 1].sum() == 200
        assert (torch.from_numpy(above)[x[:, 0], x[:, 1]] == y[:, 1]).all() and (x[:, 0] != x[:, 1]).all()
        seen[step] = set(map(tuple, x.tolist()))
    assert not seen[tasks.HELD_OUT] & (seen[3] | seen[tasks.SEEN])
