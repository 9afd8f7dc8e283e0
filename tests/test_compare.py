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

from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import compare
import plan
import runs
import variants
from config import read_settings
from runs import Crashed

DATA = {"vocab_size": 65, "sha256": {"train": "t", "val": "v"}}
SETTINGS = read_settings(ROOT / "train.py", [])
COSTS = {"good": 1.86, "bad": 1.861, "poor": 3.9, "late": 3.9, "cheap": 0.4}  # operations, over the baseline's
GAINS = {"good": 0.3, "bad": -0.1, "poor": -0.05, "late": 0.1, "free": 0.1, "even": 0.0}

BASE = "base: config/standard_shakespeare.py"
GOOD, FREE, EVEN = "good: --residual=m1", "free: --dropout=0.1", "even: --dropout=0.2"
FAST = ("--rates=none", "--learning_rate=0.005")
FASTER = {"learning_rate": 0.005}
DRAW = compare.Report.draw
SINGLE = (BASE, FREE, *FAST)


# -- runs that end at once, with losses that are known -------------------------------------------------------


def noise(run):
    return np.random.default_rng([run.seed, *run.variant.name.encode(), run.steps]).normal()


def line(run):
    """Return a line over log cost, plus a parabola over the rate, least at 0.005."""
    length = math.log2(run.steps / 800)
    rate = 0.1 * math.log2((run.rate or 0.005) / 0.005) ** 2
    return 2.0 - 0.2 * length - GAINS.get(run.variant.name, 0.0) + rate + 0.001 * noise(run)


def scattered(run):
    return 2.0 + 0.03 * noise(run)


def write_log(run, loss, steps=None, resumes=0, changed=None, trouble=None, **of_start):
    """Write what train.py and the referee leave of a run that ends at `loss`, or diverges for None."""
    start = {"event": "start", "step": 0, "data": DATA, "settings": run.settings | (changed or {})} | of_start
    seconds = run.flops * (1.5 if run.variant.name == "slow" else 1.0)
    end = {"event": "diverged" if loss is None else "end", "step": run.steps, "seconds": seconds}
    lines = [start, *resumes * [start | {"event": "resume"}], end]
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if loss is not None:
        answer = {"trouble": ("refused", trouble)} if trouble else {"step": steps or run.steps, "loss": loss}
        (run.folder / "measured.json").write_text(json.dumps(answer))


class FakeWorkers:
    def __init__(self, places):
        self.running, self.free = [], len(places)

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
    monkeypatch.setattr(
        compare, "load_dataset", lambda name: SimpleNamespace(meta=DATA, folder=ROOT, windows=lambda *_: [])
    )
    monkeypatch.setattr(variants, "freeze", lambda code, folder: ROOT)
    monkeypatch.setattr("report.differing_files", lambda home, other: study.differs)
    monkeypatch.setattr(compare, "link_data", lambda home, folder: None)
    monkeypatch.setattr(compare, "save_windows", lambda *_: None)
    monkeypatch.setattr(compare, "Workers", FakeWorkers)
    monkeypatch.setattr(compare.Report, "draw", lambda *_: None)

    def known_of(one, *_):
        facts = {"parameters": 1000, "flops_per_step": 1e6 * COSTS.get(one.name, 1.0), "home": Path(one.name)}
        return replace(one, **facts | study.known.get(one.name, {}))

    def study(*arguments, code=0):
        FakeWorkers.study = study
        assert compare.main(["--device=cpu", "--workers=1", *arguments, f"--out={study.folder}"]) == code
        printed = capsys.readouterr()
        study.err = printed.err
        return printed.out

    monkeypatch.setattr(compare, "examine", known_of)
    study.differs = []
    study.done, study.limit, study.folder, study.known = [], math.inf, tmp_path / "out", {}
    study.folder.mkdir()
    study.end = lambda run: write_log(run, study.loss(run))
    study.loss = line
    study.facts = lambda: json.loads((study.folder / "verdict.json").read_text())["candidates"]
    return study


