"""compare.py: its statistics, its search for rates, baselines of the same compute, what it leaves out, and resuming."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import compare
import verify
from config import UserError
from conftest import ROOT, copy_repository, hear_signals, load, log_of
from model import Block

SETTINGS = {"learning_rate": 0.003, "max_iters": 800, "warmup_iters": 100}
SMALL = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--block_size=16", "--batch_size=2", "--eval_tokens=64"]
SMALL += ["--warmup_iters=1", "--tune=false", "--seeds=2", "--device=cpu", "--workers=2"]


@pytest.fixture
def judge(tmp_path):
    """Return judge(cost, gain): the row of a candidate with this gain after the same steps. Its runs end at once."""
    comparison = compare.Comparison(tmp_path, None, {"seeds": 3, "first_seed": 101, "workers": 1, "tune": True})
    comparison.run = lambda *_: None

    def train(variant, rate, seed):
        steps, (cost, gain) = variant.settings["max_iters"], judge.facts[variant.name]
        judge.done.append((variant.name, steps, rate, seed))
        judge.warmups[steps] = variant.settings["warmup_iters"]
        return 2 - 0.2 * math.log2(steps / 800) - gain + 0.1 * math.log2(rate / 0.005) ** 2 + 1e-6 * seed, cost * steps

    def judge(cost, gain, **settings):
        judge.facts, judge.done, judge.warmups = {"candidate": (cost, gain), "base": (1, 0)}, [], {}
        variants = [compare.Variant(name, tmp_path, SETTINGS | settings) for name in judge.facts]
        with ThreadPoolExecutor() as threads:
            return comparison.judge(*variants, *(threads.submit(comparison.measure, one) for one in variants))

    comparison.train = train
    return judge


@pytest.mark.parametrize("losses, shown, verdict", [
    ((1.9, 1.91, 1.95), "-0.0950 ± 0.0578", "pays"),
    ((2.0151, 2.0152, 2.0153), "+0.0002 ± 0.0172", "tie"),
    ((1.9, 2.1, 2.0), "-0.0150 ± 0.2454", "undecided"),
    ((2.005, 2.015, 2.01, 2.03), "+0.0000 ± 0.0000", "tie"),  # the same runs
])  # fmt: skip
def test_the_interval_is_welchs(losses, shown, verdict):
    assert compare.difference(losses, (2.005, 2.015, 2.01, 2.03)) == (shown, verdict)


@pytest.mark.parametrize("cost, gain, verdict, lengths", [
    (1.86, 0.3, "pays", {800, 1488}),
    (3.9, 0.1, "does not pay", {800, 3120}),
    (3.9, -0.05, "does not pay", {800}),  # after the same steps already
    (0.4, -0.1, "pays", {800, 320}),  # worse after the same steps, but better than a baseline that is as cheap
    (1.01, 0.0, "tie", {800}),
    (1.0, -math.inf, "left out: of 24 learning rates the last, 7.15256e-10, is the best", {800}),  # always diverges
])  # fmt: skip
def test_a_candidate_is_held_to_a_baseline_of_its_cost(judge, cost, gain, verdict, lengths):
    assert judge(cost, gain)[-1] == verdict
    assert {steps for name, steps, *_ in judge.done if name == "base"} == lengths
    for length in lengths:  # each has its own search, and the vertex of its parabola
        tried = {(rate, seed) for name, steps, rate, seed in judge.done if (name, steps) == ("base", length)}
        assert tried == {(0.003 * 2.0**i, 100) for i in (-1, 0, 1, 2)} | {(0.005, seed) for seed in (101, 102, 103)}


@pytest.mark.parametrize("warmup, as_costly", [(100, 40), (1, 1), (0, 0)])  # 0 follows the steps
def test_warm_up_is_as_long_in_proportion(judge, warmup, as_costly):
    judge(0.4, -0.1, warmup_iters=warmup)
    assert judge.warmups == {800: warmup, 320: as_costly}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    folder = copy_repository(tmp_path / "repo")
    for name in ("verify.py", "reference.py", "cover.py", "bench/compare.py"):
        (folder / "tests" / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / name, folder / "tests" / name)
    monkeypatch.setattr(compare, "ROOT", folder)
    monkeypatch.setattr("data.prepare.DATA", folder / "data")
    for words in ("init -q", "add *.py config data/*.py tests", "-c user.name=x -c user.email=x@y commit -qm first"):
        subprocess.run(["git", *words.split()], cwd=folder, check=True)
    return folder


def test_an_edit_is_compared_with_the_last_commit(checkout, capfd):
    """No run is made twice, none stands for one of other code, and what fails or leaks is left out."""
    model, out, original = checkout / "model.py", checkout.parent / "out", (checkout / "model.py").read_text()

    def runs(edit, code, *more):
        model.write_text(original + edit)
        assert compare.main(["--against=HEAD", "edit:", *more, *SMALL, "--max_iters=6", f"--out={out}"]) == code
        return {path: path.stat().st_mtime for path in out.glob("runs/*/log.jsonl")}

    (checkout / "own").mkdir()
    (checkout / "own" / "same.py").write_text("def same(x):\n    return x\n")  # a copy of the code has new files, too
    edit = "from own.same import same\nforward = MLP.forward\nMLP.forward = lambda self, h: {} forward(self, same(h))\n"
    first = runs(edit.format("2 *"), 1, "bad: --n_head=3")  # a formula that reference.py does not know
    assert len(first) == 4 and all(log_of(path.parent, "end") for path in first)
    assert "| left out: bad, rate 0.003, seed 1, 6 steps: exit code 2: " in capfd.readouterr().out
    assert runs(edit.format("2 *"), 0) == first
    assert len(runs(edit.format("3 *"), 0)) == 6
    for wrong, told in ("slip\n", "NameError: "), (edit.format("h.mean(1, True) +"), "Test 5: Causality... FAILED"):
        runs(wrong, 1)
        assert f"left out: edit, verify.py: exit code 1: {told}" in capfd.readouterr().out


def test_causality_is_checked_with_a_variants_own_settings(monkeypatch):
    forward = Block.forward

    def leak(self, x, *rest):
        return forward(self, x + (x.mean(1, True) if self.attn_norm.eps == 0.5 and x.size(1) > 16 else 0), *rest)

    monkeypatch.setattr(Block, "forward", leak)
    monkeypatch.setattr(verify, "COVER", verify.COVER[:])
    for norm_eps, code in (0.5, 1), (0.1, 0):
        assert verify.main([json.dumps({"norm_eps": norm_eps, "block_size": 40, "n_head": 3})]) == code


@pytest.mark.parametrize("arguments, named", [
    (["--against=nonsense", "a:"], "against = 'nonsense' is no commit here: fatal: not a valid object name"),
    (["a:", "b:"], "two variants are the same: save your edit"),
    (["a:", "b: --block_size=8"], "block_size: variants are comparable only with the same"),
    (["a:", "b: --out_dir=x"], "leave out out_dir, which a comparison sets itself"),
    (["--against=HEAD", "b: --new=1"], "HEAD: b: --new: unknown setting"),
])  # fmt: skip
def test_mistakes_are_named(checkout, arguments, named):
    with pytest.raises(UserError, match=named):
        compare.main([*arguments, f"--out={checkout.parent / 'out'}"])


@pytest.mark.parametrize("send, number", [(os.kill, signal.SIGTERM), (os.killpg, signal.SIGINT)])
def test_a_stopped_comparison_lets_its_runs_save(checkout, send, number):
    """Only the parent hears of it, also at a terminal's Ctrl-C: its runs have sessions of their own."""
    command = [sys.executable, "tests/bench/compare.py", "a:", "b: --residual=m1", *SMALL, "--max_iters=20000"]
    parent = subprocess.Popen(command, cwd=checkout, start_new_session=True, preexec_fn=hear_signals)
    logs = lambda: [log for log in checkout.glob("out/compare/runs/*/log.jsonl") if '"step"' in log.read_text()]
    while len(logs()) < 2 and parent.poll() is None:
        time.sleep(0.1)
    send(parent.pid, number)
    assert parent.wait() == 128 + signal.SIGINT
    for log in logs():
        assert load(log.with_name("ckpt.pt"))["iter_num"] == log_of(log.parent, "step")[-1]["step"] < 20000
