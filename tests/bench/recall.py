"""
Associative recall: python tests/bench/recall.py [--why] [--quick]

First the copy task of the W2 document: T/2 random tokens and then the same again, the loss over all positions. What
comes first cannot be predicted, so no model gets below (T/2 - 1)/(T - 1) · ln V, and what can be told apart is how many
of the copied tokens come out right. Both sides as published, and then with equal widths, parameters and choice of
learning rates. Then multi-query associative recall (MQAR; Arora et al. 2023, https://arxiv.org/abs/2312.04927): keys
with their values, then some keys again among random tokens, each asking for its value. With --why another experiment
in the place of these: why W2 is slow to learn MQAR, see why.py.
"""

import math
import sys

import numpy as np
import torch

from stats import compare
from tasks import W2_KINDS, experiment, fair_cells, fit, make_orthogonal, mean_sd, published_cells
from tasks import random_numbers, table
from model import GPT, GPTConfig

UNSEEN = 2**40  # a stream of random numbers that no training step has

# the document's two sides; it is a σ per dimension that gives W2 the number of parameters it states
PUBLISHED = {
    "standard": ({"n_embd": 96, "n_head": 6, "n_inner": 384}, 1e-3),
    "W2, diagonal σ": ({"n_embd": 64, "n_head": 4, "n_inner": 256, **W2_KINDS["W2, diagonal σ"]}, 5e-3),
}


def copies(run, step):
    """Sequences of the copy task, as x and y (B, T)."""
    half = (run["model"]["block_size"] + 1) // 2
    first = random_numbers(run["seed"], step).integers(run["model"]["vocab_size"], size=(run["batch_size"], half))
    tokens = torch.from_numpy(np.concatenate((first, first), axis=1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def queries(run, step):
    """Sequences of MQAR, as x and y (B, T), y being -1 except where a key is asked for.

    Keys are of the vocabulary's first half, values of its second. Each key is asked for once, mostly soon after the
    pairs: the probability of a place is proportional to its distance to the power of -0.99. All else is random.
    """
    random, B, T, pairs = random_numbers(run["seed"], step), run["batch_size"], run["model"]["block_size"], run["pairs"]
    half = run["model"]["vocab_size"] // 2
    tokens = random.integers(2 * half, size=(B, T))
    keys = random.random((B, half)).argpartition(pairs, axis=1)[:, :pairs]
    values = half + random.integers(half, size=(B, pairs))
    tokens[:, 0 : 2 * pairs : 2], tokens[:, 1 : 2 * pairs : 2] = keys, values

    # the places with the largest log p + Gumbel noise are a draw without replacement
    log_p = -0.99 * np.log(np.arange(1, T - 2 * pairs + 1))
    places = 2 * pairs + np.argsort(-log_p - random.gumbel(size=(B, len(log_p))), axis=1)[:, :pairs]
    targets = np.full((B, T), -1)
    np.put_along_axis(tokens, places, keys, axis=1)
    np.put_along_axis(targets, places, values, axis=1)
    return torch.from_numpy(tokens), torch.from_numpy(targets)


def answers(model, x, y):
    """Logits and loss where there is a target, and those targets: logits of all positions would cost far more."""
    asked = y >= 0
    logits = model.head(model.features(x)[asked][None])
    return logits, model.loss(logits, y[asked][None]), y[asked]


def trial(run, device):
    T, half = run["model"]["block_size"], (run["model"]["block_size"] + 1) // 2
    torch.manual_seed(run["seed"])
    model = GPT(GPTConfig(**run["model"])).to(device)
    if run["task"] == "copy":
        make_orthogonal(model)
    make = copies if run["task"] == "copy" else queries
    facts = fit(run, model, lambda step: make(run, step), lambda model, x, y: answers(model, x, y)[1])
    x, y = make(run | {"batch_size": 512}, UNSEEN)
    with torch.no_grad():
        logits, loss, targets = answers(model, x.to(device), y.to(device))
    right = logits[0].argmax(-1) == targets
    if run["task"] == "copy":
        right = right.view(512, T)[:, half - 1 :]  # the half that can be predicted
    else:  # the logits of all other positions were not computed
        unasked = (T - run["pairs"]) * run["batch_size"] * run["steps"]
        facts["flops"] -= 6 * model.head.weight.numel() * unasked
    return {"loss": loss.item(), "accuracy": right.float().mean().item(), **facts}


def main(sweep):
    vocab_size, T, batch_size, steps = 1024, 128, 32, 500
    mqar_T, pairs, mqar_vocab, mqar_width, mqar_batch_size, mqar_steps = 64, 4, 8192, 64, 256, 1000
    rates, mqar_rates, seeds = [1e-3, 2e-3, 5e-3], [5e-3, 1e-2, 2e-2], [1, 2, 3]
    if sweep.quick:
        vocab_size, T, batch_size, steps, rates, mqar_rates, seeds = 16, 8, 4, 10, rates[:2], mqar_rates[:2], seeds[:2]
        mqar_T, pairs, mqar_vocab, mqar_width, mqar_batch_size, mqar_steps = 16, 2, 64, 32, 4, 10

    def show(title, results):
        compared = compare(results)
        table(
            title,
            ["", "parameters", "learning rate", "loss", "difference", "accuracy"],
            [
                [
                    name,
                    f"{group[0]['parameters']:,}",
                    f"{group[0]['run']['learning_rate']:g}",
                    mean_sd(group),
                    compared[name],
                    mean_sd(group, "accuracy"),
                ]
                for name, group in results.items()
            ],
        )

    copy = {"task": "copy", "batch_size": batch_size, "steps": steps}
    size = {"block_size": T - 1, "vocab_size": vocab_size, "n_layer": 2}
    print(f"copy: no model's loss is below {(T // 2 - 1) / (T - 1) * math.log(vocab_size):.3f}")
    show(f"copy, {steps} steps, as published", sweep.repeated(published_cells(copy, size, PUBLISHED), seeds))
    cells = fair_cells(copy, size | {"n_embd": 64, "n_head": 4, "n_inner": 256})
    show(f"copy, {steps} steps, width 64, equal parameters", sweep.tuned(cells, rates, seeds))

    # with biases a head can find the token before it from the start, whatever the tokens are
    size = {"block_size": mqar_T, "vocab_size": mqar_vocab, "n_layer": 2, "tie_weights": True, "bias": True}
    task = {"task": "mqar", "pairs": pairs, "batch_size": mqar_batch_size, "steps": mqar_steps, "dtype": "auto"}
    cells = fair_cells(task, size | {"n_embd": mqar_width, "n_head": 1})
    results = sweep.tuned(cells, mqar_rates, seeds, by="accuracy")
    show(f"MQAR, T = {mqar_T}, {pairs} pairs, width {mqar_width}, equal parameters", results)


if __name__ == "__main__":
    if "--why" in sys.argv:  # an experiment with results of its own, on the sequences above
        import why

        sys.argv.remove("--why")
        experiment("recall_why", why.trial, why.main, why.__doc__)
    else:
        experiment("recall", trial, main, __doc__)
