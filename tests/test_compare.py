"""compare.py: which runs it makes, its verdicts, what it refuses, and that it resumes where it was stopped."""

import json
import math
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
sys.path.insert(0, str(BENCH))

import compare
import plan
import runs
import variants
from config import read_settings
from figure import write_figure
from runs import Crashed

DATA = {"vocab_size": 65, "sha256": {"train": "t", "val": "v"}}
SETTINGS = read_settings(ROOT / "train.py", [])
COSTS = {"good": 1.86, "bad": 1.861, "poor": 3.9, "late": 3.9, "cheap": 0.4}  # operations, over the baseline's
GAINS = {"good": 0.3, "bad": -0.1, "poor": -0.05, "late": 0.1, "free": 0.1, "even": 0.0}


# -- runs that end at once, with losses that are known -------------------------------------------------------


def noise(run):
    return np.random.default_rng([run.seed, *run.variant.name.encode(), run.steps]).normal()


def line(run):
    """Return a line over log cost, plus a parabola over the rate, least at 0.005, plus an offset of the seed."""
    length = math.log2(run.steps / 800)
    rate = 0.1 * math.log2((run.rate or 0.005) / 0.005) ** 2
    jitter = 0.001 * noise(run)
    return 2.0 - 0.2 * length - GAINS.get(run.variant.name, 0.0) + rate + 0.01 * run.seed + jitter


def write_log(run, loss, logged=None, refused="", steps=None, resumes=0, changed=None, **of_start):
    """Write what train.py and the referee leave of a run that ends at `loss`, or diverges for None."""
    start = {"event": "start", "step": 0, "data": DATA, "machine": "here", "settings": run.settings | (changed or {})}
    lines = [start | of_start]
    lines += resumes * [start | {"event": "resume"}]
    if loss is None:
        lines.append({"event": "diverged", "step": run.steps})
    else:
        lines.append({"event": "eval", "step": run.steps, "val_loss": loss if logged is None else logged})
        slower = 1.5 if run.variant.name == "slow" else 1.0
        lines.append({"event": "end", "step": run.steps, "seconds": run.flops * slower})
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = {"step": steps or run.steps, "loss": loss, "refused": refused}
    (run.folder / "measured.json").write_text(json.dumps(answer))


class FakeWorkers:
    def __init__(self, number, device):
        self.running, self.free = [], number

    def offer(self, run):
        if len(self.running) < self.free and run not in self.running:
            self.running.append(run)

    def wait(self):
        ended, self.running = self.running, []
        for run in ended:
            if len(self.study.done) >= self.study.limit:
                raise compare.Stopped(signal.SIGTERM)
            self.study.done.append(run)
            self.study.end(run)
        return dict.fromkeys(ended, 1.0)

    def stop(self):
        pass


@pytest.fixture
def study(monkeypatch, tmp_path, capsys):
    """A function that runs compare.py here, on runs whose loss is study.loss(run). It returns what was printed."""
    monkeypatch.setattr(compare, "ensure_prepared", lambda name: ROOT)
    monkeypatch.setattr(compare, "load_dataset", lambda name: SimpleNamespace(meta=DATA, folder=ROOT))
    monkeypatch.setattr(variants, "freeze", lambda code, folder: ROOT)
    monkeypatch.setattr("report.differing_files", lambda home, other: study.differs)
    monkeypatch.setattr(compare, "link_data", lambda home, folder: None)
    monkeypatch.setattr(compare, "save_windows", lambda data, settings, folder: folder / "windows.pt")
    monkeypatch.setattr(compare, "Workers", FakeWorkers)
    monkeypatch.setattr(compare, "write_figure", lambda *_: None)

    def known_of(one, *_):
        facts = {"parameters": 1000, "flops_per_step": 1e6 * COSTS.get(one.name, 1.0), "home": Path(one.name)}
        return replace(one, **facts | study.known.get(one.name, {}))

    def study(*arguments, code=0):
        FakeWorkers.study = study
        assert compare.main(["--device=cpu", "--workers=1", *arguments, f"--out={study.folder}"]) in (None, code)
        printed = capsys.readouterr()
        study.err = printed.err
        return printed.out

    monkeypatch.setattr(compare, "examine", known_of)
    study.differs = []
    study.done, study.limit, study.folder, study.known = [], math.inf, tmp_path / "out", {}
    study.end = lambda run: write_log(run, study.loss(run))
    study.loss = line
    study.facts = lambda: json.loads((study.folder / "verdict.json").read_text())
    return study


