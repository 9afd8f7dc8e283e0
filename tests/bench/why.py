"""
Why is W2 slow to learn associative recall? python tests/bench/recall.py --why [--quick]

Where standard attention has q·k/√d, W2 has 2/τ times q·k - ‖k‖²/2 and a term of σ, with a learned τ. Here models with
only some of these terms, and with τ learned or fixed at its start, learn the MQAR of recall.py at a constant learning
rate. τ learns at that rate too. train.py gives it a tenth, which came of this experiment. What counts is T99:
the first step, of every 25th, at which 99 % of the answers to 512 fixed sequences are right. Now and then a look also
notes τ, how far each term tells the keys of a query apart, and whether the first layer finds the previous token. Other
rows are of the whole formula with another learning rate or start of τ, or smaller keys at the start.
"""

import math
import statistics
import time
from unittest.mock import patch

import numpy as np
import torch

from recall import UNSEEN, answers, queries
from stats import log_rank
from tasks import W2_KINDS, Lacking, autocast, table, with_parameters
from config.runtime.common import pick_attention_kernel, pick_dtype
from model import ATTENTIONS, GPT, GPTConfig, W2Attention, rope_table

WHOLE = "W2, scalar σ"  # what the others are compared with
SLOW = "W2, a tenth of the rate for τ"  # as it now is
TERMS = ("qk", "key_norm", "sigma")  # of a score

# -- parts of W2's score -------------------------------------------------------------------------------------


class WithoutSigma(W2Attention):
    """Scores (2/τ)(q·k - ‖k‖²/2): W2 whose σ are 0. Their weights stay, unused: a seed starts all variants alike."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        # what softplus makes 0 of
        self.sigma.register_forward_hook(lambda module, inputs, output: torch.full_like(output, -math.inf))


class QKAlone(W2Attention):
    """Scores (2/τ) q·k: only the means of W2's score vectors."""

    def score_vectors(self, x, rope, earlier):
        q, k, _ = super().score_vectors(x, rope, earlier)
        return q[..., : self.D], k[..., : self.D], None


SCORES = {"whole": W2Attention, "qk_key_norm": WithoutSigma, "qk": QKAlone}
# what a run may change, and how it is otherwise; starts and sizes are multiples of W2's, tau_rate of the learning rate
UNCHANGED = {"scores": "whole", "tau_rate": 1, "tau_start": 1, "key_size": 1}


def make_model(run):
    run = UNCHANGED | run
    torch.manual_seed(run["seed"])
    with patch.dict(ATTENTIONS, w2=SCORES[run["scores"]]):
        model = GPT(GPTConfig(**run["model"]))
    with torch.no_grad():
        for block in model.blocks:
            block.attn.k_proj.weight.mul_(run["key_size"])
        for attn in w2_layers(model):
            attn.tau_shift.add_(math.log(run["tau_start"]) / 0.1)
            attn.tau_shift.requires_grad_(run["tau_rate"] > 0)
    return model


def w2_layers(model):
    """The attention of W2's layers; none in a standard model."""
    return [block.attn for block in model.blocks if isinstance(block.attn, W2Attention)]


# -- what a look sees ----------------------------------------------------------------------------------------


def score_terms(attn, q, k):
    """The terms that the score vectors of a layer add up, (B, H, T, T) each: the q·k of all kinds, then W2's others.

    Terms that depend only on the query are left out, as in the score vectors. Keys have as many heads as queries.
    """
    D = attn.D
    terms = {"qk": q[..., :D] @ k[..., :D].mT}
    if q.size(-1) > D:  # behind the means come σ and a 1, all of them times 2/τ
        sigma, scale = slice(D, D + attn.K), q[..., D + attn.K, None]
        norm_k, norm_sigma = (k[..., part].square().sum(-1)[..., None, :] / 2 for part in (slice(D), sigma))
        terms["key_norm"] = -scale * norm_k
        terms["sigma"] = q[..., sigma] @ k[..., sigma].mT - scale * norm_sigma
    return terms


