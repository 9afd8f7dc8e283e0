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

from config.runtime.common import UserError, report_error, use_plain_attention
from conftest import ROOT
from model import rope_table
from reference import set_log_tau

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import entailment
import recall
import run as all_of_them
import stats
import tasks
import why

CPU = torch.device("cpu")


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
    """Return a function run(experiment, arguments) -> what it printed, in this process."""
    monkeypatch.setattr(tasks, "ProcessPoolExecutor", lambda *_: ThreadPoolExecutor(1))

    def run(experiment, *arguments):
        monkeypatch.setattr(sys, "argv", [f"{experiment}.py", *arguments])
        runpy.run_path(str(ROOT / "tests" / "bench" / f"{experiment}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("experiment", ["entailment", "micro"])
def test_in_small(tmp_path, here, experiment):
    output = here(experiment, "--quick", "--device=cpu", f"--out={tmp_path}")
    assert len(tables_of(output)) > 5
    for result in json.loads((tmp_path / f"{experiment}_quick.json").read_text()):
        if result["run"].get("task") != "cost":
            assert result["parameters"] > 0 and result["flops"] > 0 and result["seconds"] > 0
            assert {"seed", "learning_rate", "steps", "batch_size", "model", "recipe"} <= result["run"].keys()


def test_an_interrupted_experiment_goes_on(tmp_path, here):
    first = run_py("recall", "--quick", "--device=cpu", "--workers=1", f"--out={tmp_path}")
    assert first.returncode == 0, first.stderr
    file = tmp_path / "recall_quick.json"
    results = json.loads(file.read_text())
    file.write_text(json.dumps(results[:-1]))  # as if it had been killed during the last run
    second = here("recall", "--quick", "--device=cpu", f"--out={tmp_path}")
    assert second.count(" left\n") == 1 and tables_of(second) == tables_of(first.stdout)
    again = json.loads(file.read_text())
    assert all({**new, "seconds": 0} == {**old, "seconds": 0} for new, old in zip(again, results))


def test_why_w2_is_slow_to_recall(tmp_path, here):
    arguments = "--why", "--quick", "--device=cpu", f"--out={tmp_path}"
    first = here("recall", *arguments)
    file = tmp_path / "recall_why_quick.json"
    results = json.loads(file.read_text())
    assert len(tables_of(first)) == 2 + 14 and len(results) == 2 * 14
    assert not (tmp_path / "recall_quick.json").exists()
    file.write_text(json.dumps(results[:2] + results[4:]))  # without what the others are compared with
    shown = tables_of(here("recall", *arguments, "--show"))
    assert len(shown) == 2 + 13 and shown[2] == tables_of(first)[2].replace("| 1.000 |", "|  |")


def tables_of(output):
    return [line for line in output.splitlines() if line.startswith("|")]


@pytest.mark.parametrize("arguments, named", [(["tempo"], "tempo"), ([], "compare, recall")])
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
    with pytest.raises(UserError, match=named):
        runpy.run_path(str(ROOT / "tests" / "bench" / "recall.py"), run_name="__main__")
    assert sys.excepthook is report_error
    assert damaged.read_text() == "[{]"


def test_all_of_them_are_there():
    for mode in all_of_them.MODES:
        assert (ROOT / "tests" / "bench" / f"{mode}.py").exists() and f"\n    {mode} " in all_of_them.__doc__


# -- training ------------------------------------------------------------------------------------------------


def test_published_recipe_is_plain_adamw():
    torch.manual_seed(0)
    models = [tasks.GPT(tasks.GPTConfig(8, 5, 1, 2, n_embd=8)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    idx = torch.randint(5, (3, 8))
    run = {"steps": 3, "recipe": "published", "learning_rate": 0.1}
    tasks.fit(run, models[0], lambda step: (idx, idx), lambda model, x, y: model(x, y)[1])
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
    both = tasks.with_parameters(wide, like), like
    counts = [tasks.GPT(tasks.GPTConfig(**settings)).get_num_params() for settings in both]
    assert abs(counts[0] - counts[1]) <= 3 * 32 * 2 // 2 + 1  # half a column of the MLPs


@pytest.mark.parametrize("which, parameters", [("standard", 492_000), ("W2, diagonal σ", 278_856)])
def test_published_models_have_the_published_size(which, parameters):
    settings = {"block_size": 127, "vocab_size": 1024, "n_layer": 2} | recall.PUBLISHED[which][0]
    assert tasks.GPT(tasks.GPTConfig(**settings)).get_num_params() == parameters


# -- why W2 is slow to recall --------------------------------------------------------------------------------

RECALL = {"task": "mqar", "pairs": 2, "batch_size": 4, "dtype": "float32", "compile": False, "seed": 3}
RECALL |= {"steps": 1, "warmup": 1, "look_every": 1, "details_every": 1, "learning_rate": 1e-2}
SMALL = {"block_size": 16, "vocab_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16, "bias": True}
STANDARD, W2 = RECALL | {"model": SMALL}, RECALL | {"model": SMALL | {"attention": "w2"}}


def attention_of(run, log_tau=None):
    """Return a layer's attention in float64, with biases and perhaps another τ, and inputs for its score vectors."""
    attn = why.make_model(run).double().blocks[1].attn
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        attn.k_proj.bias.normal_(generator=generator)
        if log_tau is not None:
            set_log_tau(attn, log_tau)
    x = torch.randn(3, 12, 16, generator=generator, dtype=torch.float64)
    return attn, x, rope_table(0, 12, 8, 1e4, x)


def scores_of(attn, x, rope):
    q, k, _ = attn.score_vectors(x, rope, ())
    return q @ k.mT


def test_scores_without_sigma():
    attn, x, rope = attention_of(W2 | {"scores": "qk_key_norm"}, log_tau=[0.5, 2.0])
    q, k = attn.project(x, rope)
    tau = torch.tensor([0.5, 2.0], dtype=torch.float64).exp() + 1e-6
    expected = torch.empty(3, 2, 12, 12, dtype=torch.float64)
    for head in range(2):
        for m in range(12):
            for n in range(12):
                query, key = q[:, head, m], k[:, head, n]
                product, norm = (query * key).sum(-1), (key * key).sum(-1)
                expected[:, head, m, n] = 2 / tau[head] * (product - norm / 2)
    torch.testing.assert_close(scores_of(attn, x, rope), expected, rtol=1e-10, atol=1e-10)


def test_scores_of_qk_alone_start_as_the_standard_ones():
    attn, x, rope = attention_of(W2 | {"scores": "qk"})
    standard, _, _ = attention_of(STANDARD)
    standard.load_state_dict(attn.state_dict(), strict=False)
    torch.testing.assert_close(scores_of(attn, x, rope), scores_of(standard, x, rope), rtol=1e-6, atol=0)  # ε of τ


@pytest.mark.parametrize("changed, parts", [
    (STANDARD, ["qk"]),
    (W2 | {"scores": "qk"}, ["qk"]),
    (W2 | {"scores": "qk_key_norm"}, ["qk", "key_norm"]),
    (W2, ["qk", "key_norm", "sigma"]),
])  # fmt: skip
def test_terms_add_up_to_the_scores(changed, parts):
    attn, x, rope = attention_of(changed)
    q, k, _ = attn.score_vectors(x, rope, ())
    terms = why.score_terms(attn, q, k)
    assert [name for name, term in terms.items() if term.any()] == parts
    torch.testing.assert_close(sum(terms.values()), scores_of(attn, x, rope))


def test_a_seed_starts_all_variants_alike():
    whole = why.make_model(W2).state_dict()
    for scores in ("qk", "qk_key_norm"):
        other = why.make_model(W2 | {"scores": scores}).state_dict()
        assert whole.keys() == other.keys() and all(torch.equal(whole[name], other[name]) for name in whole)


def test_another_start():
    whole, longer, smaller = (why.make_model(W2 | change) for change in ({}, {"tau_start": 3}, {"key_size": 0.5}))
    for block, of_longer, of_smaller in zip(whole.blocks, longer.blocks, smaller.blocks):
        torch.testing.assert_close(of_longer.attn.log_tau.exp(), 3 * block.attn.log_tau.exp())
        assert torch.equal(of_smaller.attn.k_proj.weight, block.attn.k_proj.weight / 2)


@pytest.mark.parametrize("tau_rate", [0, 0.1, 1])
def test_the_learning_rate_of_tau(tau_rate):
    """AdamW's first step moves each number by its learning rate."""
    looks = why.trial(W2 | {"tau_rate": tau_rate}, CPU)["looks"]
    before, after = (np.log(look["tau"]) for look in looks)
    np.testing.assert_allclose(abs(after - before), 1e-2 * tau_rate, rtol=1e-2, atol=1e-7)


def test_what_a_look_sees_of_scores():
    scores = torch.tensor([[5.0, 9, 9], [1, 3, 9], [0, 3, 6]]).view(1, 1, 3, 3)  # a query sees no 9
    assert why.spread(scores).tolist() == pytest.approx([(0 + 1 + 6**0.5) / 3])
    q, k = torch.ones(1, 1, 3, 1), torch.tensor([0.0, math.log(3), 0]).view(1, 1, 3, 1)
    assert why.previous_token(q, k).item() == pytest.approx((1 / 4 + 3 / 5) / 2)


def looks_of(*accuracies):
    return [{"step": 25 * i, "accuracy": accuracy} for i, accuracy in enumerate(accuracies)]


def test_t99_is_the_first_look_at_99_percent():
    assert why.t99(looks_of(0.2, 0.989, 0.99, 0.5, 1.0)) == 50
    assert why.t99(looks_of(0.2, 0.989)) == math.inf


@pytest.mark.parametrize("accuracies, steps", [([0, 0.5, 0.99, 1, 1], [0, 2, 4]), ([0] * 5, [0, 2, 4, 6, 8])])
def test_a_run_ends_at_t99_or_after_its_steps(monkeypatch, accuracies, steps):
    to_come = iter(accuracies)
    monkeypatch.setattr(why, "look_at", lambda model, x, y: {"loss": 1.0, "accuracy": next(to_come)})
    looks = why.trial(W2 | {"steps": 8, "look_every": 2, "details_every": 4}, CPU)["looks"]
    assert [look["step"] for look in looks] == steps
    assert [look["step"] for look in looks if "tau" in look] == [step for step in steps if step % 4 == 0]


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
    above = entailment.make_tree(tasks.random_numbers(5, entailment.TREE), 200)
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


def test_a_run_counts_once():
    groups = {"a": results(1.0, 5.0), "b": results(1.1, 5.1)}
    with pytest.raises(AssertionError, match="a run counts once"):
        stats.differences(groups | {"again": groups["b"]})


def test_holm():
    assert stats.holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005}) == pytest.approx(
        {"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06}
    )


def test_a_difference_in_words():
    groups = {"standard": results(1.0, 1.1, 1.2), "worse": results(2.0, 2.11, 2.2), "lost": results(None, 1.0, 1.0)}
    texts = stats.compare(groups)
    assert texts["standard"] == "" and texts["lost"] == "diverged"
    assert texts["worse"].startswith("+1.003 ± ") and texts["worse"].endswith(" worse")
    assert stats.compare({"standard": groups["lost"], "other": groups["worse"]}) == {"standard": "diverged", "other": ""}
    assert stats.in_words(0.1, 0.2, 0.3) == "+0.100 ± 0.200"
    assert stats.in_words(0.2, 0.1, 0.01, higher_is_better=True) == "+0.200 ± 0.100 better"


def test_log_rank():
    """The P value is the share of the ways to divide the runs that set the sides as far apart, or farther."""
    assert stats.log_rank([1, 2, 3, 4], [5, 6, 7, 8], 100) == pytest.approx(2 / 70)
    assert stats.log_rank([25, 50], [math.inf, math.inf], 100) == pytest.approx(2 / 6)
    assert stats.log_rank([25, math.inf], [50, math.inf], 100) == 1
    for alike in (25, math.inf):
        assert stats.log_rank([alike, alike], [alike, alike], 100) == 1


@pytest.fixture
def study(tmp_path, monkeypatch):
    """Return a Sweep whose runs come to study.loss(run) at once."""
    monkeypatch.setattr(sys, "argv", ["x", f"--out={tmp_path}", "--device=cpu"])
    study = tasks.Sweep("study", None, "")
    study.pool.shutdown()

    class Pool:
        def submit(self, trial, run, device):
            future = Future()
            future.set_result({"loss": study.loss(run)})
            return future

    study.pool = Pool()
    return study


def test_the_learning_rate_is_chosen_among_what_did_not_diverge(study):
    of_rate = {0.1: 3.0, 0.2: 2.0, 0.4: math.nan}
    study.loss = lambda run: of_rate[run["learning_rate"]] + run["seed"]
    cells = {"only": {"steps": 8, "model": {}}}
    ((one, other),) = study.tuned(cells, [0.4, 0.1, 0.2], [5, 6], tuning_seeds=[0]).values()
    assert [result["run"] for result in (one, other)] == [
        {"steps": 8, "model": {}, "learning_rate": 0.2, "seed": seed} for seed in (5, 6)
    ]
    kept = json.loads(study.path.read_text())
    names = "learning_rate", "seed", "steps"
    found = {tuple(result["run"][name] for name in names): result["loss"] for result in kept}
    assert found == {(0.4, 0, 8): None, (0.1, 0, 8): 3, (0.2, 0, 8): 2, (0.2, 5, 8): 7, (0.2, 6, 8): 8}


def test_rates_are_tried_until_the_best_has_worse_ones_on_both_sides(study):
    study.loss = lambda run: abs(math.log2(run["learning_rate"])) + run["seed"]  # best at 1
    ((one,),) = study.tuned({"only": {"steps": 8, "model": {}}}, [0.125, 0.25], [5]).values()
    assert one["run"]["learning_rate"] == 1
    tried = {result["run"]["learning_rate"] for result in study.done.values()}
    assert tried == {0.125, 0.25, 0.5, 1, 2}
