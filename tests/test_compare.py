"""compare.py: which runs it makes, its verdicts, and that it resumes where it was stopped."""

import csv
import json
import math
import signal
import subprocess
import sys
import time
from collections import defaultdict
from itertools import combinations
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from conftest import ROOT, copy_repository

BENCH = ROOT / "tests" / "bench"
sys.path.insert(0, str(BENCH))

import compare
import examine
import plan
import runs
import timing
from figure import write_figure
from runs import DEFAULTS, Workers, read_log

CODE = "a" * 64
DATA = {"vocab_size": 65, "sha256": {"train": "t", "val": "v"}}


# -- runs that end at once, with losses that are known -------------------------------------------------------


def write_log(run, loss, code=CODE):
    """What train.py writes of a run that ends at `loss`, or at the last of a list, or diverges for None."""
    candidate, settings = run.candidate, DEFAULTS | run.settings()
    start = {"event": "start", "step": 0, "settings": settings, "parameters": candidate.parameters}
    start |= {"flops_per_token": candidate.flops_per_token, "machine": "a machine", "data": DATA}
    start["code"] = {"commit": "c", "sha256": code}
    slower = 1.5 if candidate.name == "slow" else 1.0
    speed = candidate.tokens_per_step / (1e-9 * candidate.flops_per_token * slower)
    lines = [start] + [{"event": "step", "step": 8 * i, "tokens_per_second": speed} for i in (1, 2, 3)]
    if loss is None:
        lines.append({"event": "diverged", "step": run.steps})
    else:
        losses = loss if isinstance(loss, list) else [loss]
        for i, val_loss in enumerate(losses, start=1):
            lines.append({"event": "eval", "step": run.steps * i // len(losses), "val_loss": val_loss})
        lines.append({"event": "end", "step": run.steps, "seconds": 1.0})
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture
def study(monkeypatch, tmp_path, capsys):
    """A function that runs compare.py here, on runs whose loss is study.loss(run). It returns what was printed."""
    monkeypatch.setattr(plan, "ensure_prepared", lambda name: name)
    monkeypatch.setattr(plan, "load_dataset", lambda name: SimpleNamespace(meta=DATA))
    monkeypatch.setattr(plan, "code_version", lambda: {"sha256": study.code})
    monkeypatch.setattr(examine, "examine", lambda *_: None)
    monkeypatch.setattr(examine, "fingerprint", lambda candidate: study.computes[candidate.name])
    monkeypatch.setattr(compare, "Workers", FakeWorkers)

    def study(*arguments, figure=False):
        FakeWorkers.study = study
        monkeypatch.setattr(compare, "write_figure", write_figure if figure else lambda *_: None)
        compare.main(["--device=cpu", *arguments, f"--out={tmp_path}"])
        return capsys.readouterr().out

    study.code, study.done, study.limit, study.folder = CODE, [], math.inf, tmp_path
    study.loss, study.computes = line, defaultdict(str)
    return study


class FakeWorkers:
    def __init__(self, number, device, keep):
        self.running, self.free, self.threads = [], number, 1

    def offer(self, run):
        if len(self.running) < self.free and run not in self.running:
            self.running.append(run)

    def wait(self):
        ended, self.running = self.running, []
        for run in ended:
            if len(self.study.done) >= self.study.limit:
                raise compare.Stopped(signal.SIGTERM)
            self.study.done.append(run.label())
            write_log(run, self.study.loss(run), self.study.code)
        return ended

    def train(self, run):
        write_log(run, 9.0)

    def stop(self):
        pass


GAINS = {"good": 0.3, "bad": 0.0, "even": 0.002}
CANDIDATES = [
    "base: config/standard_shakespeare.py",
    "good: --residual=m1",
    "bad: --residual=m3.1",
    "even: --attention=w2",
]


def line(run):
    """Return a line over log cost, plus a parabola over the rate, least at 0.005, plus an offset of the seed."""
    length = math.log2(run.times) if run.candidate.name == "base" else 0.0
    rate = 0.1 * math.log2(run.rate / 0.005) ** 2
    jitter = 0.001 * math.sin(run.seed * 7 + len(run.candidate.name) + 3 * length)
    return 2.0 - 0.2 * length - GAINS.get(run.candidate.name, 0.0) + rate + 0.01 * run.seed + jitter


def cells_of(said, name):
    """Return a row's cells in the last table, without its name."""
    row = [row for row in said.splitlines() if row.startswith((f"| {name} |", f"| {name} ("))][-1]
    return [cell.strip() for cell in row.split("|")[2:-1]]


def test_from_nothing_to_the_verdict(study):
    said = study(*CANDIDATES, figure=True)
    good, bad, even = (cells_of(said, name) for name in ("good", "bad", "even"))
    assert [good[7], bad[7], even[7][:15]] == ["pays by operations", "does not pay", "tie within 0.00"]
    assert {cells_of(said, name)[1] for name in ("base", *GAINS)} == {"0.005"}  # the parabola's vertex

    cost = float(good[4])
    assert cost == pytest.approx(1.86, abs=0.01) == float(good[5])  # seconds grow with the operations there
    gain, _, half, *_ = good[3].split()
    assert float(gain) == pytest.approx(0.3, abs=0.002) and float(half) < 0.01
    assert float(good[6]) == pytest.approx(0.2 * math.log2(cost), abs=0.003)
    assert good[8].startswith("> 2") and float(bad[8].split()[0]) == pytest.approx(1.0, abs=0.02)
    for steps, loss in {"400": 2.2, "800": 2.0, "1,600": 1.8}.items():
        assert float(cells_of(said, steps)[1].split("±")[0]) == pytest.approx(loss + 0.02, abs=0.002)
    assert "pays" in (study.folder / "table.md").read_text()
    table = (study.folder / "runs.csv").read_text().splitlines()
    assert len(table) == 1 + len(set(study.done)) and (study.folder / "figure.png").exists()
    at_cost = {label.split(", ")[3] for label in study.done if label.startswith("base")} - {"400 steps", "800 steps"}
    assert at_cost == {"1,600 steps", f"{round(800 * 1.8575):,} steps"}  # good's; bad is settled, even costs 1.01
    study(*CANDIDATES, "--ladder=none", "--show", figure=True)
    assert not (study.folder / "figure.png").exists()  # of another comparison


def test_no_name_in_the_figure_covers_another(study, monkeypatch):
    """Of eight candidates, some of which cost and gain the same."""
    figures, kinds = [], ("m1", "m2", "m3.1", "m4.1")
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: figures.append(figure))
    words = [f"{kind}, kept {kept}: --residual={kind} --keep_input={kept}" for kind in kinds for kept in (True, False)]
    study(CANDIDATES[0], *words, "--rates=none", "--ladder=2", "--cost=operations", figure=True)
    (axis,) = figures[0].axes
    texts = {text.get_text(): text.get_window_extent() for text in axis.texts if text.get_text()}
    assert texts.keys() >= {"pays", "does not pay", "train base longer", *(word.split(":")[0] for word in words)}
    assert not any(one.overlaps(other) for one, other in combinations(texts.values(), 2))


@pytest.mark.parametrize("limit", [5, 25])
def test_it_resumes_where_it_was_stopped(study, limit):
    study.limit = limit
    with pytest.raises(SystemExit) as stopped:
        study(*CANDIDATES)
    assert stopped.value.code == 128 + signal.SIGTERM and len(study.done) == limit
    study.limit = math.inf
    said = study(*CANDIDATES)
    assert len(study.done) == len(set(study.done)), "a run was done twice"
    done = study.done.copy()
    assert study(*CANDIDATES, "--show") == said[said.rindex("\n| candidate") :] and study.done == done


def test_measuring_leaves_nothing_and_resumes(study, monkeypatch):
    """It happens where no program looks for runs, and what has been measured when it is stopped counts."""
    folders, train = [], FakeWorkers.train

    def until_stopped(self, run):
        if len(folders) == 2:
            folders.append(None)
            raise compare.Stopped(signal.SIGINT)
        folders.append(run.folder)
        train(self, run)

    monkeypatch.setattr(FakeWorkers, "train", until_stopped)
    with pytest.raises(SystemExit):
        study(*CANDIDATES[:2], "--rates=none", "--ladder=none")
    study(*CANDIDATES[:2], "--rates=none", "--ladder=none")
    measured = [folder for folder in folders if folder]
    assert len(measured) == 2 * timing.TURNS and not any(folder.parent.exists() for folder in measured)
    assert not any(study.folder in folder.parents for folder in measured)


def test_times_are_measured_where_all_runs_are_there(study):
    arguments = *CANDIDATES[:2], "--rates=none", "--ladder=none"
    study(*arguments)
    done = study.done.copy()
    (times,) = study.folder.glob("*/timing-*.json")
    times.unlink()
    assert cells_of(study(*arguments, "--show"), "good")[5] == ""
    assert cells_of(study(*arguments, "--cost=operations"), "good")[5] == ""
    assert cells_of(study(*arguments), "good")[5] == "1.86" and study.done == done


@pytest.mark.parametrize("threads, compiled", [(1, "true"), (10**9, "false")])
def test_a_step_is_measured_compiled_where_the_run_will_be(study, threads, compiled):
    comparison = plan_of(study, [*CANDIDATES[:2], "--max_iters=1000000"])
    run = comparison.timing.short_run(comparison.baseline, 0, study.folder, threads)
    assert run.settings()["compile"] == compiled


def test_a_plan_leads_to_the_same_runs(study):
    commands = []
    while lines := study(*CANDIDATES[:2], "--plan").splitlines():
        commands += lines
        for run in plan_of(study, CANDIDATES[:2]).missing():
            write_log(run, study.loss(run))
    assert all(" --init_from=auto" in command and "--out_dir=" in command for command in commands)
    planned = plan_of(study, CANDIDATES[:2]).planned()
    assert len(commands) == len(set(commands)) == len(planned)
    study(*CANDIDATES[:2])
    assert study.done == []


def plan_of(study, words):
    options, words, common = compare.read_arguments([*words, "--device=cpu"])
    return plan.Comparison("", words, common, options | {"out": study.folder}, compare.pick_device("cpu"))


def test_a_run_counts_while_its_candidate_computes_the_same(study):
    arguments = *CANDIDATES[:2], "--ladder=none"
    study(*arguments)
    before = study.done.copy()
    study.code = "b" * 64
    study(*arguments)
    assert study.done == before  # a comment, or another class
    study.code, study.computes["good"] = "c" * 64, "something else"
    said = study(*arguments, "--reuse")
    assert study.done == before and "| good (earlier code) |" in said and "| base |" in said
    said = study(*arguments)
    assert "good has changed since 3 of its runs were done: they will be rerun" in said  # the rates' come first
    assert study.done == before + [label for label in before if label.startswith("good")]
    study.code, study.computes["good"] = "d" * 64, ""
    study(*arguments)  # the change is taken back
    assert len(study.done) == len(before) * 3 / 2


def test_on_another_machine_the_code_decides(study, monkeypatch):
    arguments = *CANDIDATES[:2], "--ladder=none", "--rates=none"
    study(*arguments)
    monkeypatch.setattr(examine.platform, "machine", lambda: "another")
    study(*arguments)
    assert len(study.done) == 6
    study.code = "b" * 64
    study(*arguments)
    assert len(study.done) == 12


def test_code_that_is_changed_meanwhile_is_seen(study, monkeypatch):
    study.limit = 2
    with pytest.raises(SystemExit):
        study(*CANDIDATES[:2], "--ladder=none")
    write_log(plan_of(study, CANDIDATES[:2]).missing()[0], 2.0, code="b" * 64)
    with pytest.raises(ValueError, match="were changed before it began: remove it"):
        study(*CANDIDATES[:2], "--ladder=none")
    study.limit = math.inf
    codes = iter([CODE])
    monkeypatch.setattr(plan, "code_version", lambda: {"sha256": next(codes, "b" * 64)})
    study(*CANDIDATES[:2], "--ladder=none")  # it computes the same


def test_a_run_that_diverges(study):
    study.loss = lambda run: None if run.rate > 0.002 and run.candidate.name == "good" or run.seed == 2 else line(run)
    said = study(*CANDIDATES[:2], "--ladder=none")
    assert "good, rate 0.00075, seed 0" in said  # it has looked for a rate that does not
    assert "NOTE diverged: good, rate" in said and "| diverged |" in said


def test_a_candidate_that_costs_the_same(study):
    study.loss = lambda run: line(run) - (0.1 if run.candidate.name == "dropout" else 0.0)
    said = study(CANDIDATES[0], "dropout: --dropout=0.1", "--rates=none")
    assert cells_of(said, "dropout")[4] == "1.00" and cells_of(said, "dropout")[6:8] == ["0.000", "pays by operations"]
    study.loss = lambda run: 2.0  # all alike: no noise at all
    assert "± 0.000" in study(CANDIDATES[0], "seed: --dropout=0.2", "--rates=none", "--ladder=none")


def test_the_lowest_loss_counts_if_asked(study):
    study.loss = lambda run: [2.0 - GAINS.get(run.candidate.name, 0.0), 2.5]
    arguments = [*CANDIDATES[:2], "--rates=none", "--ladder=none", "--eval_interval=400"]
    assert cells_of(study(*arguments), "good")[3].startswith("+0.000")
    said = study(*arguments, "--best")
    assert cells_of(said, "good")[3].startswith("+0.300")
    assert "good: of 800 steps its loss is lowest after 400, before its learning rate has decayed" in said
    rows = list(csv.DictReader((study.folder / "runs.csv").open()))
    assert [(row["loss"], row["best_loss"]) for row in rows if row["candidate"] == "good"] == [("2.5", "1.7")] * 3


def test_one_seed_has_no_intervals(study):
    said = study(*CANDIDATES[:2], "--rates=none", "--seeds=1")
    assert "nan" not in said and cells_of(said, "good")[7] == "undecided"
    assert cells_of(study(*CANDIDATES[:2], "--rates=none", "--seeds=1", "--ladder=none"), "good")[6:] == ["", "", ""]


def test_a_baseline_that_diverges(study):
    study.loss = lambda run: None if run.candidate.name == "base" and run.seed == 1 else line(run)
    said = study(*CANDIDATES[:2], "--rates=none")
    assert cells_of(said, "base")[2] == "diverged" and cells_of(said, "good")[4:] == ["1.86", "1.86", "", "", ""]


def test_lengths_that_coincide_are_one(study):
    study(*CANDIDATES[:2], "--rates=none", "--max_iters=20", "--ladder=1.01,1.5,1.51,2", "--seeds=1")
    steps = sorted(label.split(", ")[3] for label in study.done)
    assert steps == ["20 steps", "20 steps", "30 steps", "37 steps", "40 steps"]


def test_what_is_missing_does_not_replace_what_was_there(study):
    study(*CANDIDATES[:2], "--rates=none", "--ladder=none")
    before = (study.folder / "table.md").read_text()
    study.code, study.computes = "b" * 64, defaultdict(lambda: "something else")
    said = study(*CANDIDATES[:2], "--rates=none", "--ladder=none", "--show")
    assert "6 of 6 runs are missing" in said and "good has changed since 3 of its runs were done" in said
    assert (study.folder / "table.md").read_text() == before


def test_a_rung_at_its_cost_decides_also_beyond_the_ladder(study):
    said = study(*CANDIDATES[:2], "--ladder=0.5")
    assert cells_of(said, "good")[7] == "pays by operations"
    assert {label.split(", ")[3] for label in study.done} == {"400 steps", "800 steps", "1,486 steps"}


def test_costs_that_are_as_good_as_the_same_share_a_rung(study):
    comparison = plan_of(study, CANDIDATES)
    assert comparison.distinct([1.99, 1.5, 1.52, 1.6, 1.01, 0.7]) == [0.7, 1.5, 1.6]


def test_rates_are_chosen_by_a_seed_that_no_result_has(study):
    comparison = plan_of(study, [*CANDIDATES[:2], "--seeds=1,2", "--ladder_seeds=0,3"])
    assert comparison.tuning_seed == 4


def test_options(study):
    study(*CANDIDATES[:2], "--rates=none", "--seeds=4", "--ladder=0.5,2", "--ladder_seeds=5,6", "--max_iters=100")
    assert sorted(study.done) == sorted(
        [f"{name}, rate 0.003, seed 4, 100 steps" for name in ("base", "good")]
        + [f"base, rate 0.003, seed {seed}, {steps} steps" for seed in (5, 6) for steps in (50, 186, 200)]
    )


def test_a_candidates_own_settings_win(study):
    words = "a: config/m1_shakespeare.py", "b: --batch_size=4", "--residual=m2", "--batch_size=8"
    a, b = plan_of(study, words).candidates
    assert [(c.settings["residual"], c.settings["batch_size"]) for c in (a, b)] == [("m2", 8), ("m2", 4)]


def test_checkpoints_that_were_kept_stay(study):
    arguments = *CANDIDATES[:2], "--rates=none", "--ladder=none"
    for keep, seeds in (("--keep", "1,2"), ("--seeds=1,2", "1,2"), ("--seeds=1,2,3", "3")):
        study(*arguments, "--seeds=1,2", keep)
        for folder in study.folder.glob(f"*/*seed[{seeds}]*"):
            (folder / "ckpt.pt").touch()
    study(*arguments)
    assert {path.parent.name.split("-seed")[1][0] for path in study.folder.rglob("ckpt.pt")} == {"1", "2"}


@pytest.mark.parametrize("arguments, named", [
    (["config/m1_shakespeare.py"], "config/m1_shakespeare.py: a baseline and a candidate are needed"),
    (["dept"], "depth, example, growth, methods"),
    ([], "a baseline and a candidate"),
    (["a: --residual=m1", "a: --residual=m2"], "two variants are named 'a'"),
    (["--residual=m1", "a: --dataset=text", "b: --dataset=shakespeare_char"], "dataset differs"),
    (["a:", "b: --block_size=256"], "block_size differs, 128 and 256"),
    (["a:", "b: --eval_tokens=256"], "eval_tokens differs"),
    (["a: --eval_interval=400", "b: --eval_interval=50", "--best"], "eval_interval differs"),
    (["a:", "b: --residual=m1", "--cost=money"], "cost = 'money'"),
    (["a:", "b: --residual=m1", "--cost=time", "--plan"], "--cost=operations"),
    (["a: --residual=m1", "b: --seed=3"], "seed is set by the comparison"),
    (["a: --residual=m1", "b:", "--seeds=1,1"], "seeds = '1,1'"),
    (["a: --residul=m1", "b:"], "did you mean residual"),
    (["a: --residual=m1", "b:", "--rates=0"], "rates = '0'"),
    (["a: --residual=m1", "b:", "--seeds="], "seeds = ''"),
    (["a: --residual=m1", "b:", "--device=cuda:1"], "CUDA_VISIBLE_DEVICES keeps"),
    (["a: --residual=m1", "b:", "--best"], "--eval_interval=100"),
])  # fmt: skip
def test_mistakes_are_named(study, arguments, named):
    with pytest.raises(ValueError, match=named):
        study(*arguments)


@pytest.mark.parametrize("n_layer, lengths", [(2, [0.5, 2]), (4, [0.5, 2, 4]), (12, [0.5, 2, 4, 8])])
def test_the_ladder_reaches_the_highest_cost(study, n_layer, lengths):
    comparison = plan_of(study, [*CANDIDATES[:2], f"--n_layer={n_layer}"])
    cost = comparison.candidates[1].flops / comparison.baseline.flops
    assert comparison.lengths() == lengths and lengths[-2] < cost <= lengths[-1]


def test_each_length_has_its_own_rate(study):
    """Where the best rate falls as 1/√steps, it is 1/√2 at twice the steps and 1/√8 at eight times."""
    off = lambda run: math.log2(run.rate / (0.008 * run.times**-0.5))
    study.loss = lambda run: 2 - 0.2 * math.log2(run.times) + 0.1 * off(run) ** 2
    study(*CANDIDATES[:2], "--ladder=0.5,2,8", "--seeds=1")
    of_results = [label.split(", ") for label in study.done if label.startswith("base") and "seed 1" in label]
    rates = {steps: float(rate.removeprefix("rate ")) for _, rate, _, steps in of_results}
    expected = {"400 steps": 0.011, "800 steps": 0.008, "1,600 steps": 0.0057, "6,400 steps": 0.0028}
    assert {steps: rates[steps] for steps in expected} == pytest.approx(expected, rel=0.03)
    assert rates["1,486 steps"] == pytest.approx(0.008 * 1.8575**-0.5, rel=0.03)


def test_the_device_makes_no_other_run(study):
    folders = {plan_of(study, [*CANDIDATES[:2], *more]).missing()[0].folder for more in ([], ["--tensorboard=true"])}
    assert len(folders) == 1
    assert folders != {plan_of(study, [*CANDIDATES[:2], "--dropout=0.1"]).missing()[0].folder}


@pytest.mark.parametrize("losses, expected", [
    ([1.0, 0.9, 1.0], 2e-3),
    ([1.0, 0.9, math.inf], 2e-3),
    ([1.02, 1.0, 1.01], 2.2e-3),
])  # fmt: skip
def test_vertex(losses, expected):
    assert plan.vertex([1e-3, 2e-3, 4e-3], losses, 1) == pytest.approx(expected)


# -- what else a verdict depends on --------------------------------------------------------------------------


def test_a_verdict_by_time(study):
    """As many operations in 1.5 times the time: the baseline gains 0.117 in that."""
    for gain, verdict in ((0.05, "pays by operations; does not pay by time"), (0.3, "pays by operations and time")):
        study.loss = lambda run: line(run) - (gain if run.candidate.name == "slow" else 0.0)
        said = study(CANDIDATES[0], f"slow: --dropout={gain}", "--rates=none")
        cells = cells_of(said, "slow")
        assert cells[4:6] == ["1.00", "1.50"] and cells[7] == verdict
        assert cells[6].startswith("0.000 by operations; 0.11")
    rung = [label for label in study.done if "1,200 steps" in label]
    assert rung == [f"base, rate 0.003, seed {seed}, 1,200 steps" for seed in (1, 2, 3)]
    said = study(CANDIDATES[0], "slow: --dropout=0.3", "--rates=none", "--cost=operations")
    assert cells_of(said, "slow")[7] == "pays by operations"


def test_a_spread_of_times_that_covers_the_difference_is_no_difference(study):
    study(CANDIDATES[0], "slow: --dropout=0.1", "--rates=none", "--ladder=none")
    comparison = plan_of(study, [CANDIDATES[0], "slow: --dropout=0.1"])
    assert comparison.costs(comparison.candidates[1], 1.0) == {"operations": 1.0, "time": 1.5}
    turns = comparison.timing.seconds["slow"]
    comparison.timing.seconds["slow"] = [[second * of for second in turn] for turn, of in zip(turns, (0.4, 1, 1.6))]
    assert comparison.costs(comparison.candidates[1], 1.0) == {"operations": 1.0}


def test_notes(study):
    said = study(CANDIDATES[0], "wide: --n_embd=160", "--rates=none")
    assert "NOTE no learning rates are tried" in said and "times the baseline's parameters" in said
    assert "tokens for each parameter" in said


def test_torn_lines_of_a_log_are_left_out(study):
    run = plan_of(study, CANDIDATES[:2]).missing()[0]
    write_log(run, [2.5, 2.0])
    log = run.folder / "log.jsonl"
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*whole[:3], '{"eve\n', *whole[3:], '{"event": "end", "step": 3}']))
    assert runs.result_of(run.folder)["loss"] == 2.0 and len(read_log(run.folder)) == len(whole)


