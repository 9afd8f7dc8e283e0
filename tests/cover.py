"""What the tests vary: all that model.py's tables have, so that what is added to them is tested."""

from dataclasses import fields
from itertools import combinations, permutations, product

import torch

from model import CHOICES, GPTConfig

OPTIONS = {"w2": "sigma", "summed_qk": "qk_scale"}  # kinds with a setting that only they read

KINDS = {}  # a kind's name here, with the value of its option: its settings
for kind in CHOICES["attention"]:
    option = OPTIONS.get(kind)
    for value in CHOICES.get(option, [None]):
        name = f"{kind.removesuffix('_qk')}-{value}" if option else kind
        KINDS[name] = {"attention": kind} | ({option: value} if option else {})
KINDS["w2-overlap"] = {"attention": "w2", "w2_score": "overlap"}  # sigma has no effect there

METHODS = {}
for residual in CHOICES["residual"]:
    METHODS[residual] = {"residual": residual}
    if residual != "standard":
        METHODS[residual + "+input"] = {"residual": residual, "keep_input": True}

GRID = [(kind, method) for kind in KINDS for method in METHODS]

# values to try for numeric fields of GPTConfig, and the fields that each test sets itself
NUMBERS = {"n_kv_head": [None, 2, 1], "rope_theta": [10000.0, 500.0], "norm_eps": [1e-5, 1e-2]}
SHAPES = {"block_size", "vocab_size", "n_layer", "n_head", "n_embd", "n_inner", "dropout"}


def columns(config=GPTConfig):
    """What the tests vary: {name: [settings]} of kinds, and of every other bool, choice and number of the config."""
    options = {*OPTIONS.values(), "w2_score"}
    found = {"attention": list(KINDS.values())}
    for field in fields(config):
        if isinstance(field.default, bool):
            found[field.name] = [{field.name: value} for value in (False, True)]
        elif field.name in CHOICES.keys() - options - {"attention"}:
            found[field.name] = [{field.name: value} for value in CHOICES[field.name]]
        elif field.name in NUMBERS:
            found[field.name] = [{field.name: value} for value in NUMBERS[field.name]]
        elif field.name not in SHAPES | options | {"attention"}:
            raise ValueError(f"{field.name} is not varied by any test: add its values to NUMBERS in tests/cover.py")
    return found


def covering(columns):
    """Return dicts of settings in which every pair of values from two columns occurs."""
    cells = [[(name, i) for i in range(len(values))] for name, values in columns.items()]
    left = {pair for a, b in combinations(cells, 2) for pair in product(a, b)}
    first, second = sorted(cells, key=len)[-2:]
    seeds, rows = list(product(first, second)), []
    while left:
        row = dict(seeds.pop(0) if seeds else min(left))
        for column in cells:
            if column[0][0] not in row:  # the value with the most pairs that are left
                row |= [max(column, key=lambda cell: sum({(cell, x), (x, cell)} & left != set() for x in row.items()))]
        left -= set(permutations(row.items(), 2))
        rows.append({key: value for name, i in row.items() for key, value in columns[name][i].items()})
    return rows


COVER = covering(columns())


def each(columns):
    """Return a few dicts of settings that together contain every value of every column."""
    return [
        {key: value for values in columns.values() for key, value in values[i % len(values)].items()}
        for i in range(max(map(len, columns.values())))
    ]


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