def comparison_of(study, *arguments):
    options, words, common = compare.read_arguments([*arguments, f"--out={study.folder}"])
    return compare.make_comparison(options, words, common, "cpu")


def verdicts_of(said):
    """Return {name: verdict} of the lines for programs."""
    rows = [row.removeprefix("VERDICT ").split(" | ") for row in said.splitlines() if row.startswith("VERDICT ")]
    return {name: verdict for verdict, name, *_ in rows}


def rates(study, name, seed):
    """Return {steps: learning rates} of the runs of a variant and a seed."""
    found = {}
    for run in study.done:
        if (run.variant.name, run.seed) == (name, seed):
            found.setdefault(run.steps, set()).add(run.rate)
    return found


def lengths(study, name="base"):
    return sorted(rates(study, name, seed=1))


# -- verdicts ------------------------------------------------------------------------------------------------


def test_from_nothing_to_the_verdicts(study, monkeypatch):
    monkeypatch.setattr(compare.Report, "draw", DRAW)
    said = study(BASE, GOOD, "bad: --residual=m1", EVEN)
    assert verdicts_of(said) == {"good": "pays", "bad": "does not pay", "even": "tie"}
    assert lengths(study) == [800, 1488] and lengths(study, "good") == [800]  # even needs no longer baseline
    good, *_ = study.facts()
    assert good["equal_cost"]["gain"] == pytest.approx(0.3 - 0.2 * math.log2(1.86), abs=0.003)
    assert good["equal_cost"]["half"] < 0.04 and good["operations"] == good["seconds"] == 1.86
    assert good["equal_steps"]["gain"] == pytest.approx(0.3, abs=0.003) and good["seeds"] == 3
    assert all((study.folder / name).exists() for name in ("table.md", "figure.png"))
    assert len((study.folder / "runs.csv").read_text().splitlines()) == 1 + len(study.done)
    assert "Compared at 3 layers, width 128" in said


@pytest.mark.parametrize("candidate, needed", [
    ("poor", [800]),  # worse at equal steps already
    ("late", [800, 1600]),  # worse than twice the steps, so four times as many are not tried
    ("cheap", [320]),  # a shorter baseline is worse
])  # fmt: skip
def test_the_baseline_is_trained_longer_while_a_candidate_could_still_pay(study, candidate, needed):
    said = study(BASE, f"{candidate}: --dropout=0.1", *FAST)
    assert verdicts_of(said) == {candidate: "pays" if candidate == "cheap" else "does not pay"}
    assert lengths(study) == sorted({800, *needed})


@pytest.mark.parametrize("options, seeds, level", [([], 8, 1 - 0.05 / 3), (["--seeds=4"], 4, 0.95)])
def test_looks_go_on_while_nothing_is_decided(study, options, seeds, level):
    study.loss = scattered
    said = study(*SINGLE, *options, "--exit_code", code=11)
    assert verdicts_of(said) == {"free": "undecided"} and len(study.done) == 2 * seeds
    assert f"more seeds would decide if this gain stays: --seeds={'3,5,8' if seeds == 8 else '4'}," in said
    (one,) = study.facts()
    assert one["level"] == level and one["looks"][-1] == [1, seeds]


def test_earlier_looks_count(study):
    """Those at other seeds too, unless these have shown that it pays."""
    study.loss = scattered
    levels = []
    for options in (["--seeds=3"], ["--seeds=4"], ["--seeds=4"], ["--seeds=5", "--first_seed=101"]):
        said = study(*SINGLE, *options)
        levels.append(1 - study.facts()[0]["level"])
    assert levels == pytest.approx([0.05, 0.05 / 3, 0.05 / 3, 0.05 / 5])
    assert "NOTE 2 earlier looks at free count (verdicts.jsonl): its interval is one of 99.0%" in said


