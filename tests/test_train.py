"""train.py and sample.py as their users run them, on a small text, in a copy of the repository."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from torch.nn.functional import cross_entropy

from config.runtime import pick_dtype
from conftest import ROOT, TEXT, TINY, change_checkpoint, contents, load, log_of, prepare, shrink
from data.dataset import Dataset, load_dataset
from data.tokenizer import tokenizer_from_state
from model import GPT, GPTConfig

CONFIGS = sorted(path.name for path in (ROOT / "config").glob("*.py") if path.name not in ("__init__.py", "runtime.py"))
OUT = Path("out/x")
RUN = f"train.py {TINY} --out_dir={OUT}"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_trains_and_samples(repo, name):
    method = "config/m1_shakespeare.py " if name.startswith("size_") else ""
    shrink("train.py", f"config/{name}")
    repo(f"train.py {method}config/{name} --max_iters=2")
    shown = repo("sample.py --num_samples=1 --max_new_tokens=20")
    assert f"out/{'m1_shakespeare-' if method else ''}{Path(name).stem}/" in shown


def test_what_a_person_sees(repo):
    Path("data/shakespeare_char/meta.json").unlink()
    shrink("train.py")
    shown = repo("train.py config/m1_shakespeare.py")
    for words in (
        "running data/shakespeare_char/prepare.py",
        "m1 residual",
        r"step 4/4 +loss \S+ +gradient norm \S+ +lr \S+ +\S+ tokens/s   0:00:00 left",
        r"step 4 +train loss \S+ +validation loss \S+ +perplexity \S+ +bits per byte \S+",
        "python sample.py --out_dir=out/m1_shakespeare",
    ):
        assert re.search(words, shown), words


@pytest.mark.parametrize("arguments, name", [
    ("--attention=summed_qk --qk_scale=5.6", "shakespeare_char-attention=summed_qk-qk_scale=5.6"),
    ("--residual=m1 --keep_input", "shakespeare_char-residual=m1-keep_input"),
    ("--max_iters=3 --device=cpu", "shakespeare_char"),  # what a resumed run may change
    ("config/m1_shakespeare.py --seed=2 --max_iters=3", "m1_shakespeare-seed=2"),
    ("config/m1_shakespeare.py --dataset=./a*b", "m1_shakespeare-a_b"),
    ("config/m1_shakespeare.py --out_dir=out/here", "here"),
])  # fmt: skip
def test_a_folder_is_named_after_what_defines_the_run(repo, arguments, name):
    shrink("train.py")
    prepare("./a*b", TEXT, "test")
    repo(f"train.py {arguments}")
    assert Path(f"out/{name}/ckpt.pt").exists()


def test_runs_that_differ_have_folders_of_their_own_and_resume_there(repo):
    shrink("train.py")
    for options in ("", " --keep_input", " --seed=2"):
        repo(f"train.py config/m1_shakespeare.py{options}")
    repo("train.py config/m1_shakespeare.py --keep_input --init_from=resume --max_iters=5")
    repo("train.py --init_from=resume --max_iters=6")  # the newest run
    steps = {path.parent.name: load(path)["iter_num"] for path in Path("out").glob("*/ckpt.pt")}
    assert steps == {"m1_shakespeare": 4, "m1_shakespeare-keep_input": 6, "m1_shakespeare-seed=2": 4}


@pytest.mark.parametrize("options, idle", [
    ("", ["qk_scale", "sigma", "keep_input"]),
    ("--attention=summed_qk", ["sigma", "keep_input"]),
    ("--attention=w2 --residual=m1", ["qk_scale"]),
])  # fmt: skip
def test_settings_without_effect_are_noted(repo, options, idle):
    shown = repo(f"{RUN} --qk_scale=5.3 --sigma=diagonal --keep_input {options}".strip())
    assert re.findall(r"^NOTE    (\w+)", shown, re.MULTILINE) == idle


@pytest.mark.parametrize("max_iters, steps", [(60, [50, 60]), (220, [55, 110, 165, 220])])
def test_a_run_is_evaluated_four_times_but_no_more_than_every_50_steps(repo, max_iters, steps):
    repo(f"{RUN} --eval_interval=0 --max_iters={max_iters} --log_interval=1000 --n_layer=1")
    assert [line["step"] for line in log_of(OUT, "eval")] == steps


def test_auto_is_bfloat16_where_that_is_fast_and_does_not_leak(monkeypatch):
    for fast, of_cpu in (True, torch.bfloat16), (False, torch.float32):
        monkeypatch.setattr(torch.cpu, "get_capabilities", Mock(return_value={"avx512_bf16": fast}), raising=False)
        assert [pick_dtype("auto", torch.device(name)) for name in ("cpu", "mps")] == [of_cpu, torch.float32]
    with pytest.raises(ValueError, match="dtype = 'bfloat16' does not work on mps.*use float32"):
        pick_dtype("bfloat16", torch.device("mps"))


def test_an_edit_whose_operations_cannot_be_counted_trains(repo, monkeypatch):
    features = GPT.features
    edited = lambda self, idx, cache=None: features(self, idx + 0 * idx.sum().item(), cache)
    monkeypatch.setattr(GPT, "features", edited)
    repo(RUN)
    assert '"flops_per_token": null' in (OUT / "log.jsonl").read_text()


def test_a_closed_terminal_ends_no_run(repo, monkeypatch):
    monkeypatch.setattr("config.print", Mock(side_effect=BrokenPipeError), raising=False)
    repo(RUN)
    assert log_of(OUT, "end")


def test_the_warm_up_has_at_most_100_steps(repo, monkeypatch):
    monkeypatch.setattr(Dataset, "batch", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        repo(f"{RUN} --warmup_iters=0 --max_iters=10000")
    assert log_of(OUT, "start")[0]["settings"]["warmup_iters"] == 100


@torch.no_grad()
def loss_over(path, dataset):
    """Return the model's loss over all targets of a validation split, by windows from its first token on."""
    saved = load(path)
    model = GPT(GPTConfig(**saved["config"]))
    model.load_state_dict(saved["model"])
    tokens = torch.tensor(load_dataset(Path("data", dataset)).splits["val"].astype(int))
    pairs = zip(tokens[:-1].split(16), tokens[1:].split(16))
    return sum(cross_entropy(model(x[None])[0][0], y, reduction="sum") for x, y in pairs) / (len(tokens) - 1)


