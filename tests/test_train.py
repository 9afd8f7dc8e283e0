"""train.py and sample.py as their users run them, on a small text, in a copy of the repository."""

import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from data import prepare, sha256

from conftest import ROOT, TEXT, TINY, log_of, same

CONFIGS = sorted(path.name for path in (ROOT / "config").glob("*.py") if path.name != "__init__.py")
METHODS = [name for name in CONFIGS if name.endswith("_shakespeare.py")]


def weights(path):
    return torch.load(path, weights_only=True)["model"]


@pytest.mark.parametrize("name", [*METHODS, "race_cpu.py"])
def test_every_config_trains_and_samples(repo, name):
    repo(f"train.py config/{name} {TINY} --max_iters=2")
    assert f"out/{Path(name).stem}/" in repo("sample.py --num_samples=1 --max_new_tokens=20")


def test_configs_of_methods_differ_in_the_method_alone():
    names = {"__name__", "dataset", "attention", "residual", "qk_scale"}
    for name in METHODS:
        public = {key for key in runpy.run_path(str(ROOT / "config" / name)) if not key.startswith("_")}
        assert public <= names, name


@pytest.mark.parametrize("size", [name for name in CONFIGS if name.startswith("size_")])
def test_sizes_go_with_methods(repo, size):
    repo(f"train.py config/m1_shakespeare.py config/{size} {TINY} --max_iters=2 --grad_accum_steps=1")
    repo("sample.py --num_samples=1 --max_new_tokens=20")
    settings = log_of(f"out/m1_shakespeare-{Path(size).stem}")[0]["settings"]
    assert settings["residual"] == "m1"
    assert settings["learning_rate"] == runpy.run_path(f"config/{size}")["learning_rate"]


def test_what_a_person_sees(repo):
    Path("data/shakespeare_char/meta.json").unlink()
    shown = repo(f"train.py config/m1_shakespeare.py {TINY}")
    assert "running data/shakespeare_char/prepare.py" in shown
    for word in ("m1 residual", "parameters", "tokens to train on", "cpu", "tokens/s", "left", "MFU n/a"):
        assert word in shown
    assert re.search(r"step 4 .*train loss \S+ +validation loss \S+ +perplexity \S+ +bits per byte \S+", shown)
    assert "python sample.py --out_dir=out/m1_shakespeare" in shown
    assert "\r" not in shown  # not a terminal


def test_exactly_max_iters_updates_and_all_in_the_log(repo):
    repo(f"train.py {TINY} --max_iters=5 --out_dir=out/x")
    events = log_of("out/x")
    assert [line["step"] for line in events if line["event"] == "step"] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in events if line["event"] == "eval"] == [2, 4, 5]
    assert events[0]["event"] == "start" and events[-1]["event"] == "end"
    assert torch.load("out/x/ckpt.pt", weights_only=True)["optimizers"][0][0]["step"] == 5


def test_first_loss_is_that_of_a_guess(repo):
    repo(f"train.py {TINY} --max_iters=1 --out_dir=out/x")
    (step,) = [line for line in log_of("out/x") if line["event"] == "step"]
    # logits of unit variance cost half a nat on top of an even guess
    assert step["loss"] == pytest.approx(math.log(len(set(TEXT))) + 0.5, abs=0.3)


def test_warning_of_a_stand_in_text_is_repeated(repo):
    prepare("data/shakespeare_char", TEXT, "a stand-in", warning="these losses do not compare")
    assert "NOTE    these losses do not compare" in repo(f"train.py {TINY}")
    assert "NOTE: these losses do not compare" in repo("sample.py --max_new_tokens=2")


def test_evaluating_does_not_change_the_run(repo):
    repo(f"train.py {TINY} --dropout=0.3 --eval_interval=1 --out_dir=out/often")
    repo(f"train.py {TINY} --dropout=0.3 --eval_interval=9 --out_dir=out/once")
    assert same(weights("out/often/ckpt.pt"), weights("out/once/ckpt.pt"))


def test_accumulated_steps_match_a_large_batch(repo):
    repo(f"train.py {TINY} --dtype=float32 --batch_size=4 --out_dir=out/one")
    repo(f"train.py {TINY} --dtype=float32 --batch_size=2 --grad_accum_steps=2 --out_dir=out/two")
    one, two = weights("out/one/ckpt.pt"), weights("out/two/ckpt.pt")
    for name in one:
        torch.testing.assert_close(one[name], two[name])


def test_best_is_never_worse_than_latest(repo):
    repo(f"train.py {TINY} --max_iters=8 --learning_rate=0.3 --warmup_iters=0 --out_dir=out/x")
    losses = [line["val_loss"] for line in log_of("out/x") if line["event"] == "eval"]
    assert torch.load("out/x/best.pt", weights_only=True)["val_loss"] == min(losses)
    assert torch.load("out/x/ckpt.pt", weights_only=True)["val_loss"] == losses[-1]


def test_eager_where_compiling_fails(repo, monkeypatch):
    def broken(function):
        def fail(*_, **__):
            raise RuntimeError("no compiler here\nand much more")

        return fail

    stances = []
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(torch.compiler, "set_stance", lambda stance: stances.append(stance) or nullcontext())
    with pytest.raises(RuntimeError):  # the broken functions stay broken here, as the stance is not real
        repo(f"train.py {TINY} --compile=true")
    assert stances == ["force_eager"]


