"""A run that is stopped, killed or short of disk is, in the end, the run that nothing happened to."""

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

import data
import model
from conftest import TEXT, TINY, log_of, refused, same

WHOLE, RESUMED = Path("out/whole"), Path("out/resumed")
RUN = f"train.py {TINY} --max_iters=6 --dropout=0.2 --grad_accum_steps=2 --sample_tokens=0 --checkpoint_interval=1"
METHODS = [(kind, residual) for kind in model.ATTENTIONS for residual in model.RESIDUALS]


@pytest.fixture
def run(repo, monkeypatch):
    """`repo`, which keeps every ckpt.pt of out/whole as steps/<step>.pt."""
    save = torch.save

    def save_twice(state, file):
        save(state, file)
        path = Path(file.name)
        if path.parent == WHOLE and path.name.startswith("ckpt.pt"):
            save(state, f"steps/{state['step']}.pt")

    Path("steps").mkdir()
    monkeypatch.setattr(torch, "save", save_twice)
    return repo


def kill_after(step):
    """Makes out/resumed what out/whole would have left, had it been killed before its next save."""
    shutil.rmtree(RESUMED, ignore_errors=True)
    shutil.copytree(WHOLE, RESUMED)
    shutil.copy(f"steps/{step}.pt", RESUMED / "ckpt.pt")


def losses(folder, event="step"):
    """(step, training loss, validation loss) of the log's lines of a kind, in their order."""
    lines = [line for line in log_of(folder) if line["event"] == event]
    return [(line["step"], line.get("loss"), line.get("val_loss")) for line in lines]


def assert_same_run(a=WHOLE, b=RESUMED):
    a, b = (torch.load(folder / "ckpt.pt", weights_only=True) for folder in (a, b))
    for part in ("step", "model", "optimizers", "scaler"):
        assert same(a[part], b[part]), part


# -- exact resume --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind, residual", METHODS)
def test_every_method_resumes_exactly(run, kind, residual):
    command = f"{RUN} --attention={kind} --residual={residual} --qk_scale=5.6"
    run(f"{command} --out_dir={WHOLE}")
    kill_after(3)
    run(f"{command} --out_dir={RESUMED} --init_from=resume")
    assert_same_run()
    assert losses(RESUMED) == losses(WHOLE) and losses(RESUMED, "eval") == losses(WHOLE, "eval")


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resumes_exactly_after_any_step_and_with_other_intervals(run, optimizer):
    command = f"{RUN} --attention=w2 --residual=m3.2 --keep_input --optimizer={optimizer}"
    run(f"{command} --out_dir={WHOLE}")
    for step in range(1, 6):
        kill_after(step)
        others = f"--eval_interval={step} --log_interval=2 --checkpoint_interval={7 - step}"
        run(f"{command} --out_dir={RESUMED} --init_from=resume {others}")
        assert_same_run()
        assert set(losses(RESUMED)) <= set(losses(WHOLE))


def test_scale_of_float16_is_resumed(run, monkeypatch):
    # so high that gradients overflow at first, whereupon the step is skipped and the scale halved
    monkeypatch.setattr(torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=2.0**40))
    command = f"{RUN} --dtype=float16 --max_iters=30 --log_interval=1"
    run(f"{command} --out_dir={WHOLE}")
    scales = [torch.load(f"steps/{step}.pt", weights_only=True)["scaler"]["scale"] for step in (2, 29)]
    assert scales[0] == 2.0**38 and scales[1] > 1
    for step in (2, 29):
        kill_after(step)
        run(f"{command} --out_dir={RESUMED} --init_from=resume")
        assert_same_run()


@pytest.mark.parametrize("dtype", ["auto", "float32"])
def test_what_auto_came_to_is_kept(run, capsys, dtype):
    run(f"{RUN} --dtype={dtype} --out_dir={WHOLE}")
    kill_after(3)
    came_to = torch.load("steps/3.pt", weights_only=True)["settings"]["dtype"]
    run(f"{RUN} --dtype={came_to} --out_dir={RESUMED} --init_from=resume")
    other = {"float32": "bfloat16", "bfloat16": "float32"}[came_to]
    kill_after(3)
    error = refused(run, f"{RUN} --dtype={other} --out_dir={RESUMED} --init_from=resume", capsys)
    assert f"dtype = '{other}'" in error and f"'{came_to}'" in error


