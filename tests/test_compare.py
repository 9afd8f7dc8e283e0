"""compare.py: which runs it makes, its verdicts, what it refuses, and that it resumes where it was stopped."""

import json
import math
import signal
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from conftest import ROOT

BENCH = ROOT / "tests" / "bench"
sys.path.insert(0, str(BENCH))

import compare
import plan
import runs
from figure import write_figure
from identify import CodeError
from runs import Crashed, read_log

DATA = {"vocab_size": 65, "sha256": {"train": "t", "val": "v"}}
COSTS = {"good": 1.86, "bad": 1.86, "costly": 3.9, "slight": 1.2, "cheap": 0.4}  # operations, over the baseline's
GAINS = {"good": 0.3, "bad": -0.1, "costly": 0.25, "slight": 0.1, "free": 0.1, "even": 0.0, "cheap": 0.0}


# -- runs that end at once, with losses that are known -------------------------------------------------------


def noise(run):
    return np.random.default_rng([run.seed, *run.variant.name.encode(), run.steps]).normal()


def line(run):
    """Return a line over log cost, plus a parabola over the rate, least at 0.005, plus an offset of the seed."""
    length = math.log2(run.steps / 800)
    rate = 0.1 * math.log2((run.rate or 0.005) / 0.005) ** 2
    jitter = 0.001 * noise(run)
    return 2.0 - 0.2 * length - GAINS.get(run.variant.name, 0.0) + rate + 0.01 * run.seed + jitter


def write_log(run, loss, logged=None, refused="", **of_start):
    """Write what train.py and the referee leave of a run that ends at `loss`, or diverges for None."""
    slower = 1.5 if run.variant.name == "slow" else 1.0
    speed = run.variant.tokens_per_step / (1e-9 * run.variant.flops_per_token * slower)
    start = {"event": "start", "step": 0, "code": {"sha256": "c"}, "data": DATA, "machine": "here"} | of_start
    lines = [start] + [{"event": "step", "step": 8 * i, "tokens_per_second": speed} for i in (1, 2, 3)]
    if loss is None:
        lines.append({"event": "diverged", "step": run.steps})
    else:
        lines.append({"event": "eval", "step": run.steps, "val_loss": loss if logged is None else logged})
        lines.append({"event": "end", "step": run.steps, "seconds": 1.0})
    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answer = {"step": run.steps, "loss": loss, "refused": refused}
    (run.folder / "measured.json").write_text(json.dumps(answer))


class FakeWorkers:
    threads = 1

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
            self.study.done.append(run.label())
            self.study.end(run)
        return dict.fromkeys(ended, 1.0)

    def stop(self):
        pass


@pytest.fixture
def study(monkeypatch, tmp_path, capsys):
    """A function that runs compare.py here, on runs whose loss is study.loss(run). It returns what was printed."""
    monkeypatch.setattr(plan, "ensure_prepared", lambda name: ROOT)
    monkeypatch.setattr(plan, "load_dataset", lambda name: SimpleNamespace(meta=DATA, folder=ROOT))
    monkeypatch.setattr(plan, "freeze", lambda code, folder: ROOT)
    monkeypatch.setattr(plan, "link_data", lambda home, folder: None)
    monkeypatch.setattr(plan, "save_windows", lambda data, settings, folder: folder / "windows.pt")
    monkeypatch.setattr(compare, "Workers", FakeWorkers)
    monkeypatch.setattr(compare, "write_figure", lambda *_: None)

    def identify(variants, folder, windows, device):
        folder.mkdir(parents=True, exist_ok=True)
        return {one: study.known.get(one.name) or known_of(one) for one in variants}

    def known_of(one):
        facts = {"parameters": 1000, "flops_per_token": 1e6 * COSTS.get(one.name, 1.0), "identity": one.name}
        return replace(one, **facts, fingerprint=one.name, refused=study.refused.get(one.name, ""))

    def study(*arguments, code=0):
        FakeWorkers.study = study
        assert compare.main(["--device=cpu", "--workers=1", *arguments, f"--out={study.folder}"]) in (None, code)
        printed = capsys.readouterr()
        study.err = printed.err
        return printed.out

    monkeypatch.setattr(plan, "identify", identify)
    study.done, study.limit, study.folder, study.known, study.refused = [], math.inf, tmp_path / "out", {}, {}
    study.end = lambda run: write_log(run, study.loss(run))
    study.loss = line
    study.facts = lambda: json.loads((study.folder / "verdict.json").read_text())
    return study


