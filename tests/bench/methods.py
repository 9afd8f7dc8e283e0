"""
Which method wins? python tests/bench/methods.py [--quick] [--plot]

Every kind of attention and every residual method, at train.py's default size, on Tiny Shakespeare by characters and by
BPE: validation loss over three seeds, each method at the learning rate that suits it. The standard model is also
trained for as many steps as give it a method's floating-point operations, for a comparison at equal cost.
"""

from functools import cache

import torch

from sweep import W2_KINDS, autocast, average, compare, difference, experiment, fit, mean_sd, pyplot, table
from sweep import with_parameters
from data import ensure_prepared, load_dataset
from model import GPT, GPTConfig, QK_SCALES

RESIDUALS = ("m1", "m2", "m3.1", "m3.2", "m4.1", "m4.2")
METHODS = {"standard": {}}
METHODS |= {f"Method {name[1:]}": {"residual": name} for name in RESIDUALS}
METHODS |= {f"Method {name[1:]}, input kept": {"residual": name, "keep_input": True} for name in RESIDUALS}
METHODS |= W2_KINDS
METHODS |= {f"Method {scale}": {"attention": "summed_qk", "qk_scale": scale} for scale in QK_SCALES}

DATA = {"shakespeare_char": "characters", "shakespeare_bpe": "BPE"}
COLORS = {"shakespeare_char": "#1f5a92", "shakespeare_bpe": "#d9771e"}


@cache
def dataset(name):
    return load_dataset(ensure_prepared(name))


def trial(run):
    data, B, T = dataset(run["data"]), run["batch_size"], run["model"]["block_size"]
    torch.manual_seed(run["seed"])
    model = GPT(GPTConfig(vocab_size=data.meta["vocab_size"], **run["model"]))
    facts = fit(run, model, lambda step: data.batch(run["seed"], step, 0, B, T))
    loss = evaluate(run, model, data)
    return {"loss": loss, **facts, "learned": learned(model), "source": data.meta["source"]}


@torch.no_grad()
def evaluate(run, model, data):
    """Mean loss over the validation split, in nats per token."""
    total, tokens, device = 0, 0, model.head.weight.device
    for x, y in data.windows("val", run["batch_size"], run["model"]["block_size"], run["eval_tokens"]):
        counted = (y >= 0).sum().item()
        with autocast(run):
            total += model(x.to(device), y.to(device))[1].item() * counted
        tokens += counted
    return total / tokens


@torch.no_grad()
def learned(model):
    """What a method learns besides matrices: a list of numbers per layer, by name."""
    facts = {}

    def note(name, tensor):
        facts.setdefault(name, []).append(tensor.reshape(-1).tolist())

    for block in model.blocks:
        attn = block.attn
        if hasattr(block, "mix"):
            note("mixing weights", block.mix.softmax(dim=0))
        if hasattr(attn, "log_tau"):
            note("τ / 2√d", attn.log_tau.exp() / (2 * attn.D**0.5))
        for name in ("a", "b"):
            if hasattr(attn, name):
                note(name, getattr(attn, name))
        if hasattr(attn, "log_a"):
            note("a", attn.log_a.exp())
            note("d_i / √d_k", attn.divisors() / attn.D**0.5)
    return facts


