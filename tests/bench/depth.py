"""
Does a residual method pay at depth? python tests/bench/depth.py [--data=text] [--quick] [--plot]

Models of 2, 4 and 8 layers on a corpus that is longer than the runs: a prepared dataset, by default data/text. The
standard model is trained for half, once, twice and four times the steps, each time with a decay of its own. A curve
through these losses says what the standard model would have come to at the cost of a method.
"""

from contextlib import nullcontext
from unittest.mock import patch

import torch

import methods
from sweep import Lacking, experiment
from model import GPT, GPTConfig, Residual

LADDER = {0.5: 2, 1: 3, 2: 2, 4: 2}  # times the steps, and how many seeds the standard model is trained so long with
KEPT = {name: {"residual": name, "keep_input": True} for name in ("m1", "m2", "m3.1")}
MODELS = {
    "standard": {},
    "Method 1": {"residual": "m1"},
    "Method 1, input kept": KEPT["m1"],
    "Method 2, input kept": KEPT["m2"],
    "Method 3.1, input kept": KEPT["m3.1"],
    "W2, scalar σ": {"attention": "w2"},
    "Method 5.2": {"attention": "summed_qk", "qk_scale": "5.2"},
}
# what is run, in this order: the deepest models first
STAGES = [
    (8, ["standard", "Method 1", "Method 1, input kept"]),
    (4, ["standard", "Method 1", "Method 1, input kept", "Method 2, input kept"]),
    (2, ["standard", "Method 1", "Method 1, input kept", "Method 2, input kept"]),
    (8, ["Method 2, input kept", "Method 3.1, input kept"]),
    (8, ["standard, wider", "W2, scalar σ", "Method 5.2"]),
]
BRANCH_SCALES = {"1": lambda self, config: 1.0, "1/√(2L)": lambda self, config: (2 * config.n_layer) ** -0.5}


def trial(run):
    """A run whose residual method has the branches that run["branch_scale"] says."""
    rule = BRANCH_SCALES.get(run.get("branch_scale"))
    with patch.object(Residual, "branch_scale", rule) if rule else nullcontext():
        result = methods.trial(run)
    return result | {"text_sha256": methods.dataset(run["data"]).meta["text_sha256"]}


def main(sweep):
    size = {"block_size": 128, "n_head": 2, "n_embd": 64}
    run = {"data": sweep.args.data, "batch_size": 16, "steps": 2000, "recipe": "fair", "dtype": "auto"}
    run |= {"compile": True, "eval_tokens": 524288}
    rates, seeds = [4e-3, 8e-3, 1.6e-2], [1, 2, 3]

    def cell(n_layer, name, branch_scale="1"):
        shape = size | {"n_layer": n_layer}
        if name == "standard, wider":
            return run | {"model": as_costly(shape, shape | MODELS["Method 1"])}
        of_branches = {"branch_scale": branch_scale} if "residual" in MODELS[name] else {}
        return run | {"model": shape | MODELS[name]} | of_branches

    trials = [
        cell(n_layer, name, branch_scale) | {"steps": run["steps"] // 2, "learning_rate": rate, "seed": 0}
        for n_layer, names in [(4, ["Method 1, input kept", "Method 3.1, input kept", "Method 1"]), (8, ["Method 1, input kept"])]
        for name in names
        for branch_scale in BRANCH_SCALES
        for rate in rates
    ]
    sweep.run(trials)
    for n_layer, names in STAGES:
        cells = {name: cell(n_layer, name) for name in names}
        results = sweep.tuned(cells, rates, seeds, shorter=2)


def as_costly(shape, method):
    """The settings of a standard model that is so much wider that a token costs what it costs `method`."""

    def flops(settings):
        with torch.device("meta"):  # only counted
            return GPT(GPTConfig(**settings, vocab_size=1024)).flops_per_token()

    widths = range(shape["n_embd"], 8 * shape["n_embd"], 8)
    width = min(widths, key=lambda width: abs(flops(shape | {"n_embd": width}) - flops(method)))
    return shape | {"n_embd": width}


def add_arguments(parser):
    parser.add_argument("--data", default="text", help="folder in data/ with a prepared text (default: text)")


if __name__ == "__main__":
    experiment("depth", trial, main, __doc__, add_arguments)