def spread(scores):
    """The standard deviation of scores (B, H, T, T) over the keys that a query sees, averaged over queries: (H,)."""
    of_query = [scores[..., t, : t + 1].std(-1, correction=0) for t in range(scores.size(-1))]
    return torch.stack(of_query, dim=-1).mean(dim=(0, 2))


def previous_token(q, k):
    """The attention weight of the token before a query's own, averaged over queries and heads."""
    scores = q @ k.mT
    future = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf).softmax(-1).diagonal(-1, dim1=-2, dim2=-1).mean()


@torch.no_grad()
@torch.compiler.set_stance("force_eager")  # for so few steps it would all be compiled anew, without gradients
def look_at(model, x, y):
    """Loss and accuracy on x, y."""
    logits, loss, targets = answers(model, x, y)
    return {"loss": loss.item(), "accuracy": (logits[0].argmax(-1) == targets).float().mean().item()}


@torch.no_grad()
@torch.compiler.set_stance("force_eager")
def look_inside(model, x):
    """By layer and head τ and the spread of the terms, and what the first layer gives the previous token, on x."""
    look = {"tau": [attn.log_tau.exp().tolist() for attn in w2_layers(model)]} if w2_layers(model) else {}
    x = model.embed(x)
    rope = rope_table(0, x.size(1), model.config.head_dim, model.config.rope_theta, x)
    for block in model.blocks:
        _, q, k, *_ = block.vectors(x, rope, (), None)
        look.setdefault("previous_token", previous_token(q, k).item())  # of the first layer
        for term, scores in score_terms(block.attn, q, k).items():
            look.setdefault(term, []).append(spread(scores).tolist())
        x, _ = block(x, rope)
    return look


# -- a run ---------------------------------------------------------------------------------------------------