def test_what_paid_is_confirmed_on_new_seeds(study):
    """The ledger has both comparisons."""
    for seed in (1, 101):
        study(*SINGLE, f"--first_seed={seed}")
    assert {run.seed for run in study.done} == {1, 2, 3, 101, 102, 103}
    rows = [json.loads(row) for row in (study.folder.parent / "verdicts.jsonl").read_text().splitlines()]
    found = [(one["verdict"], one["level"], one["code"]["hash"]) for row in rows for one in row["candidates"]]
    assert found == 2 * [("pays", 1 - 0.05 / 3, "free")] and rows[0]["data"]["sha256"] == DATA["sha256"]


def test_time_is_shown_and_named_where_operations_do_not_explain_it(study):
    said = study(BASE, "slow: --bias", FREE, *FAST)
    assert "| 1.00 | 1.50 |" in said and verdicts_of(said)["slow"] == "tie"
    assert "NOTE slow takes 1.50 times the time for 1.00 times the operations" in said and "NOTE free takes" not in said


def test_the_seconds_of_a_resumed_run_are_not_known(study):
    study.end = lambda run: write_log(run, line(run), resumes=int(run.seed == 2))
    study(*SINGLE)
    assert study.facts()[0]["seconds"] is None


def test_what_may_make_a_comparison_unfair_is_noted(study):
    """Files that may change what a step is, and what train.py says of a run."""
    study.differs = ["model.py", "config/mine.py", "config/__init__.py", "config/runtime/files.py", "train.py"]
    study.end = lambda run: write_log(run, line(run), notes=["the warm-up takes up the whole run"])
    said = study(*SINGLE)
    assert "NOTE free has its own config/__init__.py, config/runtime/files.py, train.py: " in said
    assert "NOTE base: the warm-up takes up the whole run" in said


def test_steps_that_differ_are_not_called_equal(study):
    study(BASE, "short: --max_iters=400", *FAST)
    assert study.facts()[0]["equal_steps"] is None


# -- which runs, and when ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4, 12])
def test_an_interrupted_comparison_resumes(study, limit):
    arguments = BASE, GOOD, EVEN
    study.limit = limit
    with pytest.raises(SystemExit) as stopped:
        study(*arguments)
    assert stopped.value.code == 128 + signal.SIGTERM and len(study.done) == limit
    study.limit = math.inf
    said = study(*arguments)
    assert len(study.done) == len({run.folder for run in study.done}), "a run was done twice"
    done = study.done.copy()
    assert study(*arguments, "--budget=0s").splitlines()[1] in said and study.done == done


def test_a_plan_leads_to_the_same_runs(study):
    commands = []
    while lines := study(BASE, GOOD, "--plan").splitlines():
        commands += lines
        for run in comparison_of(study, BASE, GOOD).missing():
            write_log(run, study.loss(run))
    assert all(line.count(" && ") == 1 and "--init_from=auto && " in line for line in commands)
    study(BASE, GOOD)
    assert study.done == [] and len(commands) == len(set(commands))


def test_runs_of_all_variants_alternate(study):
    runs = comparison_of(study, BASE, "good:", FREE, *FAST).missing()
    assert [run.seed for run in runs] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_no_run_starts_that_would_not_end_within_the_budget(study, monkeypatch):
    """Of two minutes, where each run takes 50 seconds. What has been decided until then is shown."""

    def wait(self, before=FakeWorkers.wait):
        clock.append(clock[-1] + 50)
        return dict.fromkeys(before(self), 50)

    clock = [0]
    monkeypatch.setattr(compare.time, "time", lambda: clock[-1])
    monkeypatch.setattr(FakeWorkers, "wait", wait)
    study(BASE, GOOD, *FAST, "--budget=9s")
    assert len(study.done) == 1  # the first one starts, since nobody knows how long it takes
    clock[:] = [0]
    said = study(BASE, GOOD, *FAST, "--budget=2m")
    assert len(study.done) == 3 and "the budget is spent" in said and verdicts_of(said) == {"good": "undecided"}
    assert "3 runs have ended, too few for its first look: rerun the command" in said
    clock[:] = [0]
    said = study(BASE, EVEN, GOOD, *FAST, "--budget=7m")  # good needs a longer baseline too
    assert verdicts_of(said) == {"even": "tie", "good": "undecided"}