BASE = "base: config/standard_shakespeare.py"
FASTER = {"learning_rate": 0.005}
FAST = ("--rates=none", "--learning_rate=0.005")


def comparison_of(study, *arguments):
    options, words, common = compare.read_arguments([*arguments, f"--out={study.folder}"])
    return compare.make_comparison(options, words, common, torch.device("cpu"))


def verdict_of(said, name):
    (row,) = [row for row in said.splitlines() if row.startswith("VERDICT") and f"| {name} |" in row]
    return row.split(" | ")[0].removeprefix("VERDICT ")


def rates(study, name, seed):
    """Return {steps: learning rates} of the runs of a variant and a seed."""
    found = {}
    for run in study.done:
        if (run.variant.name, run.seed) == (name, seed):
            found.setdefault(run.steps, set()).add(run.rate)
    return found


def lengths(study, name="base"):
    return sorted(rates(study, name, seed=1))


def test_a_look_that_is_not_complete_shows_what_it_has_decided(study):
    words = BASE, "even: --dropout=0.1", "good: --residual=m1", *FAST
    study.limit = 9  # three seeds of each; good needs a longer baseline too
    with pytest.raises(SystemExit):
        study(*words)
    said = study(*words, "--budget=0s")
    assert [verdict_of(said, name) for name in ("even", "good")] == ["tie", "undecided"]
    assert "its first look needs more runs (base: 3, at rates 0.005; good: 3, at rates 0.005)" in said


def test_from_nothing_to_the_verdicts(study, monkeypatch):
    monkeypatch.setattr(compare, "write_figure", write_figure)
    said = study(BASE, "good: --residual=m1", "bad: --residual=m1", "even: --dropout=0.1")
    assert [verdict_of(said, name) for name in ("good", "bad", "even")] == ["pays", "does not pay", "tie"]
    assert lengths(study) == [800, 1488] and lengths(study, "good") == [800]  # even needs no longer baseline
    good = study.facts()["candidates"][0]
    assert good["equal_cost"]["gain"] == pytest.approx(0.3 - 0.2 * math.log2(1.86), abs=0.003)
    assert good["equal_cost"]["half"] < 0.04 and good["operations"] == good["seconds"] == 1.86
    assert good["equal_steps"]["gain"] == pytest.approx(0.3, abs=0.003) and good["seeds"] == 3
    assert all((study.folder / name).exists() for name in ("table.md", "runs.csv", "figure.png"))
    assert "This holds at 3 layers, width 128" in said


@pytest.mark.parametrize("candidate, needed", [
    ("poor", [800]),  # worse at equal steps already
    ("late", [800, 1600]),  # worse than twice the steps, so four times as many are not tried
    ("cheap", [320]),  # a shorter baseline is worse
])  # fmt: skip
def test_the_baseline_is_trained_longer_while_a_candidate_could_still_pay(study, candidate, needed):
    said = study(BASE, f"{candidate}: --dropout=0.1", *FAST)
    assert verdict_of(said, candidate) == ("pays" if candidate == "cheap" else "does not pay")
    assert lengths(study) == sorted({800, *needed})