def trial(run, device):
    """Trains until 99 % is right, or for run["steps"] steps at most, and tells what each look has seen."""
    highest, began = run["learning_rate"], time.time()
    model = make_model(run).to(device)
    if run["compile"]:
        torch.compiler.reset()  # what the worker's earlier models compiled
        model.compile_blocks()
    pick_attention_kernel(model, device, pick_dtype(run["dtype"], device))
    x, y = (tensor.to(device) for tensor in queries(run | {"batch_size": 512}, UNSEEN))

    optimizer = model.configure_optimizers(0.1, highest, (0.9, 0.99), device.type)  # what train.py does
    shifts = {attn.tau_shift for attn in w2_layers(model)}  # of log τ, whose rate is a tenth of theirs
    for group in optimizer.param_groups:
        group["params"] = [p for p in group["params"] if p not in shifts]
    if shifts:
        optimizer.add_param_group({"params": list(shifts), "weight_decay": 0.0})
    looks = []
    for step in range(run["steps"] + 1):
        if step % run["look_every"] == 0:
            looks.append({"step": step, **look_at(model, x, y)})
            ending = t99(looks) < math.inf or step == run["steps"]
            if ending or step % run["details_every"] == 0:
                looks[-1] |= look_inside(model, x[: len(x) // 8])
            if ending:
                break
        for group in optimizer.param_groups:
            of_tau = shifts.intersection(group["params"])
            group["lr"] = highest * min(1, (step + 1) / run["warmup"])
            group["lr"] *= 10 * (UNCHANGED | run)["tau_rate"] if of_tau else 1
        with autocast(run, device):
            _, loss, _ = answers(model, *(tensor.to(device) for tensor in queries(run, step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "parameters": model.get_num_params(),
        "seconds": time.time() - began,
        "loss": looks[-1]["loss"],
        "looks": looks,
    }


# -- what they show ------------------------------------------------------------------------------------------


def t99(looks):
    """The step of the first look with an accuracy of at least 0.99; infinity where there is none."""
    return next((look["step"] for look in looks if look["accuracy"] >= 0.99), math.inf)


def show(results, seeds, steps, middle):
    """A row for each cell: T99, and what a look has seen at the step `middle`."""

    def written(first):
        return f"{first:g}" if first < math.inf else f">{steps}"

    firsts = {cell: [t99(result["looks"]) for result in group] for cell, group in results.items()}
    rows = []
    for (name, rate), of_seeds in firsts.items():
        p, whole = "", firsts.get((WHOLE, rate))
        if whole and name != WHOLE:
            p = f"{log_rank(of_seeds, whole, steps):.3f}"
        looks = [look for result in results[name, rate] for look in result["looks"] if look["step"] == middle]
        seen = [mean(looks, what) for what in ("accuracy", "tau", *TERMS, "previous_token")]
        median = written(statistics.median(of_seeds))
        rows.append([name, f"{rate:g}", ", ".join(map(written, of_seeds)), median, p, *seen])
    title = f"T99, p against {WHOLE} at the same rate (exact log-rank test, not corrected), and step {middle}: "
    title += "accuracy, by layer τ and each term's standard deviation over the keys, and the first layer's attention "
    title += "on the previous token"
    header = ["", "rate", f"T99 of seeds {', '.join(map(str, seeds))}", "median", "p", "accuracy", "τ", "q·k"]
    table(title, [*header, "key norm", "σ", "previous token"], rows)


def mean(looks, name):
    """The mean of what looks have seen under a name: a number, or one for each layer; nothing where they saw none."""
    if not looks or name not in looks[0]:
        return ""
    values = np.array([look[name] for look in looks], dtype=float).mean(axis=0)
    return f"{values:.2f}" if values.ndim == 0 else "; ".join(f"{value:.2f}" for value in values.mean(axis=-1))


def main(sweep):
    run = {"task": "mqar", "pairs": 4, "batch_size": 256, "steps": 2500, "warmup": 100, "look_every": 25}
    run |= {"details_every": 250, "dtype": "auto", "compile": not sweep.quick}
    size = {"block_size": 64, "vocab_size": 8192, "n_layer": 2, "n_embd": 64, "n_head": 1}
    rate, lower_rate, seeds = 1e-2, 5e-3, [1, 2, 3, 4]
    if sweep.quick:
        run |= {"pairs": 2, "batch_size": 4, "steps": 20, "warmup": 5, "look_every": 4, "details_every": 4}
        size |= {"block_size": 16, "vocab_size": 64, "n_embd": 32}
        seeds = seeds[:2]
    size |= {"tie_weights": True, "bias": True}  # as in recall.py
    standard = run | {"model": size}
    w2 = run | {"model": with_parameters(size | W2_KINDS[WHOLE], size)}

    cells = {
        ("standard", rate): standard,
        (WHOLE, rate): w2,
        ("q·k, τ fixed", rate): w2 | {"scores": "qk", "tau_rate": 0},
        ("q·k, τ learned", rate): w2 | {"scores": "qk"},
        ("q·k - ‖k‖²/2, τ fixed", rate): w2 | {"scores": "qk_key_norm", "tau_rate": 0},
        ("q·k - ‖k‖²/2, τ learned", rate): w2 | {"scores": "qk_key_norm"},
        ("W2, τ fixed", rate): w2 | {"tau_rate": 0},
        (SLOW, rate): w2 | {"tau_rate": 0.1},
        ("W2, τ three times as large at the start", rate): w2 | {"tau_start": 3},
        ("W2, keys half as large at the start", rate): w2 | {"key_size": 0.5},
    }
    cells |= {(name, lower_rate): cells[name, rate] for name in ("standard", WHOLE, SLOW, "q·k, τ fixed")}
    cells = {cell: settings | {"learning_rate": cell[1]} for cell, settings in cells.items()}
    if not sweep.showing:
        sweep.repeated(cells, seeds)  # side by side; what follows finds them done
    results = {}
    for name, rate in cells:
        try:
            results |= sweep.repeated({(name, rate): cells[name, rate]}, seeds)
        except Lacking as lacking:
            print(f"NOTE   {name} at {rate:g}: {lacking}")
    show(results, seeds, run["steps"], run["steps"] // 5)
