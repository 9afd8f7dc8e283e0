"""tasks.py: its data is what it should be, it trains as train.py does, and it runs."""

import copy
import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import trainer
from conftest import ROOT
from model import GPT, GPTConfig

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import tasks


@pytest.fixture
def tables_of(tmp_path, monkeypatch, capsys):
    """A function that runs an experiment in small, and returns the lines of its tables."""
    for name, *small in (("copy", 7, 16), ("micro", 7, 16), ("entailment", 2, 64)):
        monkeypatch.setitem(tasks.TASKS, name, tasks.TASKS[name] | {"batch_size": 4, "steps": 2})
        shape = tasks.SHAPES[name] | dict(zip(("block_size", "vocab_size"), small))
        monkeypatch.setitem(tasks.SHAPES, name, shape)
    trial, known = tasks.trial, {}

    def once(run, device):
        """Other seeds and rates are taken to end as the first run of a model has."""
        model = json.dumps([run["task"], run["recipe"], run["model"]])
        known[model] = known.get(model) or trial(run, device)
        return known[model]

    monkeypatch.setattr(tasks, "trial", once)
    monkeypatch.setattr(tasks, "alternate", lambda one, other: 1)  # seconds differ from run to run
    monkeypatch.setattr(
        tasks, "search", lambda rates, losses_of: (rates[0], losses_of(rates))
    )  # equal rates have no best

    def run(*arguments):
        tasks.main([*arguments, "--device=cpu", f"--out={tmp_path}"])
        return [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]

    return run


@pytest.mark.parametrize("name, tables", [("recall", 2), ("entailment", 2), ("micro", 8)])
def test_an_interrupted_experiment_resumes(tables_of, tmp_path, name, tables):
    first, file = tables_of(name), tmp_path / f"{name}.json"
    assert sum("---" in row for row in first) == tables
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results[:-1]))  # as if it had been killed during the last run
    assert tables_of(name) == first and json.loads(file.read_text()) == results


# -- training ------------------------------------------------------------------------------------------------

SHAPE = {"block_size": 8, "vocab_size": 5, "n_layer": 1, "n_head": 2, "n_embd": 8}
RUN = {"steps": 20, "learning_rate": 0.1, "seed": 0, "model": SHAPE}


def data(run, step):
    x = torch.randint(5, (3, 8), generator=torch.Generator().manual_seed(step))
    return x, torch.where(torch.arange(8) % 3 == 0, -1, x.flip(0))


def train_fairly(model):
    """As tests/trainer.py does, which is held to train.py."""
    s = SimpleNamespace(learning_rate=0.1, warmup_iters=2, max_iters=20, min_lr_frac=0.1, lr_decay="cosine")
    s.beta1, s.beta2, s.weight_decay, s.dtype = 0.9, 0.99, 0.1, "float32"
    optimizer = trainer.Optimizer(s, model)
    for step in range(20):
        loss = trainer.token_losses(s, model, *data(RUN, step)).mean()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        norm = sum(g.square().sum() for g in gradients).sqrt()
        optimizer.step([g / max(1, norm) for g in gradients], trainer.learning_rate(s, step))


def train_with_plain_adamw(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(20):
        optimizer.zero_grad()
        model(*data(RUN, step))[1].backward()
        optimizer.step()


@pytest.mark.parametrize("recipe, train", [("fair", train_fairly), ("published", train_with_plain_adamw)])
def test_a_recipe_gives_the_weights_of_an_independent_loop(recipe, train):
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SHAPE))
    expected = copy.deepcopy(model)
    train(expected)
    tasks.fit(RUN | {"recipe": recipe}, model, data)
    for ours, theirs in zip(model.parameters(), expected.parameters()):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_published_models_have_the_published_size():
    cells = tasks.published_cells("recall").items()
    sizes = {name: GPT(GPTConfig(**cell["model"])).get_num_params() for name, cell in cells}
    assert sizes == {"standard": 492_000, "W2, distance": 278_856, "W2, overlap": 278_848}


def test_published_models_start_as_in_the_document():
    """Orthogonal; or with PyTorch's initial values, a uniform distribution, but 0.02 in W2's attention."""
    model = GPT(GPTConfig(**tasks.published_cells("base")["W2, overlap"]["model"]))
    tasks.initialize(model, "orthogonal")
    weight = model.blocks[0].attn.q_proj.weight
    torch.testing.assert_close(weight @ weight.T, torch.eye(64), rtol=0, atol=1e-5)
    tasks.initialize(model, "pytorch")
    block = model.blocks[0]
    assert block.attn.q_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.up_proj.weight.abs().max().item() == pytest.approx(64**-0.5, rel=0.01)


