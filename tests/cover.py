"""What the tests vary: all that model.py's tables have, so that what is added to them is tested."""

import random

import torch

from model import CHOICES

OPTIONS = {"w2": "sigma", "summed_qk": "qk_scale"}  # kinds with a setting that only they read

KINDS = {}  # a kind's name here, with the value of its option: its settings
for kind in CHOICES["attention"]:
    option = OPTIONS.get(kind)
    for value in CHOICES.get(option, [None]):
        name = f"{kind.removesuffix('_qk')}-{value}" if option else kind
        KINDS[name] = {"attention": kind} | ({option: value} if option else {})

METHODS = {}
for residual in CHOICES["residual"]:
    METHODS[residual] = {"residual": residual}
    if residual != "standard":
        METHODS[residual + "+input"] = {"residual": residual, "keep_input": True}

GRID = [(kind, method) for kind in KINDS for method in METHODS]

# values of the other settings that change what a model computes (dropout has tests of its own): each row of COVER has
# some of them, drawn at random, always the same
OTHERS = {
    "n_kv_head": (0, 2, 1),
    "bias": (False, True),
    "tie_weights": (False, True),
    "rope_theta": (10000.0, 500.0),
    "norm_eps": (1e-5, 1e-2),
}
rng = random.Random(2)
COVER = [
    KINDS[kind] | METHODS[method] | {name: rng.choice(values) for name, values in OTHERS.items()}
    for kind, method in GRID
]
K, M = len(KINDS), len(METHODS)
FEW = [COVER[i % K * M + i % M] for i in range(max(K, M))]  # every kind and every method

TINY = dict(block_size=16, vocab_size=19, n_layer=3, n_head=4, n_embd=32, n_inner=24)


def settings(kind, method, **changes):
    """A tiny configuration of a kind and a method, as a dict of GPTConfig's arguments."""
    return {**TINY, **KINDS[kind], **METHODS[method], **changes}


def perturb(model, seed=0):
    """Move every parameter away from its initial value, so that nothing is tested at 0 or 1."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=rng, dtype=torch.float64).to(p.dtype)
            if p.dim() >= 2:
                p.copy_(noise / p.shape[-1] ** 0.5)
            else:
                p.add_(0.3 * noise)
    return model