def test_runs_that_a_plan_lets_share_a_cpu_have_a_thread_each(study):
    side_by_side, alone = (study(*CANDIDATES[:2], "--plan", f"--workers={number}") for number in (2, 1))
    assert all(line.startswith("env OMP_NUM_THREADS=1 ") for line in side_by_side.splitlines())
    assert not any(line.startswith("env") for line in alone.splitlines())


def test_quick_is_quick(study):
    study(*CANDIDATES[:2], "--quick", "--max_iters=4000", "--rates=none")
    assert {label.split(", ")[3] for label in study.done} <= {"3 steps", "6 steps", "8 steps", "12 steps"}


# -- with train.py itself ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return copy_repository(tmp_path_factory.mktemp("check out"))  # a space, which a plan must quote


@pytest.fixture
def in_checkout(checkout, monkeypatch, capsys):
    """A function that runs compare.py here, on runs by the checkout's train.py. It returns what was printed."""
    monkeypatch.setattr("data.prepare.DATA", checkout / "data")
    monkeypatch.setattr(runs, "TRAIN", checkout / "train.py")
    monkeypatch.setattr(examine, "fingerprint", lambda candidate: "")
    monkeypatch.setattr(compare, "write_figure", lambda *_: None)
    monkeypatch.setattr(Workers, "train", lambda workers, run: write_log(run, 9.0))  # only measures what a step takes

    def run(*arguments):
        compare.main([*arguments, *TINY_RUNS, f"--out={run.out}"])
        return capsys.readouterr().out

    run.out = checkout / "out"
    return run