def test_best_serves_where_there_is_no_latest(run):
    command = f"{RUN} --eval_interval=2 --checkpoint_interval=9"
    run(f"{command} --out_dir={WHOLE}")
    shutil.copytree(WHOLE, RESUMED)
    (RESUMED / "ckpt.pt").unlink()
    assert torch.load(RESUMED / "best.pt", weights_only=True)["step"] == 6
    run(f"{command} --max_iters=8 --out_dir={RESUMED} --init_from=resume")
    run(f"{command} --max_iters=8 --out_dir={WHOLE} --init_from=resume")
    assert_same_run()


def test_another_machine_is_said(run):
    run(f"{RUN} --out_dir={WHOLE}")
    kill_after(3)
    saved = torch.load(RESUMED / "ckpt.pt", weights_only=True)
    torch.save(saved | {"machine": "an abacus"}, RESUMED / "ckpt.pt")
    assert "an abacus" in run(f"{RUN} --out_dir={RESUMED} --init_from=resume")


# -- files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("torn", [b'{"event": "st', b'{"event": "step", "step": 4}', b"\x00\x00\x00", b"\xff{"])
def test_torn_log_line_is_dropped(run, torn):
    run(f"{RUN} --out_dir={WHOLE}")
    kill_after(3)
    with open(RESUMED / "log.jsonl", "rb") as log:
        lines = [line for line in log if json.loads(line)["step"] <= 3]
    (RESUMED / "log.jsonl").write_bytes(b"".join(lines) + torn)
    run(f"{RUN} --out_dir={RESUMED} --init_from=resume")
    assert losses(RESUMED) == losses(WHOLE)
    assert [line["event"] for line in log_of(RESUMED)].count("resume") == 1


def test_best_is_never_worse_even_if_newer_than_the_latest(run):
    command = f"{RUN} --learning_rate=0.3 --warmup_iters=6"  # learns at first, then diverges
    run(f"{command} --eval_interval=1 --out_dir={WHOLE}")
    lowest = min(losses(WHOLE, "eval"), key=lambda line: line[2])
    assert 1 < lowest[0] < 6  # or this would test nothing
    kill_after(1)
    run(f"{command} --eval_interval=6 --out_dir={RESUMED} --init_from=resume")
    assert torch.load(RESUMED / "best.pt", weights_only=True)["val_loss"] == lowest[2]


def test_checkpoints_do_not_wait_for_evaluations(run):
    common = f"{RUN} --eval_interval=6 --out_dir={WHOLE} --overwrite"
    for interval, expected in {"--checkpoint_interval=4": "46", "--checkpoint_minutes=1e-9": "123456"}.items():
        shutil.rmtree("steps")
        Path("steps").mkdir()
        run(f"{common} --checkpoint_interval=9 {interval}")
        assert sorted(path.stem for path in Path("steps").glob("*.pt")) == list(expected)


def test_second_process_in_a_folder_is_refused(run, capsys):
    run(f"{RUN} --max_iters=3 --lr_decay=none --out_dir={WHOLE}")
    command = f"{RUN} --lr_decay=none --out_dir={WHOLE} --init_from=resume"
    with open(WHOLE / "log.jsonl", "ab") as log:
        fcntl.flock(log, fcntl.LOCK_EX)
        assert "another process" in refused(run, command, capsys)
        assert "another process" in refused(run, f"{RUN} --out_dir={WHOLE} --overwrite", capsys)
    run(command)


def test_leftovers_of_killed_processes_are_cleared(run):
    RESUMED.mkdir(parents=True)
    (RESUMED / "log.jsonl").touch()
    (RESUMED / "ckpt.pt.4711.tmp").write_bytes(b"half a checkpoint")
    run(f"{RUN} --out_dir={RESUMED}")
    assert sorted(path.name for path in RESUMED.iterdir()) == ["best.pt", "ckpt.pt", "log.jsonl"]


def full_disk(monkeypatch, fails):
    """From now on saving breaks off, after some bytes, whenever fails(step)."""
    save = torch.save

    def save_or_fail(state, file):
        if fails(state["step"]):
            file.write(b"PK")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(state, file)

    monkeypatch.setattr(torch, "save", save_or_fail)


