"""The experiments: their data is what it should be, their statistics are right, and each runs, in small."""

import json
import math
import runpy
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import scipy.stats
import torch

import data
from config.runtime.common import report_error, use_plain_attention
from conftest import ROOT, TEXT, TINY, log_of

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import entailment
import methods
import recall
import run as all_of_them
import stats
import sweep


@pytest.fixture(autouse=True)
def restored():
    excepthook = sys.excepthook
    yield
    sys.excepthook = excepthook
    use_plain_attention(False)


def run_py(*arguments):
    command = [sys.executable, ROOT / "tests" / "bench" / "run.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


# -- each of them --------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch, capsys):
    """A function run(experiment, arguments) -> what it printed, in this process."""
    monkeypatch.setattr(sweep, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))

    def run(experiment, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{experiment}.py", *arguments])
        runpy.run_path(str(ROOT / "tests" / "bench" / f"{experiment}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("experiment", ["methods", "entailment", "micro"])
def test_in_small(tmp_path, repo, here, experiment):
    data.prepare(repo.folder / "data" / "shakespeare_bpe", TEXT, "test", "bpe", 300)  # that of characters is there
    output = here(experiment, "--quick", "--device=cpu", f"--out={tmp_path}")
    assert len(tables_of(output)) > 5
    for result in json.loads((tmp_path / f"{experiment}_quick.json").read_text()):
        if result["run"].get("task") != "cost":
            assert result["parameters"] > 0 and result["flops"] > 0 and result["seconds"] > 0
            assert {"seed", "learning_rate", "steps", "batch_size", "model", "recipe"} <= result["run"].keys()


def test_an_interrupted_experiment_goes_on(tmp_path, here):
    first = run_py("recall", "--quick", "--device=cpu", "--workers=2", f"--out={tmp_path}")
    assert first.returncode == 0, first.stderr
    file = tmp_path / "recall_quick.json"
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results[:-1]))  # as if it had been killed during the last run
    second = here("recall", "--quick", "--device=cpu", f"--out={tmp_path}")
    assert second.count(" left\n") == 1 and tables_of(second) == tables_of(first.stdout)
    again = json.loads(file.read_text())
    assert all({**new, "seconds": 0} == {**old, "seconds": 0} for new, old in zip(again, results))


def tables_of(output):
    return [line for line in output.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("arguments, named", [(["tempo"], "tempo"), ([], "methods, depth")])
def test_what_is_no_experiment_is_refused(arguments, named):
    done = run_py(*arguments)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and named in done.stderr


@pytest.mark.parametrize("argument, named", [
    ("--quik", "--quik"),
    ("--workers=0", "--workers=0"),
    ("--device=cuda:9", "cuda:9"),
    ("--quick", "recall_quick.json"),
])  # fmt: skip
def test_what_cannot_be_run_is_refused(tmp_path, monkeypatch, argument, named):
    damaged = tmp_path / "recall_quick.json"
    damaged.write_text("[{]")
    monkeypatch.setattr(sys, "argv", ["recall.py", argument, f"--out={tmp_path}"])
    with pytest.raises(ValueError, match=named):
        runpy.run_path(str(ROOT / "tests" / "bench" / "recall.py"), run_name="__main__")
    assert sys.excepthook is report_error
    assert damaged.read_text() == "[{]"


def test_all_of_them_are_there():
    for mode in all_of_them.MODES:
        assert (ROOT / "tests" / "bench" / f"{mode}.py").exists() and f"\n    {mode} " in all_of_them.__doc__


# -- training ------------------------------------------------------------------------------------------------


def test_it_trains_as_train_py_does(repo, monkeypatch):
    repo(f"train.py {TINY} --max_iters=20 --warmup_iters=2 --eval_interval=20 --residual=m1 --seed=3 --out_dir=run")
    expected = [line["val_loss"] for line in log_of("run") if "val_loss" in line]
    monkeypatch.setattr(methods, "dataset", lambda name: data.load_dataset(repo.folder / "data" / name))
    model = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16, "residual": "m1"}
    run = {"data": "shakespeare_char", "model": model, "batch_size": 2, "steps": 20, "eval_tokens": 64}
    result = methods.trial(run | {"recipe": "fair", "dtype": "auto", "learning_rate": 3e-3, "seed": 3})
    assert [result["loss"]] == pytest.approx(expected, rel=1e-6)  # losses are added up in another order


def test_published_recipe_is_plain_adamw():
    torch.manual_seed(0)
    models = [sweep.GPT(sweep.GPTConfig(8, 5, 1, 2, n_embd=8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    idx = torch.randint(5, (3, 8))
    sweep.fit({"steps": 3, "recipe": "published", "learning_rate": 0.1}, models[0], lambda step: (idx, idx))
    optimizer = torch.optim.AdamW(models[1].parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        models[1](idx, idx)[1].backward()
        optimizer.step()
    for ours, theirs in zip(models[0].parameters(), models[1].parameters()):
        torch.testing.assert_close(ours, theirs)


def test_equal_parameters():
    wide = {"n_layer": 2, "n_embd": 32, "n_head": 4, "attention": "w2", "sigma": "diagonal", "vocab_size": 10}
    like = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 10}
    both = sweep.with_parameters(wide, like), like
    counts = [sweep.GPT(sweep.GPTConfig(**settings)).get_num_params() for settings in both]
    assert abs(counts[0] - counts[1]) <= 3 * 32 * 2 // 2 + 1  # half a column of the MLPs


@pytest.mark.parametrize("which, parameters", [("standard", 492_000), ("W2, diagonal σ", 278_856)])
def test_published_models_have_the_published_size(which, parameters):
    settings = {"block_size": 127, "vocab_size": 1024, "n_layer": 2} | recall.PUBLISHED[which][0]
    assert sweep.GPT(sweep.GPTConfig(**settings)).get_num_params() == parameters


# -- data ----------------------------------------------------------------------------------------------------


def test_copies():
    run = {"seed": 1, "batch_size": 3, "model": {"block_size": 9, "vocab_size": 50}}
    x, y = recall.copies(run, 7)
    assert x.shape == y.shape == (3, 9) and torch.equal(x[:, 1:], y[:, :-1])
    assert torch.equal(y[:, 4:], x[:, :5])  # the last five targets are the first five tokens again
    assert torch.equal(recall.copies(run, 7)[0], x) and not torch.equal(recall.copies(run, 8)[0], x)


def test_queries():
    x, y = recall.queries({"seed": 1, "batch_size": 40, "pairs": 3, "model": {"block_size": 24, "vocab_size": 64}}, 0)
    for tokens, targets in zip(x.tolist(), y.tolist()):
        value_of = dict(zip(tokens[0:6:2], tokens[1:6:2]))
        asked = [t for t in range(24) if targets[t] >= 0]
        assert len(value_of) == 3 and min(asked) >= 6
        assert sorted(tokens[t] for t in asked) == sorted(value_of)  # each key once
        assert all(targets[t] == value_of[tokens[t]] for t in asked)
        assert all(key < 32 <= value for key, value in value_of.items())
    near = (y[:, 6:15] >= 0).sum()
    assert near > 0.6 * (y >= 0).sum()  # of 18 places the nearer half has most


def test_tree():
    above = entailment.make_tree(np.random.default_rng(0), 300)
    assert len(above) <= 300 and not above.diagonal().any() and above[1:, 0].all()
    depth = above.sum(axis=1)
    parents = [(above[n] & (depth == depth[n] - 1)).nonzero()[0] for n in range(1, len(above))]
    assert all(len(parent) == 1 for parent in parents)
    for n, (parent,) in enumerate(parents, 1):
        assert (above[n] == above[parent] | (np.arange(len(above)) == parent)).all()
    assert max(np.bincount(np.concatenate(parents))) <= 4 and depth.max() <= 6
    assert len(entailment.make_tree(np.random.default_rng(0), 30)) == 30


@pytest.mark.parametrize("balanced", [False, True])
def test_pairs(balanced):
    above = entailment.make_tree(sweep.random_numbers(5, entailment.TREE), 200)
    sets = [set(map(tuple, part)) for split in entailment.pairs(5, 200, balanced) for part in split]
    assert all(above[n, c] for n, c in sets[0] | sets[2]) and not any(above[n, c] for n, c in sets[1] | sets[3])
    assert not (sets[0] | sets[1]) & (sets[2] | sets[3])
    held_out = len(sets[2] | sets[3]) / sum(map(len, sets))
    assert 0.08 < held_out < 0.12

    x, y = entailment.draw(np.random.default_rng(0), *entailment.pairs(5, 200, balanced)[1], 400, balanced)
    yes, no = x[y[:, 0] == 1], x[y[:, 0] == 0]
    assert set(map(tuple, yes.tolist())) <= sets[2] and set(map(tuple, no.tolist())) <= sets[3]
    assert torch.equal(yes[:, 1], no[:, 1]) == balanced and len(yes) == len(no) == 200


# -- statistics ----------------------------------------------------------------------------------------------


def results(*losses, flops=1.0):
    return [{"loss": loss, "flops": flops, "run": {"seed": seed}} for seed, loss in enumerate(losses)]


def test_two_methods_compare_as_in_a_paired_t_test():
    one, other = np.array([1.0, 2.0, 4.0, 3.5]), np.array([1.2, 2.1, 4.4, 3.6])
    ((difference, half, p),) = stats.differences({"one": results(*one), "other": results(*other)}).values()
    expected = scipy.stats.ttest_rel(other, one)
    assert [difference, p] == pytest.approx([np.mean(other - one), expected.pvalue])
    assert [difference - half, difference + half] == pytest.approx(list(expected.confidence_interval(0.95)))


def test_a_seed_that_is_hard_for_all_is_no_noise():
    groups = {"a": results(1.0, 5.0, 9.0), "b": results(1.1, 5.1, 9.1), "c": results(2.0, 6.1, 9.9)}
    found = stats.differences(groups)
    assert list(found) == ["b", "c"] and found["b"][0] == pytest.approx(0.1) and found["c"][0] == pytest.approx(1.0)
    assert found["c"][2] < 0.001 < found["b"][1] < 0.2


def test_holm():
    assert stats.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )


def test_a_difference_in_words():
    groups = {"standard": results(1.0, 1.1, 1.2), "worse": results(2.0, 2.11, 2.2), "lost": results(None, 1.0, 1.0)}
    texts = stats.compare(groups)
    assert texts["standard"] == "" and texts["lost"] == "diverged"
    assert texts["worse"].startswith("+1.003 ± ") and texts["worse"].endswith(" worse")
    assert stats.in_words(0.1, 0.2, 0.3) == "+0.100 ± 0.200"
    assert stats.in_words(0.2, 0.1, 0.01, higher_is_better=True) == "+0.200 ± 0.100 better"


@pytest.fixture
def curve():
    """Of a model that comes to 4 - ln C + (ln C)²/10, and of two that come as far as that with 2 and with 20, at a cost of 3."""

    def ladder(flops):
        exact = 4 - math.log(flops) + math.log(flops) ** 2 / 10
        return results(exact + 0.001, exact - 0.001, exact, flops=flops)

    runs = [result for flops in (1.0, 2.0, 4.0, 8.0) for result in ladder(flops)]
    others = {"other": 2.0, "far": 20.0}
    groups = {name: [result | {"flops": 3.0} for result in ladder(flops)] for name, flops in others.items()}
    return stats.CostCurve(runs, groups)


def test_a_method_is_compared_with_the_curve_at_its_cost(curve):
    difference, half, p = curve.differences()["other"]
    exact = math.log(3) - math.log(2) + (math.log(2) ** 2 - math.log(3) ** 2) / 10
    assert difference == pytest.approx(exact) and half < 0.01 and p < 0.05


def test_what_a_method_is_worth(curve):
    worth, low, high = curve.equal_cost("other")
    assert worth == pytest.approx(2, rel=0.01) and 1.9 < low < worth < high < 2.1
    assert curve.equal_cost("far")[0] == math.inf  # beyond the longest run


def test_a_slope():
    change, half = stats.slope([(1, 3.0, 0.1, 5), (2, 2.0, 0.1, 5), (3, 1.0, 0.1, 5)])
    assert change == pytest.approx(-1) and half == pytest.approx(scipy.stats.t.ppf(0.975, 15) * 0.1 / math.sqrt(2))


@pytest.fixture
def study(tmp_path, monkeypatch):
    """A Sweep whose runs come to study.loss(run) at once."""
    monkeypatch.setattr(sys, "argv", ["x", f"--out={tmp_path}", "--device=cpu"])
    study = sweep.Sweep("study", None, "", lambda parser: None)
    study.pool.shutdown()

    class Pool:
        def submit(self, trial, run):
            future = Future()
            future.set_result({"loss": study.loss(run)})
            return future

    study.pool = Pool()
    return study


def test_the_learning_rate_is_chosen_among_what_did_not_diverge(study):
    of_rate = {0.1: 3.0, 0.2: 2.0, 0.4: math.nan}
    study.loss = lambda run: of_rate[run["learning_rate"]] + run["seed"]
    cells = {"only": {"steps": 8, "model": {}}}
    ((one, other),) = study.tuned(cells, [0.4, 0.1, 0.2], [5, 6], shorter=2, tuning_seeds=[0]).values()
    assert [result["run"] for result in (one, other)] == [
        {"steps": 8, "model": {}, "learning_rate": 0.2, "seed": seed} for seed in (5, 6)
    ]
    kept = json.loads(study.path.read_text())
    names = "learning_rate", "seed", "steps"
    found = {tuple(result["run"][name] for name in names): result["loss"] for result in kept}
    assert found == {(0.4, 0, 4): None, (0.1, 0, 4): 3, (0.2, 0, 4): 2, (0.2, 5, 8): 7, (0.2, 6, 8): 8}


def test_rates_are_tried_until_the_best_has_worse_ones_on_both_sides(study):
    study.loss = lambda run: abs(math.log2(run["learning_rate"])) + run["seed"]  # best at 1
    ((one,),) = study.tuned({"only": {"steps": 8, "model": {}}}, [0.125, 0.25], [5]).values()
    assert one["run"]["learning_rate"] == 1
    tried = {result["run"]["learning_rate"] for result in study.done.values()}
    assert tried == {0.125, 0.25, 0.5, 1, 2}
