"""A run that is stopped, killed or short of disk is, in the end, the run that nothing happened to."""

import fcntl
import json
import random
import re
import resource
import shutil
import signal
import sys
from functools import partial
from itertools import count, cycle
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import faults
import model
from config.runtime import StopSignal, open_log
from conftest import TEXT, TINY, contents, differences, error_of, hear_signals, load, log_of, prepare, progress, refused
from cover import KINDS
from data.dataset import Dataset

WHOLE, RESUMED = Path("out/whole"), Path("out/resumed")
RUN = f"train.py {TINY} --max_iters=6 --dropout=0.2 --gradient_accumulation_steps=2 --checkpoint_interval=1"
RESUME = f"{RUN} --out_dir={RESUMED} --init_from=resume"
# every kind and every method; test_model.py has all of them together
METHODS = list(zip(KINDS, cycle(model.RESIDUALS)))


@pytest.fixture
def run(repo, monkeypatch):
    """Return `repo`, which keeps every ckpt.pt and best.pt of out/whole as steps/<iter_num>-<name>."""
    save = torch.save

    def save_and_keep(state, file):
        save(state, file)
        path = Path(file.name)
        if path.parent == WHOLE:
            file.flush()
            shutil.copy(path, f"steps/{state['iter_num']}-{path.stem}")

    Path("steps").mkdir()
    monkeypatch.setattr(torch, "save", save_and_keep)
    return repo


def kill_after(step, evaluated=True):
    """Make out/resumed what out/whole would have left, had it been killed after the save of a step, or its evaluation.

    Its log has more lines than that.
    """
    shutil.rmtree(RESUMED, ignore_errors=True)
    shutil.copytree(WHOLE, RESUMED, ignore=shutil.ignore_patterns("best.pt"))
    shutil.copy(f"steps/{step}-ckpt.pt", RESUMED / "ckpt.pt")
    for earlier in range(step + evaluated):
        if Path(f"steps/{earlier}-best.pt").exists():
            shutil.copy(f"steps/{earlier}-best.pt", RESUMED / "best.pt")


@pytest.fixture
def killed(run):
    """Return `run`, with a run in out/whole, killed after step 3 in out/resumed."""
    run(f"{RUN} --out_dir={WHOLE}")
    kill_after(3)
    return run


def assert_same_run():
    assert differences(RESUMED / "ckpt.pt", WHOLE / "ckpt.pt") == []


# -- exact resume --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, residual", METHODS)
def test_every_method_resumes_exactly(run, kind, residual):
    method = " ".join(f"--{name}={value}" for name, value in KINDS[kind].items())
    method += f" --n_layer=4 --n_kv_head=1 --residual={residual}"
    run(f"{RUN} {method} --checkpoint_interval=3 --out_dir={WHOLE}")
    kill_after(3)
    run(f"{RESUME} {method}")
    assert_same_run()
    assert progress(RESUMED) == progress(WHOLE)


def test_resumes_exactly_after_any_step_and_with_other_intervals(run):
    method = "--attention=w2 --residual=m3.2 --keep_input"
    run(f"{RUN} {method} --eval_interval=1 --out_dir={WHOLE}")
    for step in (1, 2, 5):
        kill_after(step)
        run(f"{RESUME} {method} --eval_interval={step} --log_interval=2 --checkpoint_interval={7 - step}")
        # with fewer evaluations, a checkpoint may not know the lowest loss of all
        assert set(differences(RESUMED / "ckpt.pt", WHOLE / "ckpt.pt")) <= {"['best_val_loss']"}
        assert all(line in progress(WHOLE) for line in progress(RESUMED))