BASE = "base: config/standard_shakespeare.py"
FAST = ("--rates=none", "--cost=operations", "--learning_rate=0.005")


def verdict_of(said, name):
    (row,) = [row for row in said.splitlines() if row.startswith("VERDICT") and f"| {name} |" in row]
    return row.split(" | ")[0].removeprefix("VERDICT ")


def lengths(study, name="base", seed=1):
    return sorted(
        {
            int(label.split(", ")[3].split()[0].replace(",", ""))
            for label in study.done
            if label.startswith(f"{name}, ") and f"seed {seed}," in label
        }
    )


def test_from_nothing_to_the_verdicts(study, monkeypatch):
    monkeypatch.setattr(compare, "write_figure", write_figure)
    said = study(BASE, "good: --residual=m1", "bad: --residual=m1", "even: --dropout=0.1", "--cost=operations")
    assert [verdict_of(said, name) for name in ("good", "bad", "even")] == ["pays", "does not pay", "tie"]
    assert lengths(study) == [800, 1488] and lengths(study, "good") == [800]  # even needs no longer baseline
    facts = {one["name"]: one for one in study.facts()["candidates"]}
    good = facts["good"]["prices"]["operations"]
    assert good["gain"] == pytest.approx(0.3 - 0.2 * math.log2(1.86), abs=0.003) and good["half"] < 0.04
    assert good["break_even"] == pytest.approx(0.2 * math.log2(1.86), abs=0.003)
    assert facts["good"]["equal_steps"]["gain"] == pytest.approx(0.3, abs=0.003)
    assert facts["good"]["seeds"] == 3
    for name in ("table.md", "runs.csv", "figure.png"):
        assert (study.folder / name).exists()
    assert "good, at 1.86 times the operations: pays: trained at equal cost, base is worse by +0.12" in said
    assert "This holds at 3 layers, width 128" in said and len(set(study.done)) == len(study.done)


def test_worse_at_equal_steps_needs_no_ladder(study):
    """A candidate that costs 3.9 times as much and is worse already costs the baseline no longer run."""
    GAINS["costly"], before = -0.05, GAINS["costly"]
    said = study(BASE, "costly: --residual=m1", *FAST)
    GAINS["costly"] = before
    assert verdict_of(said, "costly") == "does not pay" and lengths(study) == [800] and len(study.done) == 6


def test_rungs_are_climbed_from_below(study):
    """Where twice the steps are better already, four times as many are not tried."""
    GAINS["costly"], before = 0.1, GAINS["costly"]
    said = study(BASE, "costly: --residual=m1", *FAST)
    GAINS["costly"] = before
    assert verdict_of(said, "costly") == "does not pay" and lengths(study) == [800, 1600]


def test_looks_go_on_while_nothing_is_decided(study):
    study.loss = lambda run: 2.0 + 0.03 * noise(run)
    said = study(BASE, "even: --dropout=0.1", *FAST, "--exit_code", code=11)
    assert verdict_of(said, "even") == "undecided" and len(study.done) == 16
    assert "so far:" in said and "--seeds=3,5,8,16" in said and "8 more seeds" in said


def test_one_number_of_seeds_is_no_look(study):
    study.loss = lambda run: 2.0 + 0.03 * noise(run)
    study(BASE, "even: --dropout=0.1", *FAST, "--seeds=4")
    assert len(study.done) == 8 and study.facts()["level"] == 0.95


def test_a_cheaper_candidate_is_held_against_a_shorter_baseline(study):
    said = study(BASE, "cheap: --dropout=0.1", *FAST)
    assert verdict_of(said, "cheap") == "pays" and lengths(study) == [320, 800]