def test_memory_is_that_of_distinct_tensors_without_parameters():
    """One layer keeps what its formulas need, and twice as many sequences twice as much."""
    shape = {"block_size": 7, "vocab_size": 16, "n_layer": 1, "n_embd": 8, "n_head": 2, "n_inner": 8}
    run = {"model": shape, "seed": 0}
    one, two, wide = (
        tasks.memory(run | {"batch_size": size, "model": shape | changes}, torch.device("cpu"))["MB kept"]
        for size, changes in ((100, {}), (200, {}), (100, {"n_inner": 16}))
    )
    assert two == pytest.approx(2 * one, rel=0.01)
    assert wide - one == pytest.approx(4 * 8 * 100 * 7 * 4 / 1e6)  # gate, up, silu(gate), their product


# -- data ----------------------------------------------------------------------------------------------------


def test_copies():
    run = {"seed": 1, "batch_size": 3, "model": {"block_size": 9, "vocab_size": 50}}
    x, y = tasks.copies(run, 7)
    assert x.shape == y.shape == (3, 9) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y[:, 4:], x[:, :5])  # the last five targets are the first five tokens again
    assert torch.equal(tasks.copies(run, 7)[0], x) and not torch.equal(tasks.copies(run, 8)[0], x)


def test_tree():
    above = tasks.make_tree(np.random.default_rng(0), 300)
    assert len(above) <= 300 and not above.diagonal().any() and above[1:, 0].all()
    depth = above.sum(axis=1)
    parents = [(above[n] & (depth == depth[n] - 1)).nonzero()[0] for n in range(1, len(above))]
    assert all(len(parent) == 1 for parent in parents)
    for n, (parent,) in enumerate(parents, 1):
        assert (above[n] == above[parent] | (np.arange(len(above)) == parent)).all()
    assert max(np.bincount(np.concatenate(parents))) <= 4 and depth.max() <= 6
    assert len(tasks.make_tree(np.random.default_rng(0), 30)) == 30


def test_entailments():
    above = tasks.make_tree(tasks.random_numbers(5, tasks.UNSEEN), 200)
    sets = [set(map(tuple, part)) for split in tasks.pairs_of_tree(5, 200) for part in split]
    assert all(above[n, c] for n, c in sets[0] | sets[2]) and not any(above[n, c] for n, c in sets[1] | sets[3])
    assert not (sets[0] | sets[1]) & (sets[2] | sets[3])
    assert 0.08 < len(sets[2] | sets[3]) / sum(map(len, sets)) < 0.12

    run = {"seed": 5, "batch_size": 400, "model": {"vocab_size": 200}}
    for step, (positives, negatives) in ((3, sets[:2]), (tasks.SEEN, sets[:2]), (tasks.HELD_OUT, sets[2:])):
        x, y = tasks.entailments(run, step)
        yes, no = x[y[:, 1] == 1], x[y[:, 1] == 0]
        assert (y[:, 0] == -1).all() and len(yes) == len(no) == 200
        assert set(map(tuple, yes.tolist())) <= positives and set(map(tuple, no.tolist())) <= negatives


# -- rates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss, rates, expected, tried", [
    ({0.1: 3.0, 0.2: 2.0, 0.4: math.nan}.get, [0.4, 0.1, 0.2], 0.2, {0.1, 0.2, 0.4}),
    (lambda rate: abs(math.log2(rate)), [0.125, 0.25], 1, {0.125, 0.25, 0.5, 1, 2}),
])  # fmt: skip
def test_the_best_rate_has_worse_ones_on_both_sides(tmp_path, monkeypatch, loss, rates, expected, tried):
    """A run that has diverged is worse than any other."""
    monkeypatch.setattr(tasks, "trial", lambda run, device: {"loss": loss(run["learning_rate"]) + run["seed"]})
    sweep = tasks.Sweep("study", {"out": tmp_path, "device": "cpu"})
    ((one, other),) = sweep.tuned({"only": {"steps": 8}}, rates, [5, 6]).values()
    assert [one["run"], other["run"]] == [{"steps": 8, "learning_rate": expected, "seed": seed} for seed in (5, 6)]
    found = json.loads((tmp_path / "study.json").read_text())
    assert {result["run"]["learning_rate"] for result in found if result["run"]["seed"] == 0} == tried
    assert all((result["loss"] is None) == math.isnan(loss(result["run"]["learning_rate"])) for result in found)