def main(sweep):
    size = {"block_size": 128, "n_layer": 3, "n_head": 4, "n_embd": 128}
    steps, batch_size, eval_tokens = 400, 16, 10**9
    rates, seeds, names = [2e-3, 4e-3, 8e-3], [1, 2, 3], list(METHODS)
    if sweep.quick:
        size = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
        steps, batch_size, eval_tokens, rates, seeds = 4, 2, 1000, rates[:2], seeds[:2]
        names = ["standard", "Method 3.2", "W2, diagonal σ", "Method 5.4"]
    run = {"batch_size": batch_size, "steps": steps, "recipe": "fair", "dtype": "auto", "eval_tokens": eval_tokens}

    compared = {}
    for data in DATA:
        if not sweep.showing:
            dataset(data)  # prepared once here, not by all workers at the same time
        of = run | {"data": data}
        cells = {name: of | {"model": size | METHODS[name]} for name in names}
        # one kind has visibly more parameters: once more with an MLP so much narrower
        thin = with_parameters(cells["W2, diagonal σ"]["model"], size)
        cells[f"W2, diagonal σ, n_inner {thin['n_inner']}"] = of | {"model": thin}

        results = sweep.tuned(cells, rates, seeds, shorter=2)
        standard = results["standard"]
        at_its_rate = cells["standard"] | {"learning_rate": standard[0]["run"]["learning_rate"]}
        cost = {name: group[0]["flops"] / standard[0]["flops"] for name, group in results.items()}
        longer = {name: at_its_rate | {"steps": round(steps * ratio)} for name, ratio in cost.items()}
        longer = sweep.repeated(longer, seeds)

        table(
            f"{data}, {steps} steps of {batch_size * size['block_size']} tokens",
            ["method", "parameters", "learning rate", "loss", "difference", "FLOPs", "difference at equal FLOPs"],
            [
                [
                    name,
                    f"{group[0]['parameters']:,}",
                    f"{group[0]['run']['learning_rate']:g}",
                    mean_sd(group),
                    compare(group, standard) if name != "standard" else "",
                    f"{cost[name]:.2f}",
                    compare(group, longer[name]) if name != "standard" else "",
                ]
                for name, group in results.items()
            ],
        )
        table(
            f"{data}: what was learned, mean over seeds",
            ["method", "", *(f"layer {layer}" for layer in range(size["n_layer"]))],
            [
                [name, what, *layers_of(group, what, size["n_layer"])]
                for name, group in results.items()
                for what in group[0]["learned"]
            ],
        )
        compared[data] = {
            name: (cost[name], difference(group, standard), difference(group, longer[name]))
            for name, group in results.items()
            if name != "standard"
        }
    if sweep.plotting:
        sweep.save_figure(draw(compared, steps))


def draw(compared, steps):
    """Each method's loss less the standard model's, at equal steps and at equal cost, and its operations.

    `compared` holds, by dataset and method: operations over the standard model's, and two differences with errors.
    """
    names = sorted(next(iter(compared.values())), key=family_of)  # a family's rows stand together
    rows = [i + 0.7 * len({family_of(name) for name in names[: i + 1]}) for i in range(len(names))]
    figure, axes = pyplot().subplots(1, 2, sharey=True, sharex=True, figsize=(9.6, 2 + 0.2 * rows[-1]))
    titles = f"at equal steps ({steps})", "at equal cost"
    for i, (axis, title) in enumerate(zip(axes, titles), 1):
        axis.axvline(0, color="black", linewidth=1)
        axis.grid(axis="x", color="#e4e4e4", linewidth=0.7)
        axis.set_axisbelow(True)
        for data, nudge in zip(compared, (-0.16, 0.16)):
            deltas, errors = zip(*(compared[data][name][i] for name in names))
            places = [row + nudge for row in rows]
            style = {"fmt": "o", "markersize": 4, "elinewidth": 1.3, "color": COLORS[data], "label": DATA[data]}
            axis.errorbar(deltas, places, xerr=errors, **style)
        axis.set_title(title, fontsize=11, loc="left", pad=12)
        axis.tick_params(length=0, labelsize=9)
        axis.spines[:].set_visible(False)
    axes[0].set_yticks(rows, names)
    axes[0].set_ylim(rows[-1] + 0.8, rows[0] - 0.8)
    axes[0].legend(loc="lower right", frameon=False, fontsize=9.5, handletextpad=0.2)

    beside = {"transform": axes[1].get_yaxis_transform(), "fontsize": 9, "ha": "right", "va": "center"}
    axes[1].text(1.22, rows[0] - 1.25, "× FLOPs", **beside)
    for x, data in zip((1.1, 1.22), compared):
        for row, name in zip(rows, names):
            axes[1].text(x, row, f"{compared[data][name][0]:.2f}", color=COLORS[data], **beside)
    figure.supxlabel("validation loss less the standard model's, in nats per token (left of 0: better)", fontsize=9.5)
    figure.tight_layout()
    return figure


def family_of(name):
    return "5." in name, name.startswith("W2"), "kept" in name


def layers_of(results, what, n_layer):
    """The numbers of each layer, averaged over the results; nothing for layers that have none."""
    per_seed = [result["learned"][what] for result in results]
    cells = [" ".join(f"{average(values):.2f}" for values in zip(*layers)) for layers in zip(*per_seed)]
    return [""] * (n_layer - len(cells)) + cells


if __name__ == "__main__":
    experiment("methods", trial, main, __doc__)
