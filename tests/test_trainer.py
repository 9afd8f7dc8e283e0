"""train.py is held to an explicit form of its loop, tests/trainer.py."""

from pathlib import Path

import pytest
import torch

import trainer
from config import read_settings
from conftest import TINY, load, prepare, progress

OUT = Path("out/x")
# enough tokens to walk the validation split to its end, which comes in the middle of a window
RUN = f"train.py {TINY} --dataset=text --out_dir={OUT} --dtype=float32 --max_iters=6"
RUN += " --eval_interval=4 --eval_tokens=400"
# characters take more bytes towards the end, where the validation split is
TEXT = "the quick brown fox jumps over the lazy dog.\n" * 40 + "Zwölf Boxkämpfer jagen Viktor quer über Sylt.\n" * 5

CASES = {
    "defaults": "",
    "clipped": "--grad_clip=0.2",
    "not clipped": "--grad_clip=0",
    "accumulated, clipped": "--gradient_accumulation_steps=4 --grad_clip=0.2",
    "cosine to 0.3": "--min_lr_frac=0.3",
    "linear to 0.3": "--lr_decay=linear --min_lr_frac=0.3",
    "constant, then linear to 0.3": "--lr_decay=wsd --min_lr_frac=0.3 --max_iters=12",
    "no decay": "--lr_decay=none --min_lr_frac=0.3",
    "no warm-up": "--warmup_iters=1",
    "nothing but warm-up": "--warmup_iters=9",
    "warm-up of an eighth": "--warmup_iters=0 --max_iters=17",
    "other betas": "--beta1=0.5 --beta2=0.6",
    "weight decay of matrices only": "--weight_decay=1 --bias --attention=summed_qk --qk_scale=5.4",
    "dropout": "--dropout=0.3 --gradient_accumulation_steps=4",
    "dropout of what is recomputed": "--dropout=0.3 --residual=m1",
    "tied": "--tie_weights",
    "the rate of τ": "--attention=w2 --weight_decay=1",
    "another seed and shape": "--seed=7 --n_kv_head=1 --n_inner=24 --norm_eps=0.1 --rope_theta=100",
    "float16": "--dtype=float16 --grad_clip=0.2",
    "bfloat16": "--dtype=bfloat16 --learning_rate=0",  # or the rounding of the updates would hide that of the losses
}


@pytest.mark.parametrize("name", CASES)
def test_the_loop_equals_the_explicit_one(repo, name):
    prepare("data/text", TEXT, "test")
    program, *arguments = f"{RUN} {CASES[name]}".split()
    repo([program, *arguments])
    settings = read_settings(program, arguments).values
    log, weights = trainer.train(settings)

    rounding = 1e-3 if settings["dtype"] == "float16" else 1e-5
    for line, expected in zip(progress(OUT), log, strict=True):
        assert line == pytest.approx(expected, rel=rounding)
    # a step moves a weight by up to 0.003, the learning rate
    torch.testing.assert_close(load(OUT / "ckpt.pt")["model"], weights, rtol=rounding, atol=rounding)