def test_longer_training_that_hurts_the_baseline_is_said(study):
    """A ladder that rises: the candidate beats the longer baseline, and not the shorter one."""
    rising = lambda run: 2.0 + (0.1 if run.steps > 800 else 0.0) + 0.01 * noise(run)
    study.loss = rising
    assert verdict_of(study(BASE, "good: --residual=m1", *FAST), "good") == "longer training hurts the baseline"


def test_costs_that_are_nearly_the_same_share_a_rung(study):
    COSTS.update(bad=1.861)
    GAINS["bad"] = 0.3
    said = study(BASE, "good: --residual=m1", "bad: --residual=m1", *FAST)
    COSTS.update(bad=1.86)
    GAINS["bad"] = -0.1
    assert verdict_of(said, "good") == verdict_of(said, "bad") == "pays" and lengths(study) == [800, 1488]


@pytest.mark.parametrize("limit", [4, 12])
def test_it_resumes_where_it_was_stopped(study, limit):
    arguments = BASE, "good: --residual=m1"
    study.limit = limit
    with pytest.raises(SystemExit) as stopped:
        study(*arguments)
    assert stopped.value.code == 128 + signal.SIGTERM and len(study.done) == limit
    study.limit = math.inf
    said = study(*arguments)
    assert len(study.done) == len(set(study.done)), "a run was done twice"
    done = study.done.copy()
    assert study(*arguments, "--show").splitlines()[1] in said and study.done == done


def test_a_plan_leads_to_the_same_runs(study):
    arguments = BASE, "good: --residual=m1", "--cost=operations"
    commands = []
    while lines := study(*arguments, "--plan").splitlines():
        commands += lines
        for run in comparison_of(study, *arguments).missing():
            write_log(run, study.loss(run))
    assert all(line.count(" && ") == 1 and "--init_from=auto && " in line for line in commands)
    study(*arguments)
    assert study.done == [] and len(commands) == len(set(commands))


def comparison_of(study, *arguments):
    return compare.make_comparison(["--device=cpu", *arguments, f"--out={study.folder}"])


def test_runs_that_a_plan_lets_share_a_cpu_have_a_thread_each(study):
    side_by_side, alone = (study(BASE, "good:", "--plan", f"--workers={number}") for number in (2, 1))
    assert all(line.count("env OMP_NUM_THREADS=1 ") == 2 for line in side_by_side.splitlines())
    assert "OMP_NUM_THREADS" not in alone


def test_no_run_starts_that_would_not_end_within_the_budget(study, monkeypatch):
    monkeypatch.setattr(plan, "OVERHEAD", 1000)
    said = study(BASE, "good: --residual=m1", *FAST, "--budget=10m")
    assert study.done == [] and "the budget is spent" in said and verdict_of(said, "good") == "undecided"


def test_the_search_of_a_candidate_begins_where_the_baselines_ended(study):
    study(BASE, "even: --dropout=0.1", "twice: --learning_rate=6e-3", "--cost=operations")
    tried = lambda name: {
        label.split("rate ")[1].split(",")[0] for label in study.done if label.startswith(name) and "seed 0" in label
    }
    assert tried("base") == {"0.0015", "0.003", "0.006", "0.012"} and tried("even") == {"0.0025", "0.005", "0.01"}
    assert tried("twice") == {"0.0025", "0.005", "0.01", "0.02"}  # it keeps its distance to the baseline's


def test_each_length_has_its_own_rate(study):
    """Where the best rate falls as 1/√steps, it is 1/√2 at twice the steps."""
    off = lambda run: math.log2(run.rate / (0.008 * (run.steps / 800) ** -0.5))
    study.loss = lambda run: 2 - 0.2 * math.log2(run.steps / 800) + 0.1 * off(run) ** 2 + 0.001 * math.sin(7 * run.seed)
    study(BASE, "even: --dropout=0.1", "--ladder=0.5,2", "--cost=operations")
    rates = {
        int(label.split(", ")[3].split()[0].replace(",", "")): float(label.split("rate ")[1].split(",")[0])
        for label in study.done
        if label.startswith("base") and "seed 1" in label
    }
    assert rates == pytest.approx({400: 0.011, 800: 0.008, 1600: 0.0057}, rel=0.04)