def test_the_device_makes_no_other_run(study):
    more = [], ["--tensorboard=true"], ["--dropout=0.1"]
    same, also, other = (comparison_of(study, BASE, "b:", *options).missing()[0].folder for options in more)
    assert same == also != other


# -- learning rates ------------------------------------------------------------------------------------------


def test_the_search_of_a_candidate_begins_where_the_baselines_ended(study):
    study(BASE, EVEN, "twice: --learning_rate=6e-3")
    assert rates(study, "base", 0) == {800: {0.0015, 0.003, 0.006, 0.012}}
    assert rates(study, "even", 0) == {800: {0.0025, 0.005, 0.01}}
    assert rates(study, "twice", 0) == {800: {0.0025, 0.005, 0.01, 0.02}}  # it keeps its distance to the baseline's


def test_each_length_has_its_own_rate(study):
    """Where the best rate falls as 1/√steps."""
    off = lambda run: math.log2(run.rate / (0.008 * (run.steps / 800) ** -0.5))
    study.loss = lambda run: line(run) - 0.1 * math.log2(run.rate / 0.005) ** 2 + 0.1 * off(run) ** 2
    study(BASE, GOOD, "cheap: --dropout=0.2")
    found = {steps: one for steps, (one,) in rates(study, "base", 1).items()}
    assert found == pytest.approx({320: 0.0126, 800: 0.008, 1488: 0.0059}, rel=0.04)


@pytest.mark.parametrize("highest, best", [(0.002, 0.00125), (0.0004, 0.0003125)])
def test_the_rate_of_a_candidate_that_diverges_is_lowered(study, highest, best):
    study.loss = lambda run: None if run.rate > highest and run.variant.name == "good" else line(run)
    study(BASE, GOOD)
    assert rates(study, "good", 1) == {800: {best}}


def test_a_search_goes_on_until_the_best_rate_is_bracketed(study):
    study(BASE, EVEN, "--rates=1e-6,2e-6", "--seeds=2")
    assert rates(study, "base", 1)[800].pop() == pytest.approx(0.005, rel=0.05)


def test_a_search_that_ends_at_an_edge_decides_nothing(study):
    study.loss = lambda run: 2.0 - 0.01 * math.log2(run.rate)
    with pytest.raises(plan.Refused, match="of 24 rates the last, .* is best"):
        study(BASE, EVEN, "--rates=1e-6,2e-6")


# -- candidates that do not count ----------------------------------------------------------------------------


@pytest.mark.parametrize("known, verdict, why, code", [
    ({"trouble": ("refused", "it sees the future")}, "refused", "it sees the future", 4),
    ({"trouble": ("crashed", "its error")}, "crashed", "its error", 1),
    ({"trouble": ("undecided", "its operations"), "flops_per_step": 0.0}, "undecided", "its operations", 11),
    ({"home": Path("base"), "settings": SETTINGS | FASTER}, "is the same code", "it has the code", 10),
])  # fmt: skip
def test_a_candidate_that_cannot_take_part_does_not_end_the_others(study, known, verdict, why, code):
    study.known["bad"] = known
    said = study(BASE, "bad: --residual=m1", FREE, *FAST, code=int(verdict == "crashed"))
    assert verdicts_of(said) == {"bad": verdict, "free": "pays"} and f"{verdict}: {why}" in said
    assert {run.variant.name for run in study.done} == {"base", "free"}
    study(BASE, "bad: --residual=m1", *FAST, "--exit_code", code=code)