@pytest.mark.parametrize("options, seeds, level", [([], 8, 1 - 0.05 / 3), (["--seeds=4"], 4, 0.95)])
def test_looks_go_on_while_nothing_is_decided(study, options, seeds, level):
    study.loss = lambda run: 2.0 + 0.03 * noise(run)
    said = study(BASE, "even: --dropout=0.1", *FAST, *options, "--exit_code", code=11)
    assert verdict_of(said, "even") == "undecided" and len(study.done) == 2 * seeds
    (one,) = study.facts()["candidates"]
    assert "more seeds (" in said and f"--seeds={'3,5,8' if seeds == 8 else '4'}," in said
    assert one["level"] == level and one["looks"][-1] == [1, seeds]


def test_longer_training_that_hurts_the_baseline_is_said(study):
    """The candidate beats the longer baseline, and not the shorter one."""
    study.loss = lambda run: 2.0 + (0.1 if run.steps > 800 else 0.0) + 0.01 * noise(run)
    assert verdict_of(study(BASE, "good: --residual=m1", *FAST), "good") == "longer training hurts the baseline"


def test_all_alike_variants_tell_whether_seeds_matter(study):
    """Two do not show it here, five do: then pairs decide. With other batches, equal seeds are no pairs."""
    study.loss = lambda run: 2.0 + 0.02 * run.seed + 0.008 * noise(run)
    others = [f"other {i}: --dropout=0.{i}" for i in range(1, 4)]
    halves = []
    for words in (["free: --bias", *others], ["free: --bias"], ["free: --bias --batch_size=8", *others]):
        said = study(BASE, *words, *FAST, "--seeds=3")
        halves.append(study.facts()["candidates"][0]["equal_steps"]["half"])
        assert ("NOTE seeds shift all losses alike" in said) == (others[0] in words)
    paired, alone, other_batches = halves
    assert paired != alone == other_batches


@pytest.mark.parametrize("limit", [4, 12])
def test_it_resumes_where_it_was_stopped(study, limit):
    arguments = BASE, "good: --residual=m1"
    study.limit = limit
    with pytest.raises(SystemExit) as stopped:
        study(*arguments)
    assert stopped.value.code == 128 + signal.SIGTERM and len(study.done) == limit
    study.limit = math.inf
    said = study(*arguments)
    assert len(study.done) == len({run.folder for run in study.done}), "a run was done twice"
    done = study.done.copy()
    assert study(*arguments, "--budget=0s").splitlines()[1] in said and study.done == done


@pytest.mark.parametrize("number, alone", [(1, 0), (2, 2)])
def test_a_plan_leads_to_the_same_runs(study, number, alone):
    """Those that share a CPU have a thread each."""
    arguments = BASE, "good: --residual=m1"
    commands = []
    while lines := study(*arguments, "--plan", f"--workers={number}").splitlines():
        commands += lines
        for run in comparison_of(study, *arguments).missing():
            write_log(run, study.loss(run))
    assert all(line.count(" && ") == 1 and "--init_from=auto && " in line for line in commands)
    assert all(line.count("env OMP_NUM_THREADS=1 ") == alone for line in commands)
    study(*arguments)
    assert study.done == [] and len(commands) == len(set(commands))


def test_runs_of_all_variants_alternate(study):
    runs = comparison_of(study, BASE, "good:", "free: --dropout=0.1", *FAST).missing()
    assert [run.seed for run in runs] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_no_run_starts_that_would_not_end_within_the_budget(study, monkeypatch):
    """Of two minutes, where each run takes 50 seconds."""

    def wait(self, before=FakeWorkers.wait):
        clock.append(clock[-1] + 50)
        return dict.fromkeys(before(self), 50)

    clock = [0]
    monkeypatch.setattr(compare.time, "time", lambda: clock[-1])
    monkeypatch.setattr(FakeWorkers, "wait", wait)
    said = study(BASE, "good: --residual=m1", *FAST, "--budget=2m")
    assert len(study.done) == 2 and "the budget is spent" in said and verdict_of(said, "good") == "undecided"