@pytest.mark.parametrize("losses, expected", [
    ([1.0, 0.9, 1.0], 2e-3),
    ([1.0, 0.9, math.inf], 2e-3),
    ([1.02, 1.0, 1.01], 2.2e-3),
])  # fmt: skip
def test_vertex(losses, expected):
    assert plan.vertex([1e-3, 2e-3, 4e-3], losses, 1) == pytest.approx(expected)


def test_the_rate_of_a_candidate_that_diverges_is_lowered(study):
    study.loss = lambda run: None if run.rate > 0.002 and run.variant.name == "good" else line(run)
    study(BASE, "good: --residual=m1", "--cost=operations")
    assert any(label.startswith("good, rate 0.00125, seed 1") or "good, rate 0.0013" in label for label in study.done)


# -- candidates that do not count ----------------------------------------------------------------------------


def test_a_refused_candidate_does_not_end_the_others(study):
    study.refused["good"] = "it sees the future in training: at position 3"
    said = study(BASE, "good: --residual=m1", "free: --dropout=0.1", *FAST, "--exit_code")
    assert verdict_of(said, "good") == "refused" and verdict_of(said, "free") == "pays"
    assert "good: refused: it sees the future" in said and not any(label.startswith("good") for label in study.done)
    study(BASE, "good: --residual=m1", *FAST, "--exit_code", code=4)


def test_a_refused_baseline_is_an_error_of_its_own(study):
    study.refused["base"] = "it sees the future"
    with pytest.raises(plan.Refused, match="the baseline, base, is refused") as error:
        study(BASE, "good: --residual=m1", *FAST)
    assert error.value.exit_code == 4


@pytest.mark.parametrize("log, why", [
    ({"logged": 1.43}, "it logs 1.4300 where its weights give 1"),
    ({"refused": "it sees the future in evaluation"}, "it sees the future"),
    ({"data": {"sha256": {"train": "other", "val": "v"}}}, "its text was changed before it began: remove"),
])  # fmt: skip
def test_a_run_that_misreports_is_refused(study, log, why):
    """As one that leaks, or whose data are others. The comparison goes on."""
    study.end = lambda run: write_log(run, line(run), **(log if run.variant.name == "free" else {}))
    said = study(BASE, "free: --dropout=0.1", "even: --dropout=0.2", *FAST)
    assert verdict_of(said, "free") == "refused" and verdict_of(said, "even") == "tie" and why in said
    assert sum(label.startswith("free") for label in study.done) == 1


def test_a_run_of_mixed_code_is_refused(study):
    def end(run):
        write_log(run, line(run))
        if run.variant.name == "free":
            resumed = {"event": "resume", "step": 3, "code": {"sha256": "another"}, "data": DATA}
            log = run.folder / "log.jsonl"
            log.write_text(json.dumps(resumed) + "\n" + log.read_text())

    study.end = end
    assert "its code was changed while it was trained" in study(BASE, "free: --dropout=0.1", *FAST)


def test_fewer_steps_than_planned_are_refused(study):
    def end(run):
        write_log(run, line(run))
        (run.folder / "measured.json").write_text(json.dumps({"step": 7, "loss": line(run), "refused": ""}))

    study.end = end
    with pytest.raises(plan.Refused, match="it has trained for 7 steps instead of 800"):
        study(BASE, "free: --dropout=0.1", *FAST)


def test_a_candidate_that_crashes_shows_its_traceback_and_the_others_go_on(study):
    def end(run):
        if run.variant.name == "bad":
            raise Crashed(run, "Traceback ...\nTypeError: mine")
        write_log(run, line(run))

    study.end = end
    said = study(BASE, "bad:", "free: --dropout=0.1", *FAST, code=1)
    assert verdict_of(said, "bad") == "crashed" and verdict_of(said, "free") == "pays" and "Traceback" in study.err