def test_a_baseline_that_cannot_take_part_is_an_error_of_its_own(study):
    study.loss = lambda run: None
    with pytest.raises(plan.Refused, match="the baseline, base, is diverged"):
        study(*SINGLE)
    study.known["base"] = {"trouble": ("refused", "it sees the future")}
    with pytest.raises(plan.Refused, match="the baseline, base, is refused") as error:
        study(*SINGLE)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("log, why", [
    ({"trouble": "it sees the future"}, "it sees the future"),
    ({"data": {"sha256": {"train": "other", "val": "v"}}}, "its text changed before it started: remove"),
    ({"steps": 7}, "it trained for 7 steps instead of 800"),
    ({"changed": {"batch_size": 64}}, "it trained with batch_size = 64 instead of 16"),
])  # fmt: skip
def test_a_run_that_does_not_count_is_refused(study, log, why):
    """As one that leaks, or whose data are others. The comparison goes on."""
    study.end = lambda run: write_log(run, line(run), **(log if run.variant.name == "free" else {}))
    said = study(BASE, FREE, EVEN, *FAST)
    assert verdicts_of(said) == {"free": "refused", "even": "tie"} and why in said
    assert sum(run.variant.name == "free" for run in study.done) == 1


def test_a_candidate_that_crashes_shows_its_traceback_and_the_others_go_on(study):
    def loss(run):
        if run.variant.name == "bad":
            raise Crashed(run, "Traceback ...\nTypeError: mine")
        return line(run)

    study.loss = loss
    said = study(BASE, "bad:", FREE, *FAST, code=1)
    assert verdicts_of(said) == {"bad": "crashed", "free": "pays"} and "Traceback" in study.err


@pytest.mark.parametrize("seed", [2, 4])
def test_a_candidate_that_diverges_is_out(study, seed):
    """Also at a later look than its first."""
    study.loss = lambda run: None if run.seed == seed and run.variant.name == "bad" else scattered(run)
    said = study(BASE, "bad:", EVEN, *FAST)
    assert verdicts_of(said) == {"bad": "diverged", "even": "undecided"}
    assert "| bad |  | 1.86 |  |  | diverged | 0 |" in said


def test_torn_lines_of_a_log_are_left_out(study):
    run = comparison_of(study, BASE, "b:").missing()[0]
    write_log(run, 2.0)
    with open(run.folder / "log.jsonl", "a") as log:
        log.write('{"event": "end", "step": 3}')
    assert runs.result_of(run, DATA["sha256"])["loss"] == 2.0


# -- arguments -----------------------------------------------------------------------------------------------


def test_variants_are_read(monkeypatch):
    """Against a commit, the baseline is the first one as it was there. A variant's own settings win over the common."""
    frozen = []
    monkeypatch.setattr(variants, "freeze", lambda code, folder: frozen.append(code) or ROOT)
    words, common = ["a: config/m1_shakespeare.py", "b\nb: --batch_size=4"], ["--residual=m2", "--batch_size=8"]
    found = variants.read_variants(words, common, "HEAD", None)
    assert [(one.name, one.settings["batch_size"]) for one in found] == [("HEAD", 8), ("a", 8), ("b b", 4)]
    assert frozen == [["@HEAD"], [], []] and {one.settings["residual"] for one in found} == {"m2"}


@pytest.mark.parametrize("arguments, named", [
    (["config/m1_shakespeare.py"], "a baseline and a candidate are needed"),
    (["a:", "b: --block_size=256"], "block_size differs: losses are comparable only on the same windows"),
    (["a:", "b: --dataset=text"], "dataset differs"),
    (["a:", "b: --seed=3"], "seed is set by the comparison"),
    (["a:", "b:", "--seeds=1"], "seeds = '1' is invalid: write numbers from 2 up"),
    (["a:", "b:", "--seeds="], "seeds = ''"),
    (["a:", "b:", "--seeds=2.9"], "seeds = '2.9'"),
    (["a:", "b:", "--rates=0"], "rates = '0'"),
    (["a:", "b:", "--budget=20"], "budget"),
    (["a:", "b:", "--first_seed=0"], "first_seed = 0 is invalid"),
    (["a: --residul=m1", "b:"], "did you mean residual"),
    (["a: --residual=m1", "a: --residual=m2"], "two variants are named 'a'"),
    (["a:", "it's"], "it's: No closing quotation"),
])  # fmt: skip
def test_mistakes_are_named(study, arguments, named):
    with pytest.raises(ValueError, match=named):
        study(*arguments)