@pytest.mark.parametrize("name, dataset", [("best.pt", "shakespeare_char"), ("ckpt.pt", "text")])
def test_the_loss_over_all_of_a_split(repo, dataset, name):
    repo(f"{RUN} --max_iters=8 --learning_rate=1 --warmup_iters=8")  # learns at first, then diverges
    losses = [line["val_loss"] for line in log_of(OUT, "eval")]
    assert load(OUT / "best.pt")["best_val_loss"] == min(losses) < losses[-1]
    prepare("data/text", "".join(sorted(TEXT)), "the same letters")
    if name == "ckpt.pt":
        (OUT / "best.pt").unlink()
    before = contents(repo.folder)
    evaluate = f"train.py --eval_only --device=cpu --dtype=float32 --batch_size=3 --out_dir={OUT}"
    shown = repo(f"{evaluate} --dataset={dataset}")
    assert contents(repo.folder) == before
    loss = re.search(r"^validation loss (\S+) .* over all 288 tokens$", shown, re.MULTILINE)[1]
    assert float(loss) == pytest.approx(loss_over(OUT / name, dataset).item(), abs=1e-4)


def test_sampling_needs_the_checkpoint_alone(repo):
    prepare("data/shakespeare_bpe", TEXT, "test", "bpe", 300)
    repo(f"{RUN} --dataset=shakespeare_bpe")
    first = repo("sample.py --max_new_tokens=30")
    shutil.rmtree("data/shakespeare_bpe")
    assert repo("sample.py --max_new_tokens=30") == first
    assert repo("sample.py --max_new_tokens=30 --seed=2") != first