def test_code_that_fails_before_training_is_told(study):
    study.known["bad"] = CodeError("TypeError: mine")
    assert verdict_of(study(BASE, "bad:", "free: --dropout=0.1", *FAST, code=1), "bad") == "crashed"


def test_a_variant_that_computes_the_same_is_said_to(study, monkeypatch):
    known = plan.identify
    same = lambda found: {one: replace(facts, fingerprint="one") for one, facts in found.items()}
    monkeypatch.setattr(plan, "identify", lambda *arguments: same(known(*arguments)))
    said = study(BASE, "edit:", *FAST)
    assert verdict_of(said, "edit") == "computes the same" and study.done == []


def test_a_candidate_that_diverges_is_out(study):
    study.loss = lambda run: None if run.variant.name == "bad" and run.seed == 2 else line(run)
    said = study(BASE, "bad:", "free: --dropout=0.1", *FAST)
    assert verdict_of(said, "bad") == "diverged" and verdict_of(said, "free") == "pays"
    study.loss = lambda run: None
    with pytest.raises(plan.Refused, match="the baseline, base, is diverged"):
        study(BASE, "free: --dropout=0.3", *FAST, "--max_iters=400")


# -- what else a verdict depends on --------------------------------------------------------------------------


def test_a_verdict_by_time(study):
    """As many operations in 1.5 times the time: the baseline gains 0.117 in that."""
    for gain, verdict in ((0.06, "does not pay"), (0.3, "pays")):
        study.loss = lambda run, gain=gain: line(run) - (gain if run.variant.name == "slow" else 0.0)
        said = study(BASE, f"slow: --dropout={gain}", "--rates=none", "--learning_rate=0.005")
        assert verdict_of(said, "slow") == verdict and "| 1.00, 1.50 ± 0.03 |" in said
        prices = study.facts()["candidates"][0]["prices"]
        assert prices["operations"]["verdict"] == "pays" and prices["time"]["verdict"] == verdict
    assert lengths(study) == [800, 1200]


def test_step_times_of_two_machines_do_not_compare(study):
    study.end = lambda run: write_log(run, line(run), machine=run.variant.name)
    study(BASE, "slow: --dropout=0.1", "--rates=none", "--learning_rate=0.005")
    assert list(study.facts()["candidates"][0]["prices"]) == ["operations"]


def test_the_time_left_is_that_of_runs_that_ended(study):
    comparison = comparison_of(study, BASE, "free: --dropout=0.1", *FAST)
    run = comparison.missing()[0]
    assert comparison.run_seconds(run) == pytest.approx(run.flops / plan.SPEED + plan.OVERHEAD)
    comparison.ended = [(run.flops, 40.0), (run.flops, 44.0)]
    assert comparison.run_seconds(run) == pytest.approx(42)


def test_a_budget_is_read_in_seconds_minutes_and_hours():
    assert [compare.seconds_of(text) for text in ("90s", "20m", "2h", "")] == [90, 1200, 7200, math.inf]


def test_evaluating_more_often_changes_nothing(study):
    """The loss is that of the last weights, however often a run evaluates."""
    said = study(BASE, "free: --eval_interval=10 --dropout=0.1", *FAST)
    assert verdict_of(said, "free") == "pays"


def test_first_seed_confirms_on_seeds_that_are_new(study):
    study(BASE, "free: --dropout=0.1", *FAST, "--first_seed=101")
    assert {label.split("seed ")[1].split(",")[0] for label in study.done} == {"101", "102", "103"}


