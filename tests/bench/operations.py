"""What a step of a variant's train.py costs: all its matrix products, as PyTorch counts them while it runs."""

import math
import runpy
import sys
from contextlib import nullcontext

import torch
from torch.utils.flop_counter import FlopCounterMode

STEPS = 2, 18  # of two short runs: they differ by the operations of 16 steps
SHORT = "--eval_interval=1000 --checkpoint_interval=1000 --eval_tokens=64 --compile=false --tensorboard=false"
SHORT += " --wandb=false --seed=0"


def recurrent(x, weights, *more, **_):
    weights = weights if isinstance(weights, list) else (weights, more[0])
    return 2 * math.prod(x[:-1]) * sum(math.prod(weight) for weight in weights if len(weight) == 2)


def trilinear(a, b, c, *expanded, **_):
    """A sum over the products of three tensors, after each got new dimensions of size 1."""
    shapes = [list(a), list(b), list(c)]
    for shape, dims in zip(shapes, expanded):
        for dim in sorted(dims):
            shape.insert(dim, 1)
    return 2 * math.prod(map(max, *shapes))


def distances(a, b, *_, out_shape, **__):
    return 2 * math.prod(out_shape) * a[-1]


def attention(q, k, v, *_, **__):
    return 2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


FORMULAS = {  # of what PyTorch's counter passes over, from the shapes of the arguments
    "mkldnn_rnn_layer": recurrent,
    "mkldnn_rnn_layer_backward": lambda *shapes, **_: 2 * recurrent(*shapes),
    "_cudnn_rnn": recurrent,
    "_cudnn_rnn_backward": lambda *shapes, **_: 2 * recurrent(*shapes),
    "_trilinear": trilinear,
    "_cdist_forward": distances,
    "_cdist_backward": lambda grad, a, *_, **__: 2 * math.prod(grad) * a[-1],
    "_euclidean_dist": distances,
    **dict.fromkeys(("mv", "addmv", "dot"), lambda *shapes, **_: 2 * math.prod(shapes[-2])),
    "_scaled_dot_product_flash_attention_for_cpu": attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, *qkv, **_: 2 * attention(*qkv),
}
FORMULAS = {getattr(torch.ops.aten, name): formula for name, formula in FORMULAS.items()}


def use_plain_attention():
    """Let no program of this process choose a fused kernel, for which some vectors are padded."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_flash_sdp = lambda enabled: None


def train_briefly(home, options, folder, count=True):
    """Run train.py in this process, for 2 and for 18 steps. Return the operations of a step."""
    totals = []
    for steps in STEPS:
        sys.argv = [f"{home}/train.py", *options, *SHORT.split(), f"--max_iters={steps}", f"--out_dir={folder}/{steps}"]
        counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        try:
            with counter if count else nullcontext():
                runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        totals.append(counter.get_total_flops())
    return (totals[1] - totals[0]) / (STEPS[1] - STEPS[0])