def test_the_search_of_a_candidate_begins_where_the_baselines_ended(study):
    study(BASE, "even: --dropout=0.1", "twice: --learning_rate=6e-3")
    assert rates(study, "base", 0) == {800: {0.0015, 0.003, 0.006, 0.012}}
    assert rates(study, "even", 0) == {800: {0.0025, 0.005, 0.01}}
    assert rates(study, "twice", 0) == {800: {0.0025, 0.005, 0.01, 0.02}}  # it keeps its distance to the baseline's


def test_each_length_has_its_own_rate(study):
    """Where the best rate falls as 1/√steps."""
    off = lambda run: math.log2(run.rate / (0.008 * (run.steps / 800) ** -0.5))
    study.loss = lambda run: line(run) - 0.1 * math.log2(run.rate / 0.005) ** 2 + 0.1 * off(run) ** 2
    study(BASE, "good: --dropout=0.1", "cheap: --dropout=0.2")
    found = {steps: one for steps, (one,) in rates(study, "base", 1).items()}
    assert found == pytest.approx({320: 0.0126, 800: 0.008, 1488: 0.0059}, rel=0.04)


def test_what_train_py_notes_is_said(study):
    study.end = lambda run: write_log(run, study.loss(run), notes=["the warm-up takes up the whole run"])
    assert "NOTE base: the warm-up takes up the whole run" in study(BASE, "even: --dropout=0.1", *FAST)


@pytest.mark.parametrize("highest, best", [(0.002, 0.00125), (0.0004, 0.0003125)])
def test_the_rate_of_a_candidate_that_diverges_is_lowered(study, highest, best):
    study.loss = lambda run: None if run.rate > highest and run.variant.name == "good" else line(run)
    study(BASE, "good: --residual=m1")
    assert rates(study, "good", 1) == {800: {best}}


# -- candidates that do not count ----------------------------------------------------------------------------


@pytest.mark.parametrize("known, verdict, why, code", [
    ({"trouble": ("refused", "it sees the future")}, "refused", "it sees the future", 4),
    ({"trouble": ("crashed", "its traceback")}, "crashed", "its traceback", 1),
    ({"trouble": ("undecided", "its operations"), "flops_per_step": 0.0}, "undecided", "its operations", 11),
    ({"home": Path("base"), "settings": SETTINGS | FASTER}, "is the same code", "it has the code and the settings", 10),
])  # fmt: skip
def test_a_candidate_that_cannot_take_part_does_not_end_the_others(study, known, verdict, why, code):
    study.known["bad"] = known
    said = study(BASE, "bad: --residual=m1", "free: --dropout=0.1", *FAST, code=int(verdict == "crashed"))
    assert verdict_of(said, "bad") == verdict and verdict_of(said, "free") == "pays" and f"{verdict}: {why}" in said
    assert {run.variant.name for run in study.done} == {"base", "free"}
    study(BASE, "bad: --residual=m1", *FAST, "--exit_code", code=code)


def test_a_baseline_that_cannot_take_part_is_an_error_of_its_own(study):
    study.loss = lambda run: None
    with pytest.raises(plan.Refused, match="the baseline, base, is diverged"):
        study(BASE, "free: --dropout=0.3", *FAST)
    study.known["base"] = {"trouble": ("refused", "it sees the future")}
    with pytest.raises(plan.Refused, match="the baseline, base, is refused") as error:
        study(BASE, "good: --residual=m1", *FAST)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("log, why", [
    ({"refused": "it sees the future"}, "it sees the future"),
    ({"data": {"sha256": {"train": "other", "val": "v"}}}, "its text changed before it started: remove"),
    ({"steps": 7}, "it trained for 7 steps instead of 800"),
    ({"changed": {"batch_size": 64}}, "it trained with batch_size = 64 instead of 16"),
])  # fmt: skip
def test_a_run_that_misreports_is_refused(study, log, why):
    """As one that leaks, or whose data are others. The comparison goes on."""
    study.end = lambda run: write_log(run, line(run), **(log if run.variant.name == "free" else {}))
    said = study(BASE, "free: --dropout=0.1", "even: --dropout=0.2", *FAST)
    assert verdict_of(said, "free") == "refused" and verdict_of(said, "even") == "tie" and why in said
    assert sum(run.variant.name == "free" for run in study.done) == 1