def test_training_goes_on_when_the_disk_is_full(run, monkeypatch):
    run(f"{RUN} --out_dir={WHOLE}")
    full_disk(monkeypatch, lambda step: 2 <= step <= 4)
    shown = run(f"{RUN} --out_dir={RESUMED}")
    for step in (2, 3, 4):
        assert f"NOT SAVED: out/resumed/ckpt.pt at step {step}: No space left on device" in shown
    assert_same_run()
    assert not list(RESUMED.glob("*.tmp"))


def test_a_run_that_could_not_be_saved_ends_in_an_error(run, monkeypatch, capsys):
    run(f"{RUN} --out_dir={WHOLE}")
    with monkeypatch.context() as until_here:
        full_disk(until_here, lambda step: step > 3)
        with pytest.raises(SystemExit) as end:
            run(f"{RUN} --out_dir={RESUMED}")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert "step 6 could not be saved" in error and "out/resumed holds step 3" in error
    run(error.partition("then python ")[2].partition(";")[0])  # what it says to do
    assert_same_run()


class FullDisk(io.FileIO):
    """A file that takes a few bytes of some lines, none of others, and all of those after."""

    room = [7, 0, None, 3, None]

    def write(self, line):
        room = self.room.pop(0) if self.room else len(line)
        if room is None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(line[:room])


def test_log_lines_wait_for_room(run, monkeypatch):
    run(f"{RUN} --out_dir={WHOLE}")
    opened = open
    monkeypatch.setattr("builtins.open", lambda path, mode="r", *rest, **more: (
        FullDisk(path, "ab") if mode == "ab" else opened(path, mode, *rest, **more)
    ))  # fmt: skip
    shown = run(f"{RUN} --out_dir={RESUMED}")
    assert shown.count("NOT WRITTEN: out/resumed/log.jsonl") == 2
    assert losses(RESUMED) == losses(WHOLE)


# -- trouble -------------------------------------------------------------------------------------------------


def trouble(monkeypatch, steps, kind):
    """Makes the loss, or only its gradient, infinite at some steps."""
    forward, calls = model.GPT.forward, iter(range(1, 10**9))

    def troubled(self, idx, targets=None):
        logits, loss = forward(self, idx, targets)
        if torch.is_grad_enabled() and next(calls) in steps:
            loss = loss * torch.inf if kind == "loss" else loss + (self.norm.weight.sum() * 0).sqrt()
        return logits, loss

    monkeypatch.setattr(model.GPT, "forward", troubled)


ONE = f"{RUN} --grad_accum_steps=1"  # a call of the model per step


@pytest.mark.parametrize("kind", ["loss", "gradient"])
@pytest.mark.parametrize("grad_clip", [0, 1])
@pytest.mark.parametrize("checkpoint_interval", [2, 3])
def test_what_is_not_finite_stops_the_run(run, monkeypatch, capsys, kind, grad_clip, checkpoint_interval):
    trouble(monkeypatch, {3}, kind)
    intervals = f"--log_interval=5 --eval_interval=5 --checkpoint_interval={checkpoint_interval}"
    with pytest.raises(SystemExit) as end:
        run(f"{ONE} --grad_clip={grad_clip} {intervals} --out_dir={WHOLE}")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and "not finite at step 3" in error
    if checkpoint_interval == 2:
        assert "out/whole holds step 2" in error
        assert torch.load(WHOLE / "ckpt.pt", weights_only=True)["step"] == 2
    else:
        assert "nothing has been saved" in error and not (WHOLE / "ckpt.pt").exists()


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_bad_steps_are_skipped_if_asked(run, monkeypatch, kind):
    trouble(monkeypatch, {2, 3, 5}, kind)
    shown = run(f"{ONE} --skip_bad_steps=2 --out_dir={WHOLE}")
    assert [f"step {step} is skipped" in shown for step in range(1, 7)] == [False, True, True, False, True, False]
    assert torch.load(WHOLE / "ckpt.pt", weights_only=True)["step"] == 6
    before, after = (torch.load(f"steps/{step}.pt", weights_only=True)["model"] for step in (1, 3))
    assert same(before, after)
    kill_after(3)
    trouble(monkeypatch, {2}, kind)
    run(f"{ONE} --skip_bad_steps=2 --out_dir={RESUMED} --init_from=resume")
    assert [step for step, _, _ in losses(RESUMED, "skipped")] == [2, 3, 5]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_too_many_bad_steps_in_a_row(run, monkeypatch, capsys, dtype):
    trouble(monkeypatch, {2, 4, 5}, "loss")
    with pytest.raises(SystemExit):
        run(f"{ONE} --skip_bad_steps=1 --dtype={dtype} --out_dir={WHOLE}")
    error = capsys.readouterr().err
    assert "step 5 and the 1 before it" in error and "holds step 4" in error