def test_compiled_run_gives_the_eager_losses(repo):
    common = f"train.py {TINY} --dtype=float32 --residual=m1 --sample_tokens=0"
    repo(f"{common} --out_dir=out/eager --compile=false")
    repo(f"{common} --out_dir=out/compiled --compile=true")
    eager, compiled = weights("out/eager/ckpt.pt"), weights("out/compiled/ckpt.pt")
    assert eager.keys() == compiled.keys()
    for name in eager:
        torch.testing.assert_close(eager[name], compiled[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_checkpoint_is_plain_data(repo, dtype):
    repo(f"train.py {TINY} --dtype={dtype} --out_dir=out/x")
    saved = torch.load("out/x/ckpt.pt", weights_only=True)
    assert saved["settings"]["dtype"] == dtype and saved["step"] == 4
    assert all(tensor.dtype == torch.float32 for tensor in saved["model"].values())


def test_sampling_needs_the_checkpoint_alone(repo):
    repo(f"train.py {TINY} --dataset=shakespeare_bpe --out_dir=out/x")
    first = repo("sample.py --max_new_tokens=30")
    shutil.rmtree("data/shakespeare_bpe")
    assert repo("sample.py --max_new_tokens=30") == first
    assert repo("sample.py --max_new_tokens=30 --seed=2") != first


def test_newest_run_is_sampled(repo):
    for name in ("b", "a"):
        repo(f"train.py {TINY} --max_iters=1 --out_dir=out/{name}")
    os.utime("out/b/ckpt.pt", (1e9, 1e9))
    assert repo("sample.py --max_new_tokens=1").startswith("out/a/best.pt")
    assert repo("sample.py --max_new_tokens=1 --out_dir=out/b --checkpoint=latest").startswith("out/b/ckpt.pt")


def test_a_run_stopped_before_its_first_evaluation_is_sampled(repo):
    repo(f"train.py {TINY}")
    Path("out/shakespeare_char/best.pt").unlink()
    assert repo("sample.py --max_new_tokens=1").startswith("out/shakespeare_char/ckpt.pt")


def test_start_text(repo):
    repo(f"train.py {TINY}")
    assert "-\nthe dog" in repo(["sample.py", "--start=the dog", "--max_new_tokens=3", "--top_k=3", "--top_p=0.9"])
    Path("prompt.txt").write_text("fox\n")
    assert "-\nfox\n" in repo("sample.py --start=FILE:prompt.txt --max_new_tokens=3 --temperature=0")


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_tokens_outside_the_vocabulary_are_refused(repo, capsys, name):
    path, meta_path = Path("data/shakespeare_char") / name, Path("data/shakespeare_char/meta.json")
    path.write_bytes(b"\xff" * path.stat().st_size)
    meta = json.loads(meta_path.read_text())
    meta["sha256"][path.stem] = sha256(path.read_bytes())  # a hash that vouches for them
    meta_path.write_text(json.dumps(meta))
    with pytest.raises(SystemExit) as end:
        repo(f"train.py {TINY} --out_dir=out/x")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and f"{name} has token 65535" in error


def test_diverged_run_stops_and_saves_nothing(repo, capsys):
    with pytest.raises(SystemExit) as end:
        repo(f"train.py {TINY} --learning_rate=1e38 --warmup_iters=0 --out_dir=out/x")
    error = capsys.readouterr().err
    assert end.value.code == 2 and error.count("\n") == 1 and "learning_rate" in error
    assert not Path("out/x/ckpt.pt").exists()
    repo(f"train.py {TINY} --out_dir=out/x")  # a folder with a log alone is free


def test_new_text_is_prepared_again(repo):
    repo(f"train.py {TINY}")
    Path("data/shakespeare_char/input.txt").write_text(TEXT.upper())
    assert "running data/shakespeare_char/prepare.py" in repo(f"train.py {TINY} --out_dir=out/upper")


def test_a_run_is_overwritten_if_asked(repo):
    repo(f"train.py {TINY}")
    repo(f"train.py {TINY} --overwrite=true")
    assert len([line for line in log_of("out/shakespeare_char") if line["event"] == "start"]) == 1


def test_unprepared_own_text_says_what_to_do(repo):
    run = subprocess.run(
        [sys.executable, "train.py", "--dataset=text"], capture_output=True, text=True, encoding="utf-8"
    )
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1 and "data/text/prepare.py my.txt" in run.stderr
    assert not Path("out").exists()


def test_own_text_from_the_command_line(repo):
    Path("my.txt").write_text("Ein Gürtel, zwei Gürtel; viele Tücher.\n" * 50, encoding="utf-8")
    for command in (
        ["data/text/prepare.py", "my.txt", "--tokenizer=bpe", "--vocab_size=300"],
        ["train.py", "--dataset=text", *TINY.split()],
        ["sample.py", "--start=Gürtel", "--max_new_tokens=5"],
    ):
        run = subprocess.run([sys.executable, *command], capture_output=True, text=True, encoding="utf-8")
        assert run.returncode == 0, run.stderr
    assert "Gürtel" in run.stdout