def test_a_candidate_that_crashes_shows_its_traceback_and_the_others_go_on(study):
    def end(run):
        if run.variant.name == "bad":
            raise Crashed(run, "Traceback ...\nTypeError: mine")
        write_log(run, line(run))

    study.end = end
    said = study(BASE, "bad:", "free: --dropout=0.1", *FAST, code=1)
    assert verdict_of(said, "bad") == "crashed" and verdict_of(said, "free") == "pays" and "Traceback" in study.err


@pytest.mark.parametrize("seed", [2, 4])
def test_a_candidate_that_diverges_is_out(study, seed):
    """Also at a later look than its first."""
    study.loss = lambda run: None if run.seed == seed and run.variant.name == "bad" else 2.0 + 0.03 * noise(run)
    said = study(BASE, "bad:", "even: --dropout=0.1", *FAST)
    assert verdict_of(said, "bad") == "diverged" and verdict_of(said, "even") == "undecided"
    assert "| bad |  | 1.86 |  |  | diverged | 0 |" in said


# -- what else a verdict depends on --------------------------------------------------------------------------


def test_time_is_shown_and_named_where_operations_do_not_explain_it(study):
    said = study(BASE, "slow: --dropout=0.1", "free: --dropout=0.2", *FAST)
    assert verdict_of(said, "slow") == "tie" and "| 1.00 | 1.50 |" in said
    assert "NOTE slow takes 1.50 times the time for 1.00 times the operations" in said and "NOTE free takes" not in said


def test_the_seconds_of_a_resumed_run_are_not_known(study):
    study.end = lambda run: write_log(run, line(run), resumes=int(run.seed == 2))
    study(BASE, "free: --dropout=0.2", *FAST)
    assert study.facts()["candidates"][0]["seconds"] is None


def test_files_that_may_change_what_a_step_is_are_named(study):
    study.differs = ["model.py", "config/mine.py", "config/__init__.py", "config/runtime/files.py", "train.py"]
    assert "NOTE free has its own config/__init__.py, config/runtime/files.py, train.py: " in study(
        BASE, "free:", *FAST
    )


def test_a_log_that_the_weights_contradict_is_named(study):
    """The referee's loss counts, whatever a run logs."""
    study.end = lambda run: write_log(run, line(run), logged=1.0 if run.variant.name == "even" else None)
    said = study(BASE, "even: --dropout=0.1", *FAST)
    assert verdict_of(said, "even") == "tie" and "NOTE even: a run logs 1.0, but its weights have 2.0" in said


def test_earlier_looks_count(study):
    """Those at other seeds too, unless these have shown that it pays."""
    study.loss = lambda run: 2.0 + 0.03 * noise(run)
    levels = []
    for options in (["--seeds=3"], ["--seeds=4"], ["--seeds=4"], ["--seeds=5", "--first_seed=101"]):
        said = study(BASE, "even: --dropout=0.1", *FAST, *options)
        levels.append(1 - study.facts()["candidates"][0]["level"])
    assert levels == pytest.approx([0.05, 0.05 / 3, 0.05 / 3, 0.05 / 5])
    assert "NOTE 2 earlier looks at even count (verdicts.jsonl): its interval is one of 99.0%" in said


def test_a_search_that_ends_at_an_edge_decides_nothing(study):
    study.loss = lambda run: 2.0 - 0.01 * math.log2(run.rate)
    with pytest.raises(plan.Refused, match="of 24 learning rates the last, .* is best"):
        study(BASE, "even: --dropout=0.1", "--rates=1e-6,2e-6")


def test_a_search_goes_on_until_the_best_rate_is_bracketed(study):
    study(BASE, "even: --dropout=0.1", "--rates=1e-6,2e-6", "--seeds=2")
    assert rates(study, "base", 1)[800].pop() == pytest.approx(0.005, rel=0.05)


