"""
Entailment: is one node of a tree above another? python tests/bench/entailment.py [--quick]

The hierarchy task of the W2 document. A random tree (up to 4 children a node, 6 levels below the root, at most 1,024
nodes); the input is a node and a candidate, and two classes are read from the last position: is the candidate an
ancestor of the node? The original measures on the pairs that it trains on, where it is enough to remember them. Here a
tenth of all pairs is held out. Both sides as published, then with equal widths, parameters and choice of learning
rates. Each is done with candidates of any kind, most of which are nobody's ancestors, and with candidates for which the
answer is yes as often as no, so that the candidate by itself tells nothing.
"""

from functools import cache

import numpy as np
import torch
from torch import nn

from stats import compare
from tasks import W2_KINDS, experiment, fair_cells, fit, make_orthogonal, mean_sd, published_cells
from tasks import random_numbers, table
from model import GPT, GPTConfig

DEPTH, CHILDREN = 6, 4
TREE, SEEN, UNSEEN = 2**40, 2**40 + 1, 2**40 + 2  # streams of random numbers that no training step has

# the document's two sides; it says nothing of W2's MLP, which is four times as wide as the model, as the other's is
PUBLISHED = {
    "standard": ({"n_embd": 96, "n_head": 6, "n_inner": 384}, 1e-3),
    "W2, diagonal σ": ({"n_embd": 88, "n_head": 4, "n_inner": 352, **W2_KINDS["W2, diagonal σ"]}, 5e-4),
}


def make_tree(random, most):
    """above (N, N): whether, of the nodes n and c, c is an ancestor of n. Node 0 is the root; N is `most` at most."""
    parents = [-1]
    level = [0]
    for _ in range(DEPTH):
        children = [parent for parent in level for _ in range(random.integers(1, CHILDREN + 1))]
        children = children[: most - len(parents)]
        level = range(len(parents), len(parents) + len(children))
        parents += children
    above = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        above[node] = above[parent]
        above[node, parent] = True
    return above


@cache
def pairs(seed, most, balanced):
    """The tree of a seed as (positives, negatives) of training, then of what is held out, each (pairs, 2) in the
    order of their candidates. Balanced, a candidate without negatives, as the root is, has no positives either."""
    random = random_numbers(seed, TREE)
    above = make_tree(random, most)
    held_out = random.random(above.shape) < 0.1
    sets = []
    for chosen in (~held_out, held_out):
        yes, no = above & chosen, ~above & ~np.eye(len(above), dtype=bool) & chosen
        if balanced:
            yes = yes & no.any(axis=0)
        sets.append([np.argwhere(mask.T)[:, ::-1] for mask in (yes, no)])
    return sets


def draw(random, positives, negatives, B, balanced):
    """B pairs x (B, 2), half of them positives, and their classes y (B, 1).

    Balanced, every negative has the candidate of a positive.
    """
    yes = positives[random.integers(len(positives), size=B // 2)]
    first, last = 0, len(negatives)
    if balanced:
        first, last = (np.searchsorted(negatives[:, 1], yes[:, 1], side) for side in ("left", "right"))
    no = negatives[random.integers(first, last, size=B // 2)]
    classes = np.repeat([1, 0], B // 2)[:, None]
    return torch.from_numpy(np.concatenate((yes, no))), torch.from_numpy(classes)


def classify(model, x, y):
    """Logits of the two classes, read from the last position, and their loss."""
    logits = model.head(model.features(x)[:, -1:])
    return logits, model.loss(logits, y)


def trial(run, device):
    balanced = run["candidates"] == "balanced"
    seen, unseen = pairs(run["seed"], run["model"]["vocab_size"], balanced)

    def batch(step):
        return draw(random_numbers(run["seed"], step), *seen, run["batch_size"], balanced)

    torch.manual_seed(run["seed"])
    model = GPT(GPTConfig(**run["model"]))
    model.head = nn.Linear(model.config.n_embd, 2, bias=False)
    make_orthogonal(model.to(device))
    facts = fit(run, model, batch, lambda model, x, y: classify(model, x, y)[1])
    for name, of, stream in (("seen ", seen, SEEN), ("", unseen, UNSEEN)):
        x, y = draw(random_numbers(run["seed"], stream), *of, 4096, balanced)
        with torch.no_grad():
            logits, loss = classify(model, x.to(device), y.to(device))
        facts[f"{name}loss"] = loss.item()
        facts[f"{name}accuracy"] = (logits.argmax(-1).cpu() == y).float().mean().item()
    return facts


def main(sweep):
    vocab_size, batch_size, steps, width = 1024, 32, 2000, 96
    rates, seeds, tuning_seeds = [5e-4, 1e-3, 2e-3], [1, 2, 3, 4, 5], [6, 7, 8]
    if sweep.quick:
        vocab_size, steps, width, rates, seeds, tuning_seeds = 64, 10, 32, rates[1:], seeds[:2], tuning_seeds[:1]
    task = {"batch_size": batch_size, "steps": steps}
    size = {"block_size": 2, "vocab_size": vocab_size, "n_layer": 2}

    for candidates in ("any", "balanced"):
        of = task | {"candidates": candidates}
        results = sweep.repeated(published_cells(of, size, PUBLISHED), seeds)
        show(f"candidates {candidates}, as published", results)

        cells = fair_cells(of, size | {"n_embd": width, "n_head": width // 16})
        # a run takes seconds, and what it makes of the pairs held out wavers
        results = sweep.tuned(cells, rates, seeds, by="accuracy", tuning_seeds=tuning_seeds)
        show(f"candidates {candidates}, width {width}, equal parameters", results)


def show(title, results):
    """What it is on the pairs of training and on those held out, and the latter's difference."""
    held_out = "held out", "difference"
    compared = {name: compare(results, name) for name in ("accuracy", "loss")}
    table(
        title,
        ["", "parameters", "learning rate", *("accuracy, seen", *held_out), *("loss, seen", *held_out)],
        [
            [
                name,
                f"{group[0]['parameters']:,}",
                f"{group[0]['run']['learning_rate']:g}",
                *(mean_sd(group, "seen accuracy"), mean_sd(group, "accuracy"), compared["accuracy"][name]),
                *(mean_sd(group, "seen loss"), mean_sd(group, "loss"), compared["loss"][name]),
            ]
            for name, group in results.items()
        ],
    )


if __name__ == "__main__":
    experiment("entailment", trial, main, __doc__)