@pytest.mark.parametrize("step", [2, 4, 6])
def test_an_evaluation_that_was_cut_short_is_done_again(run, step):
    run(f"{RUN} --checkpoint_interval=9 --out_dir={WHOLE}")  # saves before each evaluation all the same
    kill_after(step, evaluated=False)
    lines = (WHOLE / "log.jsonl").read_text().splitlines(keepends=True)
    (RESUMED / "log.jsonl").write_text("".join(lines[: 1 + step + step // 2 - 1]))  # start, steps, evaluations
    assert log_of(RESUMED)[-1]["event"] == "step"
    run(f"{RESUME} --checkpoint_interval=9")
    assert_same_run()
    assert differences(RESUMED / "best.pt", WHOLE / "best.pt") == []
    assert progress(RESUMED) == progress(WHOLE) and log_of(RESUMED)[-1]["event"] == "end"


def test_scale_of_float16_is_resumed(run, monkeypatch):
    # so high that gradients overflow at first, whereupon the step is skipped and the scale halved
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    method = "--dtype=float16 --max_iters=24"
    run(f"{RUN} {method} --out_dir={WHOLE}")
    before, after = load("steps/2-ckpt.pt"), load("steps/23-ckpt.pt")
    taken, later = (saved["optimizer"]["state"][0]["step"] for saved in (before, after))
    assert taken == 0 < later  # the first has learned nothing yet
    assert before["scaler"]["scale"] == 2.0**38 and after["scaler"]["scale"] > 1
    for step in (2, 23):
        kill_after(step)
        run(f"{RESUME} {method}")
        assert_same_run()


def test_best_is_never_worse_even_if_newer_than_the_latest(run):
    method = "--learning_rate=0.3 --warmup_iters=6"  # learns at first, then diverges
    run(f"{RUN} {method} --eval_interval=1 --out_dir={WHOLE}")
    lowest = min(log_of(WHOLE, "eval"), key=lambda line: line["val_loss"])
    assert 1 < lowest["step"] < 6  # or this would test nothing
    kill_after(1)
    shutil.copy(WHOLE / "best.pt", RESUMED)
    run(f"{RESUME} {method} --eval_interval=6")
    assert load(RESUMED / "best.pt")["best_val_loss"] == lowest["val_loss"]
    (RESUMED / "best.pt").unlink()  # then ckpt.pt knows its loss
    run(f"{RESUME} {method} --eval_interval=1 --max_iters=7")
    assert log_of(RESUMED, "end")[-1]["best_loss"] == lowest["val_loss"]


def test_a_finished_run_says_how_to_go_on(run):
    settings = f"{RUN} --lr_decay=none"
    shown = run(f"{settings} --out_dir={RESUMED}")
    before = contents(RESUMED)
    again = run(f"{settings} --out_dir={RESUMED} --init_from=auto")
    assert "out/resumed is at step 6, max_iters = 6: nothing left to do" in again
    assert contents(RESUMED) == before
    (command,) = re.findall("^to train longer: python (.*)", shown, re.MULTILINE)
    run(command)
    run(f"{settings} --max_iters=12 --out_dir={WHOLE}")
    assert_same_run()


def test_a_run_goes_on_compiled_and_without_graphs(killed, monkeypatch):
    compile = Mock(side_effect=lambda function: function)
    monkeypatch.setattr(torch, "compile", compile)
    killed(f"{RESUME} --compile --graphs=false")
    compile.assert_called_once()
    assert_same_run()


# -- the same run --------------------------------------------------------------------------------------------


def test_other_settings_are_refused_and_named(killed, capsys):
    other = {"float32": "bfloat16", "bfloat16": "float32"}[load("steps/3-ckpt.pt")["settings"]["dtype"]]
    error = refused(killed, f"{RESUME} --seed=2 --n_layer=3 --attention=w2 --dtype={other}", capsys)
    changes = "seed = 2 (was 1337)", "n_layer = 3 (was 2)", "attention = 'w2' (was 'standard')", f"dtype = '{other}'"
    assert all(change in error for change in changes) and "max_iters" not in error
    error = refused(killed, f"train.py --init_from=resume --out_dir={RESUMED} --n_layer=3", capsys)  # 3 by default
    assert "n_layer = 3 (was 2)\n" in error
    Path("train.py").write_text(Path("train.py").read_text().replace("\nseed = ", "\nown = False\nseed = "))
    assert "own = True (was None)\n" in refused(killed, f"{RESUME} --own", capsys)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])  # one of them is not what auto chooses here
def test_what_a_run_chose_stays(run, dtype):
    """... on another machine, and with more steps, of which the warm-up is an eighth."""
    command = f"{RUN} --warmup_iters=0 --lr_decay=none --out_dir={RESUMED}"
    run(f"{command} --dtype={dtype}")
    run(f"{command} --dtype=auto --init_from=resume --max_iters=20")
    (resumed,) = log_of(RESUMED, "resume")
    assert (resumed["settings"]["dtype"], resumed["settings"]["warmup_iters"]) == (dtype, 1)
    assert [line["learning_rate"] for line in log_of(RESUMED, "step")] == pytest.approx([0.003] * 20)


def test_other_data_are_refused(killed, capsys):
    for text in (TEXT.replace("dog", "god"), TEXT.upper()):  # other tokens; the same ones of another vocabulary
        Path("data/shakespeare_char/input.txt").write_text(text)
        prepare("data/shakespeare_char", text, "another text")
        capsys.readouterr()
        assert "dataset = 'shakespeare_char'" in refused(killed, RESUME, capsys)
    Path("data/shakespeare_char/input.txt").unlink()
    prepare("data/shakespeare_char", TEXT, "the same text from another file")
    Path("data/shakespeare_char").rename("data/moved")
    killed(f"{RESUME} --dataset=moved")
    assert differences(RESUMED / "ckpt.pt", WHOLE / "ckpt.pt") == ["['data']['source']"]


# -- files, and writes that fail -----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [b'{"event": "st', b'{"event": "step", "step": 3}', b"\0\0\0\n", b"\n"])
def test_bad_lines_of_the_log_lose_no_other(killed, bad):
    """At the end, where the first two are torn and a power cut may leave the others, they go. One is in the middle."""
    log = RESUMED / "log.jsonl"
    first, *lines = (line for line in log.read_bytes().splitlines(keepends=True) if json.loads(line)["step"] <= 3)
    log.write_bytes(b"".join([first, b"\n", *lines, bad]))
    killed(RESUME)
    log.write_bytes(log.read_bytes().replace(b"\n\n", b"\n"))
    assert progress(RESUMED) == progress(WHOLE) and len(log_of(RESUMED, "resume")) == 1


def test_second_process_in_a_folder_is_refused(run, capsys):
    run(f"{RUN} --max_iters=3 --lr_decay=none --out_dir={RESUMED}")
    with open(RESUMED / "log.jsonl", "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert "another process" in refused(run, f"{RESUME} --lr_decay=none", capsys)
    with pytest.raises(ValueError, match="another process has just trained there"):  # there was no checkpoint before
        open_log(RESUMED / "log.jsonl", {}, iter_num=0, evaluates=False)
    run(f"{RESUME} --lr_decay=none")


def in_step(step, monkeypatch, happens):
    batch = Dataset.batch

    def batch_and_more(self, seed, done, micro_step, *rest, **named):
        if (done + 1, micro_step) == (step, 0):
            happens()
        return batch(self, seed, done, micro_step, *rest, **named)

    monkeypatch.setattr(Dataset, "batch", batch_and_more)


@pytest.mark.parametrize("step, name, room", [
    (1, "ckpt.pt", 20_000),  # there is nothing yet to go on from
    (5, "ckpt.pt", 20_000),
    (3, "log.jsonl", 9),  # bytes, for a part of a line
])  # fmt: skip
def test_a_full_disk_ends_a_run_which_then_goes_on(run, monkeypatch, capsys, step, name, room):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)  # of the size of a file

    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, ((RESUMED / "log.jsonl").stat().st_size + room, limits[1]))

    command = f"{RUN} --n_embd=64"  # larger weights, in which PyTorch's own writer fails
    run(f"{command} --out_dir={WHOLE}")
    with monkeypatch.context() as until_here:
        in_step(step, until_here, fill)
        try:
            error = error_of(run, f"{command} --out_dir={RESUMED}", capsys)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"{'out/resumed/ckpt.pt' if name == 'ckpt.pt' else 'the output'}: File too large\n" in error
    assert (RESUMED / "ckpt.pt").exists() == (step > 1)
    run(f"{command} --out_dir={RESUMED} --init_from=auto")
    assert_same_run()
    assert progress(RESUMED) == progress(WHOLE) and not list(RESUMED.glob("*.tmp"))


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files")
def test_disturbed_it_is_the_undisturbed_run(repo, tmp_path, monkeypatch):
    """faults.py in small, with real processes."""
    random.seed(1)
    monkeypatch.setattr(faults, "STEPS", 40)
    faults.try_faults(repo.folder, "w2, m1", tmp_path / "runs", faults=1)