TINY_RUNS = "--rates=none --ladder=none --workers=1 --n_layer=2 --n_head=2 --n_embd=16 --block_size=16".split()
TINY_RUNS += "--batch_size=2 --max_iters=6 --warmup_iters=1 --eval_tokens=64".split()


def test_its_plan_runs_anywhere(in_checkout):
    """The commands, two at a time, by xargs: then nothing is left to do, and the table is there."""
    candidates = "config/standard_shakespeare.py", "config/m1_shakespeare.py --keep_input", "--seeds=1"
    lines = in_checkout(*candidates, "--plan")
    assert len(lines.splitlines()) == 2
    xargs = ["xargs", "-0", "-P", "2", "-I", "{}", "sh", "-c", "{}"]
    subprocess.run(xargs, input=lines.replace("\n", "\0"), text=True, check=True, cwd="/")
    said = in_checkout(*candidates, "--show")
    assert said.count("m1_shakespeare, keep_input") >= 1 and "missing" not in said


def test_a_signal_leaves_nothing_behind_and_it_resumes(in_checkout, monkeypatch, capsys):
    arguments = "long: --max_iters=400", "short: --residual=m1", "--seeds=2"
    wait, stopped = Workers.wait, []

    def wait_and_send(workers):
        ((run, (process, *_)),) = workers.running.items()
        stopped.append((run, process))
        while not any(line["event"] == "step" for line in read_log(run.folder)):
            assert process.poll() is None
            time.sleep(0.05)
        signal.raise_signal(signal.SIGTERM)
        return wait(workers)

    with monkeypatch.context() as until_here, pytest.raises(SystemExit) as end:
        until_here.setattr(Workers, "wait", wait_and_send)
        in_checkout(*arguments)
    assert end.value.code == 128 + signal.SIGTERM and "stopped" in capsys.readouterr().out
    ((run, process),) = stopped
    assert process.returncode == 128 + signal.SIGTERM
    assert (run.folder / "ckpt.pt").exists() and 0 < read_log(run.folder)[-1]["step"] < 400

    in_checkout(*arguments)
    events = [line["event"] for line in read_log(run.folder)]
    assert events.count("resume") == 1 and events[-1] == "end"
    assert not (run.folder / "ckpt.pt").exists()