def test_a_large_vocabulary_is_rounded_up_and_sampled_below_that(repo):
    prepare("data/text", TEXT + "".join(map(chr, range(0x4E00, 0x4E00 + 10_000))), "test")
    repo(f"{RUN} --dataset=text --max_iters=1")
    assert load(OUT / "best.pt")["config"]["vocab_size"] == 10_048
    change_checkpoint(OUT / "best.pt", tokenizer={"kind": "char", "characters": "\nd"})
    assert set(repo("sample.py --max_new_tokens=50").partition("-" * 80)[2]) == set("\nd-")


def test_options_of_sampling(repo):
    """The likeliest token is that of --top_k=1, and nothing drops."""
    repo(f"{RUN} --dropout=0.5")
    ways = ("--temperature=0", "--top_k=1", "--top_k=3")
    likeliest, one, three = (repo(f"sample.py --num_samples=2 --max_new_tokens=50 {way}") for way in ways)
    assert likeliest == one != three
    _, first, second = likeliest.split("-" * 80 + "\n")
    assert first == second


def test_a_sample_is_one_document(repo, monkeypatch):
    """It ends where the next one begins. Without a prompt, it begins with what begins a document."""
    repo(RUN)
    command = "sample.py --num_samples=1 --max_new_tokens=60 --start=d"
    text = repo(command).rpartition("-\n")[2]
    begin = text[5]  # let this be the token that begins a document
    tokenizer = tokenizer_from_state(load(OUT / "ckpt.pt")["tokenizer"])
    monkeypatch.setattr("data.tokenizer.Tokenizer.document_start", tokenizer.encode(begin))
    assert repo(command).rpartition("-\n")[2] == text  # the run has not seen documents
    change_checkpoint(OUT / "best.pt", data=load(OUT / "best.pt")["data"] | {"documents": {"train": 2}})
    assert repo(command).rpartition("-\n")[2] == "d" + text[1:].partition(begin)[0] + "\n"
    with_prompt, without = (repo(f"sample.py --max_new_tokens=20{start}") for start in (f" --start={begin}", ""))
    assert without == with_prompt.replace(f"-\n{begin}", "-\n")


def test_which_checkpoint_is_sampled(repo):
    sample = "sample.py --num_samples=1 --max_new_tokens=1"
    repo(f"train.py {TINY} --max_iters=1 --out_dir=out/old")
    for path in Path("out/old").glob("*.pt"):
        os.utime(path, (1e9, 1e9))
    repo(f"train.py {TINY} --max_iters=1 --out_dir=elsewhere/sweep/a")
    Path("out/linked").symlink_to(Path("elsewhere").absolute())
    assert repo(sample).startswith("out/linked/sweep/a/best.pt")  # of the newest run
    assert repo(f"{sample} --out_dir=out/old --checkpoint=latest").startswith("out/old/ckpt.pt")
    Path("elsewhere/sweep/a/lock").touch()  # as in a run of compare.py
    assert repo(sample).startswith("out/old/best.pt")
    Path("elsewhere/sweep/a/lock").unlink()
    Path("elsewhere/sweep/a/best.pt").unlink()  # as in a run stopped before its first evaluation
    assert repo(sample).startswith("out/linked/sweep/a/ckpt.pt: step 1, test")


def test_start_text_on_a_terminal_of_any_encoding(repo):
    prepare("data/text", "Ein Gürtel, zwei Gürtel; viele Tücher.\n" * 50, "test", "bpe", 300)
    repo(f"{RUN} --dataset=text")
    Path("prompt.txt").write_text("zwei\n")
    assert "-\nzwei\n" in repo("sample.py --start=FILE:prompt.txt --max_new_tokens=3 --temperature=0")
    command = [sys.executable, "sample.py", "--start=FILE:-", "--max_new_tokens=5"]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    run = subprocess.run(command, input="Gürtel".encode(), capture_output=True, env=environment)
    assert "-\nGürtel" in run.stdout.decode("utf-8"), run.stderr.decode()
