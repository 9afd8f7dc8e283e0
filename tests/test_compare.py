"""compare.py: which runs it makes, what it says of them, and that it goes on where it was."""

import csv
import json
import math
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT, copy_repository

BENCH = ROOT / "tests" / "bench"
sys.path.insert(0, str(BENCH))

import compare
import plan
import report
import runs
import stats
import timing
from report import write_figure
from runs import DEFAULTS, Workers, read_log

DATA = {"vocab_size": 65, "sha256": {"train": "t", "val": "v"}}


# -- runs that end at once, with losses that are known -------------------------------------------------------


def write_log(run, loss, code=None):
    """What train.py writes of a run that comes to `loss`, or to the last of a list, or diverges for None."""
    candidate, settings = run.candidate, DEFAULTS | run.settings()
    start = {"event": "start", "step": 0, "settings": settings, "parameters": candidate.parameters}
    start |= {"flops_per_token": candidate.flops_per_token, "machine": "a machine", "data": DATA}
    start["code"] = {"commit": "c", "sha256": code or run.parent.name}
    speed = candidate.tokens_per_step / (1e-9 * candidate.flops_per_token)
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
    monkeypatch.setattr(compare, "Workers", FakeWorkers)

    def study(*arguments, figure=False):
        FakeWorkers.study = study
        monkeypatch.setattr(report, "write_figure", write_figure if figure else lambda *_: None)
        compare.main(["--device=cpu", *arguments, f"--out={tmp_path}"])
        printed = capsys.readouterr()
        study.error = printed.err
        return printed.out

    study.code, study.done, study.limit, study.folder = "a" * 64, [], math.inf, tmp_path
    study.loss = line
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
            write_log(run, self.study.loss(run))
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


