"""
Which method wins? python tests/bench/methods.py [--quick]

Every kind of attention and every residual method, at train.py's default size, on Tiny Shakespeare by characters and by
BPE: validation loss over three seeds, each method at the learning rate that suits it. The standard model is also
trained for as many steps as give it each method's floating-point operations: the curve through these losses says what
it comes to at equal cost. What seems better there is looked at again, with other seeds.
"""

from functools import cache

import torch

from stats import CostCurve, compare, in_words
from sweep import W2_KINDS, autocast, average, experiment, fit, mean_sd, table, with_parameters
from measure import cost_of_steps
from data.dataset import load_dataset
from data.preprocess import ensure_prepared
from model import GPT, GPTConfig, QK_SCALES

RESIDUALS = ("m1", "m2", "m3.1", "m3.2", "m4.1", "m4.2")
METHODS = {"standard": {}}
METHODS |= {f"Method {name[1:]}": {"residual": name} for name in RESIDUALS}
METHODS |= {f"Method {name[1:]}, input kept": {"residual": name, "keep_input": True} for name in RESIDUALS}
METHODS |= W2_KINDS
METHODS |= {f"Method {scale}": {"attention": "summed_qk", "qk_scale": scale} for scale in QK_SCALES}

DATA = {"shakespeare_char": 65, "shakespeare_bpe": 1024}  # and how many tokens there are


@cache
def dataset(name):
    return load_dataset(ensure_prepared(name))


def trial(run, device):
    if run.get("task") == "cost":
        return cost_of_steps(run, device)
    data, B, T = dataset(run["data"]), run["batch_size"], run["model"]["block_size"]
    torch.manual_seed(run["seed"])
    model = GPT(GPTConfig(vocab_size=data.meta["vocab_size"], **run["model"])).to(device)
    facts = fit(run, model, lambda step: data.batch(run["seed"], step, 0, B, T))
    loss = evaluate(run, model, data)
    return {"loss": loss, **facts, "learned": learned(model), "source": data.meta["source"]}


@torch.no_grad()
def evaluate(run, model, data):
    """Mean loss over the validation split, in nats per token."""
    total, tokens, device = 0, 0, model.embed.weight.device
    for x, y in data.windows("val", run["batch_size"], run["model"]["block_size"], run["eval_tokens"]):
        counted = (y >= 0).sum().item()
        with autocast(run, device):
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
    rates, seeds, names, budget = [2e-3, 4e-3, 8e-3], [1, 2, 3], list(METHODS), 60
    other_seeds = [4, 5, 6, 7, 8, 9]
    if sweep.quick:
        size = {"block_size": 16, "n_layer": 2, "n_head": 2, "n_embd": 16}
        steps, batch_size, eval_tokens, rates, seeds, other_seeds = 4, 2, 1000, rates[:2], seeds[:2], other_seeds[:2]
        budget = 0
        names = ["standard", "Method 3.2", "W2, diagonal σ", "Method 5.4"]
    run = {"batch_size": batch_size, "steps": steps, "recipe": "fair", "dtype": "auto", "eval_tokens": eval_tokens}

    for data, vocab_size in DATA.items():
        if not sweep.showing:
            dataset(data)  # prepared once here, not by all workers at the same time
        of = run | {"data": data}
        cells = {name: of | {"model": size | METHODS[name]} for name in names}
        # one kind has visibly more parameters: once more with an MLP so much narrower
        thin = with_parameters(cells["W2, diagonal σ"]["model"], size)
        cells[f"W2, diagonal σ, n_inner {thin['n_inner']}"] = of | {"model": thin}

        results = sweep.tuned(cells, rates, seeds, shorter=2)
        standard = results["standard"]
        cost = {name: group[0]["flops"] / standard[0]["flops"] for name, group in results.items()}
        lengths = {name: round(steps * ratio) for name, ratio in cost.items()}
        longer = {length: standard[0]["run"] | {"steps": length} for length in sorted(lengths.values())}
        ladder = sweep.run([longer[length] | {"seed": seed} for length in well_apart(longer) for seed in seeds])
        methods = {name: group for name, group in results.items() if name != "standard"}
        compared, at_equal_cost = compare(results), CostCurve(ladder, methods).differences()
        timed = {"task": "cost", "setting": data, "batch_size": batch_size, "dtype": "auto", "budget": budget}
        timed |= {"models": [cell["model"] | {"vocab_size": vocab_size} for cell in cells.values()]}
        (timed,) = sweep.run([timed])  # nothing beside it, or it would not be timed alone

        table(
            f"{data}, {steps} steps of {batch_size * size['block_size']} tokens",
            ["method", "parameters", "learning rate", "loss", "difference", "FLOPs", "at equal FLOPs", "time"],
            [
                [
                    name,
                    f"{group[0]['parameters']:,}",
                    f"{group[0]['run']['learning_rate']:g}",
                    mean_sd(group),
                    compared[name],
                    f"{cost[name]:.2f}",
                    in_words(*at_equal_cost[name]) if name in at_equal_cost else "",
                    f"{times:.2f}",
                ]
                for (name, group), times in zip(results.items(), timed["ratios"])
            ],
        )
        for name, (difference, half, _) in at_equal_cost.items():
            if difference + half < 0:  # before Holm's correction
                again = {f"standard, {lengths[name]} steps": longer[lengths[name]], name: results[name][0]["run"]}
                again = sweep.repeated(again, other_seeds)
                show_again(f"{data}: {name} again, seeds {other_seeds[0]} to {other_seeds[-1]}, at equal FLOPs", again)
        show_learned(data, results, size["n_layer"])


def well_apart(lengths):
    """Those of rising lengths that are 2 % longer than the one before: at nearly the same a seed's loss is the same."""
    kept = []
    for length in lengths:
        if not kept or length > 1.02 * kept[-1]:
            kept.append(length)
    return kept


def show_again(title, results):
    compared = compare(results)
    rows = [[name, mean_sd(group), compared[name]] for name, group in results.items()]
    table(title, ["method", "loss", "difference"], rows)


def show_learned(data, results, n_layer):
    rows = []
    for name, group in results.items():
        rows += [[name, what, *layers_of(group, what, n_layer)] for what in group[0]["learned"]]
    header = ["method", "", *(f"layer {layer}" for layer in range(n_layer))]
    table(f"{data}: what was learned, mean over seeds", header, rows)


def layers_of(results, what, n_layer):
    """The numbers of each layer, averaged over the results; nothing for layers that have none."""
    per_seed = [result["learned"][what] for result in results]
    cells = [" ".join(f"{average(values):.2f}" for values in zip(*layers)) for layers in zip(*per_seed)]
    return [""] * (n_layer - len(cells)) + cells


if __name__ == "__main__":
    experiment("methods", trial, main, __doc__)