def test_a_budget_that_ends_in_the_search_says_how_far_it_came(study):
    study.limit = 2
    with pytest.raises(SystemExit):
        study(BASE, "even: --dropout=0.1")
    said = study(BASE, "even: --dropout=0.1", "--budget=0s")
    assert "its first look needs more runs (base: 2, at rates 0.0015, 0.003; even: 0, at rates none)" in said


def test_steps_that_differ_are_not_called_equal(study):
    study(BASE, "short: --max_iters=400", *FAST)
    assert study.facts()["candidates"][0]["equal_steps"] is None


def test_every_comparison_is_in_the_ledger(study):
    """Also the one that confirms another on seeds that are new."""
    for seed in (1, 101):
        study(BASE, "free: --dropout=0.1", *FAST, f"--first_seed={seed}")
    assert {run.seed for run in study.done} == {1, 2, 3, 101, 102, 103}
    rows = [json.loads(row) for row in (study.folder.parent / "verdicts.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["candidates"][0]["verdict"] == "pays" for row in rows)
    assert rows[0]["candidates"][0]["code"]["hash"] and rows[0]["data"]["sha256"] == DATA["sha256"]


def test_variants_are_read(study):
    """Against a commit, the baseline is the first one as it was there. A variant's own settings win over the common."""
    words = "--against=HEAD", "a: config/m1_shakespeare.py", "b: --batch_size=4", "--residual=m2", "--batch_size=8"
    found = [(one.name, one.code, one.settings["batch_size"]) for one in comparison_of(study, *words).variants]
    assert found == [("HEAD", "@HEAD", 8), ("a", "", 8), ("b", "", 4)]
    assert {one.settings["residual"] for one in comparison_of(study, *words).variants} == {"m2"}


def test_the_device_makes_no_other_run(study):
    more = [], ["--tensorboard=true"], ["--dropout=0.1"]
    same, also, other = (comparison_of(study, BASE, "b:", *options).missing()[0].folder for options in more)
    assert same == also != other


@pytest.mark.parametrize("arguments, named", [
    (["config/m1_shakespeare.py"], "a baseline and a candidate are needed"),
    (["a: --residual=m1", "a: --residual=m2"], "two variants are named 'a'"),
    (["a:", "b: --block_size=256"], "block_size differs .128 and 256."),
    (["a:", "b: --eval_tokens=256"], "eval_tokens differs"),
    (["a:", "b: --dataset=text"], "dataset differs"),
    (["a:", "b: --seed=3"], "seed is set by the comparison"),
    (["a:", "b:", "--seeds=1"], "above 1"),
    (["a:", "b:", "--seeds=5,3"], "seeds = '5,3'"),
    (["a:", "b:", "--seeds="], "seeds = ''"),
    (["a:", "b:", "--seeds=2.9"], "seeds = '2.9'"),
    (["a:", "it's"], "it's: No closing quotation"),
    (["a: --residul=m1", "b:"], "did you mean residual"),
    (["a:", "b:", "--rates=0"], "rates = '0'"),
    (["a:", "b:", "--budget=20"], "budget"),
    (["a:", "b:", "--first_seed=0"], "first_seed = 0"),
    (["a:", "b:", "--device=cuda:1"], "CUDA_VISIBLE_DEVICES restricts"),
])  # fmt: skip
def test_mistakes_are_named(study, arguments, named):
    with pytest.raises(ValueError, match=named):
        study(*arguments)


def test_a_newline_in_a_name_does_not_break_the_table(study):
    assert "| mine too |" in study(BASE, "mine\ntoo: --dropout=0.1", *FAST)


def test_torn_lines_of_a_log_are_left_out(study):
    run = comparison_of(study, BASE, "b:").missing()[0]
    write_log(run, 2.0)
    with open(run.folder / "log.jsonl", "a") as log:
        log.write('{"event": "end", "step": 3}')
    assert runs.result_of(run, DATA["sha256"])["loss"] == 2.0