def test_from_nothing_to_the_verdict(study):
    said = study(*CANDIDATES, figure=True)
    rows = {
        cells[0]: cells
        for cells in ([cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines())
        if cells
    }
    assert [rows[name][8] for name in ("good", "bad", "even")] == ["pays", "does not pay", rows["even"][8]]
    assert rows["even"][8].startswith("tie within 0.00")
    assert {row[2] for name, row in rows.items() if name in ("base", *GAINS)} == {"0.005"}  # the parabola's vertex

    cost = float(rows["good"][5])
    assert cost == pytest.approx(1.86, abs=0.01)
    lowers, _, half, *_ = rows["good"][4].split()
    assert float(lowers) == pytest.approx(0.3, abs=0.002) and float(half) < 0.01
    assert float(rows["good"][7]) == pytest.approx(0.2 * math.log2(cost), abs=0.003)
    worth = float(rows["good"][9].split()[0].replace(">", "").replace("<", "") or "nan")
    assert rows["good"][9].startswith("> 2") or worth == pytest.approx(2**1.5, rel=0.02)
    assert float(rows["bad"][9].split()[0]) == pytest.approx(1.0, abs=0.02)
    assert float(rows["good"][6]) == pytest.approx(cost, rel=0.01)  # seconds grow with the operations there
    assert (study.folder / "table.md").read_text().count("pays") >= 1
    table = (study.folder / "runs.csv").read_text().splitlines()
    assert len(table) == 1 + len(set(study.done)) and (study.folder / "figure.png").exists()


def test_the_loss_of_the_ladder_is_that_of_its_lengths(study):
    said = study(*CANDIDATES)
    lengths = {400: 2.2, 800: 2.0, 1600: 1.8}
    for steps, loss in lengths.items():
        (row,) = [row for row in said.splitlines() if row.startswith(f"| {steps:,} |")]
        assert float(row.split("|")[3].split("±")[0]) == pytest.approx(loss + 0.02, abs=0.002)


@pytest.mark.parametrize("limit", [5, 25])
def test_it_goes_on_where_it_was(study, limit):
    study.limit = limit
    with pytest.raises(SystemExit) as stopped:
        study(*CANDIDATES)
    assert stopped.value.code == 128 + signal.SIGTERM and len(study.done) == limit
    study.limit = math.inf
    said = study(*CANDIDATES)
    assert len(study.done) == len(set(study.done)), "a run was done twice"
    done = study.done.copy()
    assert study(*CANDIDATES, "--show") == said[said.index("\n| candidate") :] and study.done == done


def test_each_comparison_measures_in_a_folder_of_its_own(study, monkeypatch):
    """Two in one folder may measure at a time, and each removes what it has measured in."""
    folders, train = [], FakeWorkers.train
    monkeypatch.setattr(FakeWorkers, "train", lambda self, run: folders.append(run.folder.parent) or train(self, run))
    for more in ([], ["--dropout=0.1"]):
        study(*CANDIDATES[:2], "--rates=none", "--ladder=none", *more)
    assert len(set(folders)) == 2 and not any(folder.exists() for folder in folders)


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


def test_runs_of_other_code_are_named_and_done_again(study):
    study(*CANDIDATES[:2], "--ladder=none")
    before = study.done.copy()
    study.code = "b" * 64
    assert study(*CANDIDATES[:2], "--ladder=none", "--reuse").count("done again") == 0 and study.done == before
    assert study(*CANDIDATES[:2], "--ladder=none").count("so done again") == 6  # the rates; the others follow from them
    assert study.done == before * 2


def test_code_that_is_changed_meanwhile_is_seen(study):
    study.limit = 2
    with pytest.raises(SystemExit):
        study(*CANDIDATES[:2], "--ladder=none")
    run = plan_of(study, CANDIDATES[:2]).missing()[0]
    write_log(run, 2.0, code="b" * 64)
    with pytest.raises(ValueError, match="were changed before it began: remove it"):
        study(*CANDIDATES[:2], "--ladder=none")


def test_a_candidate_of_another_name_is_measured_anew(study):
    study(*CANDIDATES[:2], "--rates=none", "--ladder=none")
    said = study("standard: config/standard_shakespeare.py", CANDIDATES[1], "--rates=none", "--ladder=none", "--show")
    assert cells_of(said, "good")[5] == ""


def test_a_candidate_that_never_trains(study, monkeypatch):
    monkeypatch.setattr(FakeWorkers, "train", lambda self, run: write_log_of_nothing(run))
    with pytest.raises(ValueError, match="good: has diverged before step 24"):
        study(*CANDIDATES[1:3])


def write_log_of_nothing(run):
    write_log(run, None)
    log = run.folder / "log.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"step", ' not in line))


def test_settings_without_effect_are_named(study):
    study("a: --residual=m1", "b: --sigma=diagonal", "--rates=none", "--ladder=none")
    assert "NOTE b: sigma = 'diagonal' has no effect" in study.error


def test_a_run_that_diverges(study):
    study.loss = lambda run: None if run.rate > 0.002 and run.candidate.name == "good" or run.seed == 2 else line(run)
    said = study(*CANDIDATES[:2], "--ladder=none")
    assert "good, rate 0.00075, seed 0" in said  # it has looked for a rate that does not
    assert "NOTE diverged: good, rate" in said and "| diverged |" in said


def cells_of(said, name):
    return [cell.strip() for row in said.splitlines() if row.startswith(f"| {name} |") for cell in row.split("|")[2:-1]]


def test_a_candidate_that_costs_the_same(study):
    study.loss = lambda run: line(run) - (0.1 if run.candidate.name == "dropout" else 0.0)
    said = study(CANDIDATES[0], "dropout: --dropout=0.1", "--rates=none")
    assert cells_of(said, "dropout")[4] == "1.00" and cells_of(said, "dropout")[6:8] == ["0.000", "pays"]
    study.loss = lambda run: 2.0  # all alike: no noise at all
    assert "± 0.000" in study(CANDIDATES[0], "seed: --dropout=0.2", "--rates=none", "--ladder=none")


def test_the_lowest_loss_counts_if_asked(study):
    study.loss = lambda run: [2.0 - GAINS.get(run.candidate.name, 0.0), 2.5]
    arguments = [*CANDIDATES[:2], "--rates=none", "--ladder=none", "--eval_interval=400"]
    assert cells_of(study(*arguments), "good")[3].startswith("+0.000")
    said = study(*arguments, "--best")
    assert cells_of(said, "good")[3].startswith("+0.300")
    assert "good: lowest after 400, 400, 400 of 800 steps" in said
    rows = list(csv.DictReader((study.folder / "runs.csv").open()))
    assert [(row["loss"], row["best_loss"]) for row in rows if row["candidate"] == "good"] == [("2.5", "1.7")] * 3


def test_one_seed_has_no_intervals(study):
    said = study(*CANDIDATES[:2], "--rates=none", "--seeds=1")
    assert "nan" not in said and "NOTE one seed" in said and cells_of(said, "good")[7] == "undecided"
    assert cells_of(study(*CANDIDATES[:2], "--rates=none", "--seeds=1", "--ladder=none"), "good")[6:] == ["", "", ""]


def test_a_baseline_that_diverges(study):
    study.loss = lambda run: None if run.candidate.name == "base" and run.seed == 1 else line(run)
    said = study(*CANDIDATES[:2], "--rates=none")
    assert cells_of(said, "base")[2] == "diverged" and cells_of(said, "good")[4:] == ["1.86", "1.86", "", "", ""]


def test_lengths_that_coincide_are_one(study):
    study(*CANDIDATES[:2], "--rates=none", "--max_iters=20", "--ladder=1.01,1.5,1.51,2", "--seeds=1")
    assert sorted(label.split(", ")[3] for label in study.done) == ["20 steps", "20 steps", "30 steps", "40 steps"]


def test_what_is_missing_does_not_replace_what_was_there(study):
    study(*CANDIDATES[:2], "--rates=none", "--ladder=none")
    before = (study.folder / "table.md").read_text()
    study.code = "b" * 64
    said = study(*CANDIDATES[:2], "--rates=none", "--ladder=none", "--show")
    assert "6 of 6 runs are missing; 6 have been done with another model.py" in said
    assert (study.folder / "table.md").read_text() == before
    assert "was of another command" in study(*CANDIDATES[:2], "--rates=none", "--ladder=none", "--seeds=4")


def test_a_ladder_of_shorter_runs_only(study):
    """The rate of the longest is not looked for."""
    said = study(*CANDIDATES[:2], "--ladder=0.5")
    assert cells_of(said, "good")[7] == "ladder too short"
    assert {label.split(", ")[3] for label in study.done} == {"400 steps", "800 steps"}


def test_rates_are_chosen_by_a_seed_that_no_result_has(study):
    comparison = plan_of(study, [*CANDIDATES[:2], "--seeds=1,2", "--ladder_seeds=0,3"])
    assert comparison.tuning_seed == 4


def test_options(study):
    study(*CANDIDATES[:2], "--rates=none", "--seeds=4", "--ladder=0.5,2", "--ladder_seeds=5,6", "--max_iters=100")
    assert sorted(study.done) == sorted(
        [f"{name}, rate 0.003, seed 4, 100 steps" for name in ("base", "good")]
        + [f"base, rate 0.003, seed {seed}, {steps} steps" for seed in (5, 6) for steps in (50, 200)]
    )


def test_a_candidates_own_settings_win(study):
    study(
        "--batch_size=8", "a: config/m1_shakespeare.py", "b: config/m1_shakespeare.py --batch_size=4 --learning_rate=1e-3",
        "--residual=m2", "--rates=none", "--seeds=1", "--ladder=none",
    )  # fmt: skip
    a, b = plan_of(
        study, ["a: config/m1_shakespeare.py", "b: --batch_size=4", "--residual=m2", "--batch_size=8"]
    ).candidates
    assert [(c.settings["residual"], c.settings["batch_size"]) for c in (a, b)] == [("m2", 8), ("m2", 4)]


@pytest.mark.parametrize("budget", ["10m", "2h"])
def test_a_budget_is_kept(study, budget):
    said = study(*CANDIDATES[:2], f"--budget={budget}", "--workers=1")
    total = next(line for line in said.splitlines() if line.split()[:1] == ["all"])
    minutes = [int(part) for part in total.split()[-1].split(":")]
    seconds = sum(part * 60**i for i, part in enumerate(reversed(minutes)))
    assert 0.5 < seconds / {"10m": 600, "2h": 7200}[budget] <= 1
    done = len(study.done)
    study(*CANDIDATES[:2], f"--budget={budget}", "--workers=1")
    assert len(study.done) == done  # the same max_iters again


def test_a_budget_that_was_interrupted_keeps_its_length(study, monkeypatch):
    study.limit = 8
    arguments = *CANDIDATES[:2], "--budget=10m", "--workers=1", "--ladder=none"
    with pytest.raises(SystemExit):
        study(*arguments)
    study.limit = math.inf
    monkeypatch.setattr(timing, "STEPS", 12)  # so that what a step takes comes out otherwise
    study(*arguments)
    assert len({label.split(", ")[3] for label in study.done}) == 1


@pytest.mark.parametrize("arguments, named", [
    (["config/m1_shakespeare.py"], "config/m1_shakespeare.py: a candidate is needed beside it"),
    (["dept"], "depth, methods"),
    ([], "a baseline and a candidate"),
    (["a: --residual=m1", "b: --residual=m7"], "m7"),
    (["a: --residual=m1", "a: --residual=m2"], "two candidates are named 'a'"),
    (["--residual=m1", "a: --dataset=text", "b: --dataset=shakespeare_char"], "text"),
    (["a: --residual=m1", "b: --seed=3"], "seed is for the comparison"),
    (["a: --residual=m1", "b:", "--seeds=1,1"], "seeds = '1,1'"),
    (["a: --residual=m1", "b:", "--rates=x"], "rates = 'x'"),
    (["a: --residual=m1", "b:", "--budget=2"], "budget = '2'"),
    (["a: --residual=m1", "b:", "--budget=2h", "--plan"], "max_iters"),
    (["a: --residual=m1", "b:", "--budget=1s"], "too short"),
    (["a: --residul=m1", "b:"], "did you mean residual"),
    (["a: --residual=m1", "b: 'x"], "quotation"),
    (["a: --residual=m1", "b: --help"], "is no setting"),
    (["a: --residual=m1", "b:", "--rates=0"], "rates = '0'"),
    (["a: --residual=m1", "b:", "--max_iters=-5"], "max_iters = -5"),
    (["a: --residual=m1", "b: --optimizer=adam"], "did you mean adamw"),
    (["a: --residual=m1", "b:", "--seeds="], "seeds = ''"),
    (["a: --residual=m1", "b:", "--workers=-1"], "workers = -1"),
    (["a: --residual=m1", "b:", "--device=cuda:1"], "CUDA_VISIBLE_DEVICES=1 and --device=cuda"),
    (["a: --residual=m1", "b:", "--best"], "--eval_interval=100"),
    (["a: --residual=m1", "b: --learning_rate=0"], "learning_rate = 0"),
])  # fmt: skip
def test_mistakes_are_named(study, arguments, named):
    with pytest.raises(ValueError, match=named):
        study(*arguments)


@pytest.mark.parametrize("n_layer, lengths", [(2, [0.5, 2]), (4, [0.5, 2, 4]), (12, [0.5, 2, 4, 8])])
def test_the_ladder_reaches_the_dearest_candidate(study, n_layer, lengths):
    comparison = plan_of(study, [*CANDIDATES[:2], f"--n_layer={n_layer}"])
    cost = comparison.candidates[1].flops / comparison.baseline.flops
    assert comparison.lengths() == lengths and lengths[-2] < cost <= lengths[-1]


def test_longer_runs_take_their_own_rate(study):
    """Where the best rate falls as 1/√steps, it is 1/√2 at twice the steps and 1/√8 at eight times."""

    def loss(run):
        best = 0.008 * run.times**-0.5 if run.times > 1 else 0.008
        return 2 - 0.2 * math.log2(run.times) + 0.1 * math.log2(run.rate / best) ** 2

    study.loss = loss
    study(*CANDIDATES[:2], "--ladder=0.5,2,8", "--seeds=1")
    rates = {
        label.split(", ")[3]: label.split(", ")[1]
        for label in study.done
        if label.startswith("base") and "seed 1" in label
    }
    assert rates == {
        "800 steps": "rate 0.008",
        "400 steps": "rate 0.008",
        "1,600 steps": "rate 0.0056",  # from 0.0028, which is rounded
        "6,400 steps": "rate 0.0028",
    }


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


# -- the statistics, on simulated runs -----------------------------------------------------------------------


def simulated(rng, cost=3.0, effect=0.0, seeds=3, noise=0.01, of_seed=0.0, of_candidate=1.0, steps=1000):
    """Fit runs of a baseline, a line over log cost, and of a candidate that lies `effect` off it at its cost."""
    offsets = rng.normal(0, of_seed, seeds)

    def runs(steps, flops, loss, noise):
        losses = loss + offsets + rng.normal(0, noise, seeds)
        return [{"steps": steps, "seed": s, "flops": flops, "loss": float(loss)} for s, loss in enumerate(losses)]

    ladder = [run for times in (0.5, 1, 2, 4) for run in runs(1000 * times, times, 2 - 0.2 * math.log2(times), noise)]
    return stats.CostCurve(ladder, runs(steps, cost, 2 - 0.2 * math.log2(cost) + effect, noise * of_candidate))


def share(count, predicate, **settings):
    rng = np.random.default_rng(0)
    return np.mean([predicate(simulated(rng, **settings)) for _ in range(count)])


def covers(fit, at, truth):
    value, _, half, _ = fit.estimate(at)
    return abs(value - truth) < half


@pytest.mark.parametrize("settings", [{}, {"of_seed": 0.01}, {"of_seed": 0.05}, {"cost": 1.01}, {"seeds": 5}])
def test_intervals_of_95_percent_cover_95_percent(settings):
    cost = settings.get("cost", 3.0)
    assert 0.925 < share(400, lambda fit: covers(fit, fit.flops, 0.0), **settings) < 0.985
    assert 0.925 < share(400, lambda fit: covers(fit, 1.0, -0.2 * math.log2(cost)), **settings) < 0.985


@pytest.mark.parametrize("steps", [1000, 700])  # as many as a length of the ladder, or not
def test_a_candidate_of_three_times_the_noise_seldom_seems_to_pay(steps):
    settings = {"of_candidate": 3.0, "of_seed": 0.01, "steps": steps}
    assert share(400, lambda fit: covers(fit, fit.flops, 0.0), **settings) > 0.85
    assert share(400, lambda fit: fit.estimate(fit.flops)[0] + fit.estimate(fit.flops)[2] < 0, **settings) < 0.075


def test_nothing_seems_to_pay_where_nothing_does():
    assert share(600, lambda fit: fit.estimate(fit.flops)[0] + fit.estimate(fit.flops)[2] < 0) < 0.045


def test_what_could_be_seen_is_seen():
    """Of effects as large as a comparison says that it finds with 80 %, about as many are found."""
    rng = np.random.default_rng(1)
    least = np.mean([simulated(rng).could_see() for _ in range(200)])
    found = share(300, lambda fit: fit.estimate(fit.flops)[0] + fit.estimate(fit.flops)[2] < 0, effect=-least)
    assert 0.7 < found < 0.95


@pytest.mark.parametrize("offsets, shared", [
    ([(0.02, 0.0, -0.02)] * 4, True),
    ([(0.02, 0.0, -0.02), (-0.02, 0.02, 0.0), (0.0, -0.02, 0.02), (0.02, -0.02, 0.0)], False),
])  # fmt: skip
def test_seeds_matter_where_they_lie_alike_at_all_lengths(offsets, shared):
    wobble = [0.001, -0.002, 0.001]
    ladder = [
        {"steps": steps, "seed": seed, "loss": 2.0 - steps + offset + wobble[(steps + seed) % 3]}
        for steps, of_length in enumerate(offsets)
        for seed, offset in enumerate(of_length)
    ]
    assert stats.seeds_matter(ladder) == shared


@pytest.mark.parametrize("difference, half, expected", [
    (-0.1, 0.05, "pays"),
    (0.1, 0.05, "does not pay"),
    (-0.1, 0.2, "undecided"),
    (0.1, 0.2, "undecided"),
    (-0.005, 0.01, "tie within 0.015"),
    (-0.1, math.nan, "undecided"),
])  # fmt: skip
def test_verdicts(difference, half, expected):
    fit = SimpleNamespace(flops=1.0, lengths={1.0: 1, 2.0: 2}, estimate=lambda flops: (difference, 0.0, half, 0.0))
    assert report.verdict(fit) == expected


def test_worth_is_the_cost_of_the_same_loss():
    fit = simulated(np.random.default_rng(0), cost=3.0, effect=0.1, noise=1e-6)
    assert fit.worth() == pytest.approx([3.0 / 2**0.5] * 3, rel=0.01)
    assert simulated(np.random.default_rng(0), cost=3.0, effect=1.0, noise=1e-6).worth() == [0, 0, 0]
    assert simulated(np.random.default_rng(0), cost=3.0, effect=-1.0, noise=1e-6).worth() == [math.inf] * 3


def test_another_candidate_changes_nothing(study):
    two = study(*CANDIDATES[:2]).splitlines()
    three = study(*CANDIDATES[:3]).splitlines()
    row = next(line for line in two if line.startswith("| good"))
    assert row in three


class Printing:
    """A run whose process prints a text and fails."""

    def __init__(self, folder, text):
        self.folder, self.text = folder, text

    def command(self, device):
        return [sys.executable, "-c", f"print({self.text!r}); raise SystemExit(2)"]

    def label(self):
        return "a run"


def test_a_run_that_another_process_is_at_is_left_to_it(tmp_path):
    """Also if that process, which has lost its own comparison, goes on to write to the same file."""
    workers = Workers(1, compare.pick_device("cpu"))
    run = Printing(tmp_path, "train.py: error: x: another process is training there: wait\nstep 210/400   loss 1.8")
    workers.offer(run)
    assert workers.wait() == [run] and workers.places == [0]
    workers.offer(run)
    assert not workers.running  # not now

    failing = Printing(tmp_path, "Traceback ...\nTypeError: no")
    workers.offer(failing)
    with pytest.raises(ValueError, match=r"a run: TypeError: no \(all that it printed: .*output.txt\)"):
        workers.wait()


def test_a_process_that_is_asked_to_end_has_not_failed(tmp_path, monkeypatch):
    workers = Workers(1, compare.pick_device("cpu"))
    workers.offer(Printing(tmp_path, ""))
    ((process, *_),) = workers.running.values()
    monkeypatch.setattr(runs.time, "sleep", lambda seconds: setattr(workers.signal, "number", 15) or process.wait())
    with pytest.raises(runs.Stopped):
        workers.wait()


class Slow(Printing):
    def command(self, device):
        return [sys.executable, "-c", "import time; time.sleep(1)"]


def test_a_process_that_is_slow_to_end_is_waited_for(tmp_path, monkeypatch):
    """Its log has ended before."""
    workers = Workers(1, compare.pick_device("cpu"))
    monkeypatch.setattr(runs, "result_of", lambda folder: workers.asked_for)
    wait = workers.wait
    workers.asked_for, workers.wait = [], lambda: workers.asked_for.append("a result") or wait(seconds=0.2)
    workers.train(Slow(tmp_path, ""))
    assert not workers.running and workers.places == [0]


# -- with train.py itself ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    return copy_repository(tmp_path_factory.mktemp("check out"))  # a space, which a plan must quote


@pytest.fixture
def in_checkout(checkout, monkeypatch, capsys):
    """A function that runs compare.py here, on runs by the checkout's train.py. It returns what was printed."""
    monkeypatch.setattr("data.prepare.DATA", checkout / "data")
    monkeypatch.setattr(runs, "TRAIN", checkout / "train.py")
    monkeypatch.setattr(report, "write_figure", lambda *_: None)
    monkeypatch.setattr(Workers, "train", lambda workers, run: write_log(run, 9.0))  # only measures what a step takes

    def run(*arguments):
        compare.main([*arguments, *TINY_RUNS, f"--out={checkout / 'out'}"])
        return capsys.readouterr().out

    return run


TINY_RUNS = "--quick", "--rates=none", "--ladder=none", "--workers=1"


def test_its_plan_runs_anywhere(in_checkout):
    """The commands, two at a time, by xargs: then nothing is left to do, and the table is there."""
    candidates = "config/standard_shakespeare.py", "config/m1_shakespeare.py --keep_input", "--seeds=1"
    lines = in_checkout(*candidates, "--plan")
    assert len(lines.splitlines()) == 2
    xargs = ["xargs", "-0", "-P", "2", "-I", "{}", "sh", "-c", "{}"]
    subprocess.run(xargs, input=lines.replace("\n", "\0"), text=True, check=True, cwd="/")
    said = in_checkout(*candidates, "--show")
    assert said.count("m1_shakespeare, keep_input") >= 1 and "missing" not in said


def test_a_signal_leaves_nothing_behind_and_it_goes_on(in_checkout, monkeypatch, capsys):
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
