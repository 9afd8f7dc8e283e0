"""From a run to another one: --init_from=run: and --tokenizer=run:."""

import re
import shutil
from pathlib import Path

import pytest
import torch

from conftest import TINY, change_checkpoint, load, log_of, refused, shrink
from model import GPT, GPTConfig

SOURCE = f"{TINY} --n_head=4 --n_kv_head=2 --tie_weights=true --learning_rate=0.03 --out_dir=out/source"
SAME = "--batch_size=2 --warmup_iters=2 --eval_tokens=64 --log_interval=1 --eval_interval=2 --device=cpu"
NEXT = f"{SAME} --out_dir=out/next --init_from=run:out/source --max_iters=1 --learning_rate=0"
BECOMES = [  # the source's method, what is given, and the weights that the source has not
    ("--attention=w2 --residual=m4.2", "--residual=m3.2 --keep_input --qk_scale=5.3", []),
    ("--attention=summed_qk --qk_scale=5.6 --residual=m3.2", "--attention=w2", ["sigma_k", "sigma_q", "tau_shift"]),
    ("--attention=summed_qk --qk_scale=5.5", "--qk_scale=5.7", ["log_a"]),  # of the same name and another meaning
    ("--attention=summed_qk --qk_scale=5.5", "--attention=standard --residual=m3.2", ["mix"]),
    ("--attention=summed_qk --qk_scale=5.5 --residual=m1", "--residual=m3.2", ["mix"]),
]


@pytest.mark.parametrize("source, given, others", BECOMES)
def test_a_run_starts_where_another_is(repo, source, given, others):
    """It has all weights of best.pt that fit; what only the new model has is as in one that starts from scratch."""
    repo(f"train.py {SOURCE} {source}")
    change_checkpoint("out/source/ckpt.pt", model={})
    shown = repo(f"train.py {NEXT} {given}")
    old, new = load("out/source/best.pt"), load("out/next/ckpt.pt")
    torch.manual_seed(1337)
    initial = GPT(GPTConfig(**new["config"])).state_dict()
    left = {name for name in initial if set(others) & set(name.split("."))}
    for name, tensor in new["model"].items():
        torch.testing.assert_close(tensor, initial[name] if name in left else old["model"][name], rtol=0, atol=0)
    gone = {name for name in old["model"] if name not in initial or name in left}
    noted = re.findall("NOTE    (?:new weights, not from|weights not copied from) run:out/source: (.*)", shown)
    listed = [", ".join(sorted({re.sub(r"blocks\.\d+", "blocks.*", name) for name in names})) for names in (left, gone)]
    assert noted == [names for names in listed if names]


def test_what_makes_the_model_comes_from_the_other_run(repo):
    repo(f"train.py {SOURCE} --attention=w2 --sigma=diagonal --residual=m1 --keep_input --dropout=0.2")
    repo(f"train.py {NEXT} --residual=m4.1 --block_size=8")
    (start,), old = log_of("out/next", "start"), load("out/source/best.pt")
    assert start["config"] == old["config"] | {"residual": "m4.1", "block_size": 8}


def test_another_runs_name_is_in_the_folders(repo):
    shrink("train.py")
    repo("train.py --attention=w2 --out_dir=out/source")
    shutil.copy("out/source/best.pt", "out/source/step2.pt")
    repo("train.py config/m1_shakespeare.py --init_from=run:out/source")
    repo("train.py --init_from=run:out/source/step2.pt --attention=standard")
    made = {"m1_shakespeare-from=source", "shakespeare_char-from=source_step2.pt-attention=standard"}
    assert {path.name for path in Path("out").iterdir()} == {"source", *made}


def test_another_run_needs_its_size_and_its_tokens(repo, capsys):
    repo(f"train.py {SOURCE} --residual=m1")
    assert "n_layer = 3 (was 2)" in refused(repo, f"train.py {NEXT} --n_layer=3 --n_head=4", capsys)
    Path("my.txt").write_text("the lazy dog\n" * 99)
    repo("data/text/prepare.py my.txt")
    error = refused(repo, f"train.py {NEXT} --dataset=text", capsys)
    assert "dataset = 'text'" in error and "--tokenizer=run:out/source" in error
    repo("data/text/prepare.py my.txt --tokenizer=run:out/source")
    repo(f"train.py {NEXT} --dataset=text")