@pytest.mark.parametrize("kind, step, grad_clip", [("loss", 3, 1), ("gradient", 4, 0), ("gradient", 4, 1)])
def test_what_is_not_finite_ends_the_run(run, monkeypatch, capsys, kind, step, grad_clip):
    """The loss, or only its gradient, is infinite at a step."""
    forward, steps = model.GPT.forward, count(1)

    def troubled(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        if torch.is_grad_enabled() and next(steps) == step:
            loss = loss * torch.inf if kind == "loss" else loss + (self.norm.weight.sum() * 0).sqrt()
        return logits, loss

    monkeypatch.setattr(model.GPT, "forward", troubled)
    intervals = "--log_interval=9 --eval_interval=9 --checkpoint_interval=2"  # it is looked for before a save
    command = f"{RUN} --gradient_accumulation_steps=1 --grad_clip={grad_clip} {intervals} --out_dir={WHOLE}"
    error = error_of(run, command, capsys)
    assert "the run has diverged at step 4" in error and "learning_rate = 0.003" in error
    assert load(WHOLE / "ckpt.pt")["iter_num"] == 2 and log_of(WHOLE)[-1]["event"] == "diverged"


# -- signals -------------------------------------------------------------------------------------------------

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]


def test_what_nohup_ignores_stays_ignored():
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    StopSignal().listen()
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_saves_and_says_how_to_go_on(run, monkeypatch, capsys, number):
    handlers = []

    def hear():
        signal.getsignal(number)(number, None)
        handlers.extend(map(signal.getsignal, SIGNALS))

    run(f"{RUN} --out_dir={WHOLE}")
    hear_signals()  # conftest.py gives the handlers back
    with monkeypatch.context() as until_here, pytest.raises(SystemExit) as end:
        in_step(3, until_here, hear)
        run(f"{RUN} --checkpoint_interval=9 --out_dir={RESUMED}")
    assert end.value.code == 128 + number
    assert handlers == [signal.SIG_DFL] * len(SIGNALS)  # a second signal ends the program at once
    shown = capsys.readouterr().out.splitlines()[-1]
    assert "stopped after step 3, saved in out/resumed/ckpt.pt" in shown
    assert load(RESUMED / "ckpt.pt")["iter_num"] == 3  # and not best.pt of step 2, which would also lead to the end
    run(shown.partition("to resume: python ")[2])
    assert_same_run()


def test_a_signal_is_heard_while_a_run_evaluates(run, monkeypatch, capsys):
    windows, batches = Dataset.windows, []

    def windows_and_signal(self, split, *rest):
        for x, y in windows(self, split, *rest):
            batches.append(split)
            if batches.count("val") == 2:
                signal.raise_signal(signal.SIGTERM)
            yield x, y

    run(f"{RUN} --out_dir={WHOLE} --eval_tokens=999")
    with monkeypatch.context() as until_here, pytest.raises(SystemExit) as end:
        until_here.setattr(Dataset, "windows", windows_and_signal)
        run(f"{RUN} --checkpoint_interval=9 --out_dir={RESUMED} --eval_tokens=999")
    assert end.value.code == 128 + signal.SIGTERM and batches.count("val") == 2
    assert log_of(RESUMED)[-1]["event"] == "step" and load(RESUMED / "ckpt.pt")["iter_num"] == 2
    run(f"{RESUME} --eval_tokens=999")
    assert_same_run()
    assert progress(RESUMED) == progress(WHOLE)