def test_every_comparison_is_in_the_ledger(study):
    for seed in (1, 101):
        study(BASE, "free: --dropout=0.1", *FAST, f"--first_seed={seed}")
    study(BASE, "free: --dropout=0.1", *FAST, "--show")
    rows = [json.loads(row) for row in (study.folder.parent / "verdicts.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["schema"] == 1 and row["candidates"][0]["verdict"] == "pays" for row in rows)
    assert rows[0]["candidates"][0]["code"]["hash"] and rows[0]["data"]["sha256"] == DATA["sha256"]


def test_the_noise_of_earlier_runs_says_what_can_be_found(study):
    assert "vary by 0.010" in study(BASE, "free: --dropout=0.1", *FAST)
    noise = study.facts()["baseline"]["noise"]
    assert f"vary by {noise:.3f}" in study(BASE, "free: --dropout=0.2", *FAST)


def test_against_a_commit_the_baseline_is_the_first_variant_as_it_was(study):
    said = study("--against=HEAD", "edit: --residual=m1", "even: --dropout=0.1", "--plan", *FAST)
    comparison = comparison_of(study, "--against=HEAD", "edit: --residual=m1", "even: --dropout=0.1")
    names = [(one.name, one.code, one.settings["residual"]) for one in comparison.variants]
    assert names == [("edit @HEAD", "@HEAD", "m1"), ("edit", "", "m1"), ("even", "", "standard")] and said


def test_a_candidates_own_settings_win(study):
    words = "a: config/m1_shakespeare.py", "b: --batch_size=4", "--residual=m2", "--batch_size=8"
    a, b = comparison_of(study, *words).variants
    assert [(c.settings["residual"], c.settings["batch_size"]) for c in (a, b)] == [("m2", 8), ("m2", 4)]


def test_the_device_makes_no_other_run(study):
    folders = [comparison_of(study, BASE, "b:", *more).missing()[0].folder for more in ([], ["--tensorboard=true"])]
    assert folders[0] == folders[1] != comparison_of(study, BASE, "b:", "--dropout=0.1").missing()[0].folder


@pytest.mark.parametrize("arguments, named", [
    (["config/m1_shakespeare.py"], "a baseline and a candidate are needed"),
    ([], "a baseline and a candidate"),
    (["a: --residual=m1", "a: --residual=m2"], "two variants are named 'a'"),
    (["a:", "b: --block_size=256"], "block_size differs, 128 and 256"),
    (["a:", "b: --eval_tokens=256"], "eval_tokens differs"),
    (["a:", "b: --dataset=text"], "dataset differs"),
    (["a:", "b:", "--cost=money"], "cost = 'money'"),
    (["a:", "b: --seed=3"], "seed is set by the comparison"),
    (["a:", "b:", "--seeds=1"], "a single seed is no comparison"),
    (["a:", "b:", "--seeds=5,3"], "seeds = '5,3'"),
    (["a:", "b:", "--seeds=99999999999999999999"], "seeds = '9999"),
    (["a:", "b:", "--seeds="], "seeds = ''"),
    (["a: --residul=m1", "b:"], "did you mean residual"),
    (["a:", "b:", "--rates=0"], "rates = '0'"),
    (["a:", "b:", "--budget=20"], "budget = '20'"),
    (["a:", "b:", "--first_seed=0"], "first_seed = 0"),
    (["a:", "b:", "--device=cuda:1"], "CUDA_VISIBLE_DEVICES keeps"),
])  # fmt: skip
def test_mistakes_are_named(study, arguments, named):
    with pytest.raises(ValueError, match=named):
        study(*arguments)


def test_an_out_that_is_a_file_is_named(study):
    study.folder.write_text("")
    with pytest.raises(ValueError, match="out: File exists"):
        study(BASE, "b:")


def test_a_newline_in_a_name_does_not_break_the_table(study):
    assert "| mine too |" in study(BASE, "mine\ntoo: --dropout=0.1", *FAST)


def test_torn_lines_of_a_log_are_left_out(study):
    run = comparison_of(study, BASE, "b:").missing()[0]
    write_log(run, 2.0)
    log = run.folder / "log.jsonl"
    whole = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*whole[:3], '{"eve\n', *whole[3:], '{"event": "end", "step": 3}']))
    assert runs.result_of(run, DATA["sha256"])["loss"] == 2.0 and len(read_log(run.folder)) == len(whole)