def test_bad_steps_in_a_row_are_counted_over_a_resume(run, monkeypatch, capsys):
    trouble(monkeypatch, {4, 5}, "loss")
    run(f"{ONE} --skip_bad_steps=2 --out_dir={WHOLE}")
    kill_after(4)
    trouble(monkeypatch, {1}, "loss")
    with pytest.raises(SystemExit):
        run(f"{ONE} --skip_bad_steps=1 --out_dir={RESUMED} --init_from=resume")
    assert "step 5" in capsys.readouterr().err


def test_data_changed_under_a_run_stops_it(run, monkeypatch, capsys):
    path = Path("data/shakespeare_char/train.bin")
    batch = data.Dataset.batch

    def meddle(self, seed, step, *rest):
        if step == 3:
            os.utime(path, (1, 1))
        return batch(self, seed, step, *rest)

    monkeypatch.setattr(data.Dataset, "batch", meddle)
    with pytest.raises(SystemExit) as end:
        run(f"{RUN} --out_dir={WHOLE}")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1
    assert "train.bin has changed" in error and "holds step 3" in error


def test_data_changed_before_a_resume_is_refused(run, capsys):
    run(f"{RUN} --out_dir={WHOLE}")
    kill_after(3)
    command = f"{RUN} --out_dir={RESUMED} --init_from=resume"
    folder = Path("data/shakespeare_char")
    good = (folder / "train.bin").read_bytes()
    (folder / "train.bin").write_bytes(good[:-2] + good[:2])
    assert "train.bin is not what prepare.py wrote" in refused(run, command, capsys)
    data.prepare(folder, TEXT.replace("fox", "ox "), "another text")
    capsys.readouterr()
    assert "is not what out/resumed/ckpt.pt was trained on" in refused(run, command, capsys)
    data.prepare(folder, TEXT, "the same text from another file")
    run(command)
    assert_same_run()


# -- signals -------------------------------------------------------------------------------------------------


def hear_signals():
    """Undoes what nohup, or a shell that starts the tests in the background, makes its processes ignore."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def start(*settings):
    """A training process that has come to its first log line, and shows them."""
    command = [sys.executable, *RUN.split(), *settings, f"--out_dir={RESUMED}"]
    pipe = dict(stdout=subprocess.PIPE, text=True, encoding="utf-8")
    process = subprocess.Popen(command, **pipe, preexec_fn=hear_signals)
    while not process.stdout.readline().startswith("step 1/"):
        assert process.poll() is None
    return process


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(run, number):
    process = start("--max_iters=100000", "--lr_decay=none", "--checkpoint_interval=1000")
    process.send_signal(number)
    shown = process.communicate(timeout=60)[0].splitlines()[-1]
    assert process.returncode == 128 + number
    step = torch.load(RESUMED / "ckpt.pt", weights_only=True)["step"]
    assert f"stopped after step {step}" in shown
    command = shown.partition("to go on: python ")[2]
    run(f"{command} --max_iters={step + 2}")
    run(f"{RUN} --lr_decay=none --max_iters={step + 2} --out_dir={WHOLE}")
    assert_same_run()


def test_a_second_signal_ends_the_program_at_once(run):
    process = start("--max_iters=2", "--grad_accum_steps=120")  # steps of a second or more
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == -signal.SIGINT
    process.stdout.close()


def test_a_run_outlives_its_terminal(run):
    process = start("--max_iters=30")
    process.stdout.close()
    assert process.wait(60) == 0
    assert torch.load(RESUMED / "ckpt.pt", weights_only=True)["step"] == 30
