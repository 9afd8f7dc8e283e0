"""
Does a residual method pay at depth? python tests/bench/depth.py [--wide] [--data=text] [--quick] [--plot]

Models of 2, 4 and 8 layers on a prepared dataset, by default data/text. With --wide they have 8 layers and are four
times as wide, which takes a GPU. The standard model is trained for half, once, twice and four times the steps, each
time with a decay of its own. A curve through these losses says what it comes to at the cost of a method, and at what
cost it comes to the method's loss.
"""

import math
from contextlib import nullcontext
from importlib.util import find_spec
from unittest.mock import patch

import torch

import methods
from stats import CostCurve, compare, slope
from sweep import Lacking, experiment, key, mean_sd, table
from data.console import UserError
from model import GPT, GPTConfig

SEEDS = [1, 2, 3]
LADDER = [(times, seed) for times in (4, 2, 0.5) for seed in SEEDS[:2]]  # how else the standard model is trained
MODELS = {
    "standard": {},
    "Method 1": {"residual": "m1"},
    "Method 1, input kept": {"residual": "m1", "keep_input": True},
    "Method 2": {"residual": "m2"},
    "Method 2, input kept": {"residual": "m2", "keep_input": True},
    "Method 3.1, input kept": {"residual": "m3.1", "keep_input": True},
    "W2, scalar σ": {"attention": "w2"},
    "Method 5.2": {"attention": "summed_qk", "qk_scale": "5.2"},
}
APART = ["Method 1"]  # its seeds can lie far apart, and would make the intervals of all others wide
SCALES = {  # by width: how long runs are, and the learning rates that are tried first; --quick has width 16
    64: {"block_size": 128, "n_head": 2, "batch_size": 16, "steps": 2000, "rates": [8e-3, 1.6e-2]},
    256: {"block_size": 256, "n_head": 4, "batch_size": 64, "steps": 1000, "rates": [2e-3, 4e-3]},
    16: {"block_size": 16, "n_head": 2, "batch_size": 2, "steps": 8, "rates": [8e-3, 1.6e-2]},
}
AT_ALL_SIZES = ["standard", "Method 1", "Method 1, input kept", "Method 2, input kept"]
AT_8_LAYERS = ["Method 3.1, input kept", "W2, scalar σ", "Method 5.2"]
NARROW = [(64, n_layer, name) for n_layer in (8, 4, 2) for name in AT_ALL_SIZES]
NARROW += [(64, 8, name) for name in [*AT_8_LAYERS, "standard, wider"]]
WIDE = [(256, 8, name) for name in AT_ALL_SIZES + AT_8_LAYERS]
QUICK = [(16, n_layer, name) for n_layer in (2, 3) for name in ("standard", "Method 1", "W2, scalar σ")]
COLORS = {"Method 1": "#1f5a92", "Method 2": "#d9771e", "Method 3": "#2e8b57", "W2": "#8a4fa3", "Method 5": "#b03a48"}


def trial(run, device):
    """A run; with run["branches"] "unscaled", of a model whose branches start without their factor of 1/√(2L)."""
    unscaled = patch.object(GPT, "init_weights", init_unscaled) if "branches" in run else nullcontext()
    with unscaled:
        result = methods.trial(run, device)
    return result | {"text_sha256": methods.dataset(run["data"]).meta["text_sha256"]}


@torch.no_grad()
def init_unscaled(model, init_weights=GPT.init_weights):
    init_weights(model)
    for block in model.blocks:
        for output in (block.attn.o_proj, block.mlp.down_proj):
            output.weight.mul_((2 * model.config.n_layer) ** 0.5)


def main(sweep):
    if sweep.args.plot and not find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib: pip install matplotlib")
    models = QUICK if sweep.quick else WIDE if sweep.args.wide else NARROW + WIDE * sweep.showing
    run = {"data": sweep.args.data, "recipe": "fair", "dtype": "auto"}
    run |= {"compile": not sweep.quick, "eval_tokens": 1000 if sweep.quick else 524288}

    def cell(width, n_layer, name):
        scale = SCALES[width]
        shape = {"block_size": scale["block_size"], "n_head": scale["n_head"], "n_embd": width, "n_layer": n_layer}
        model = as_costly(shape, shape | MODELS["Method 1"]) if name == "standard, wider" else shape | MODELS[name]
        return run | {"model": model, "batch_size": scale["batch_size"], "steps": scale["steps"]}

    def at_its_rate(*models):  # of one width
        return sweep.tuned({model: cell(*model) for model in models}, SCALES[models[0][0]]["rates"], SEEDS, shorter=2)

    if not sweep.showing:
        text = methods.dataset(sweep.args.data).meta["text_sha256"]
        if any(result["text_sha256"] != text for result in sweep.done.values()):
            raise UserError(f"{sweep.path} has runs on another text than data/{sweep.args.data}: give another --out")
        at_its_rate(*models)  # side by side; what follows finds them done
    groups, ladders = {}, {}  # by size: results by the model's name; those of the standard model of all lengths
    for width, n_layer, name in models:
        size, steps = (width, n_layer), SCALES[width]["steps"]
        try:
            (results,) = at_its_rate((width, n_layer, name)).values()
            if name == "standard":
                longer = [results[0]["run"] | {"steps": round(steps * times), "seed": seed} for times, seed in LADDER]
                ladders[size] = results + sweep.run(longer)
            groups.setdefault(size, {})[name] = results
        except Lacking as lacking:
            print(f"NOTE   {title_of(size)}, {name}: {lacking}")

    curves = {}
    for size, ladder in sorted(ladders.items()):
        others = {name: results for name, results in groups[size].items() if name != "standard"}
        curves[size] = CostCurve(ladder, others, APART)
        show_curve(size, ladder)
        show(size, groups[size], curves[size])
    show_slopes({n_layer: curve for (width, n_layer), curve in curves.items() if width == models[0][0]})
    if NARROW[0] in models:
        show_branches(sweep, cell)
    if sweep.args.plot:
        path = sweep.path.with_suffix(".png")
        draw(groups, curves).savefig(path, dpi=100, pil_kwargs={"optimize": True})
        print(f"figure: {path}")


def show_branches(sweep, cell):
    """Whether branches should start smaller by 1/√(2L) in Methods 1 to 4 too: half the steps, one seed."""
    rates, runs = [4e-3, 8e-3, 1.6e-2], {}
    models = [(8, "Method 1"), *((4, f"Method {name}") for name in ("1", "2", "1, input kept", "3.1, input kept"))]
    for n_layer, name in models:
        for scale, start in (("1/√(2L)", {}), ("1", {"branches": "unscaled"})):
            run = cell(64, n_layer, name)
            run |= {"steps": run["steps"] // 2, "seed": 0} | start
            runs[n_layer, name, scale] = [run | {"learning_rate": rate} for rate in rates]
    if not sweep.showing:
        sweep.run([run for of_row in runs.values() for run in of_row])
    rows = []
    for row, of_row in runs.items():
        results = [sweep.done.get(key(run)) for run in of_row]
        rows.append([*row, *(f"{result['loss']:.3f}" if result else "" for result in results)])
    header = ["layers", "model", "branches", *(f"{rate:g}" for rate in rates)]
    table("How large branches start: loss by learning rate, after half the steps", header, rows)


def as_costly(shape, method):
    """The settings of a standard model that is so much wider that a token costs what it costs `method`."""

    def flops(settings):
        with torch.device("meta"):  # only counted
            return GPT(GPTConfig(**settings, vocab_size=1024)).flops_per_token()

    widths = range(shape["n_embd"], 8 * shape["n_embd"], 8)
    width = min(widths, key=lambda width: abs(flops(shape | {"n_embd": width}) - flops(method)))
    return shape | {"n_embd": width}


def title_of(size):
    width, n_layer = size
    return f"{n_layer} layers of width {width}"


def show_curve(size, ladder):
    steps, lengths = SCALES[size[0]]["steps"], sorted({result["run"]["steps"] for result in ladder})
    of_length = {length: [result for result in ladder if result["run"]["steps"] == length] for length in lengths}
    table(
        f"{title_of(size)}, the standard model by its steps",
        ["steps", *(f"{length / steps:g} × {steps:,}" for length in lengths)],
        [["loss", *map(mean_sd, of_length.values())]],
    )


def show(size, groups, curve):
    """What the methods come to, and what that is worth."""
    standard = groups["standard"][0]
    compared, at_equal_cost = compare(groups, apart=APART), curve.differences()
    rows = []
    for name, results in groups.items():
        facts = results[0]
        row = [name, f"{facts['parameters']:,}", f"{facts['run']['learning_rate']:g}", mean_sd(results), compared[name]]
        row.append(f"{facts['flops'] / standard['flops']:.2f}")
        if name in at_equal_cost:
            worth, low, high = (cost / standard["flops"] for cost in curve.equal_cost(name))
            row += [verdict(*at_equal_cost[name]), f"{bounded(worth)} ({bounded(low)} to {bounded(high)})"]
        rows.append(row + [""] * (8 - len(row)))
    tokens = standard["run"]["steps"] * standard["run"]["batch_size"] * standard["run"]["model"]["block_size"]
    table(
        f"{title_of(size)}, {tokens / standard['parameters']:.1f} tokens for each parameter of the standard model",
        ["model", "parameters", "learning rate", "loss", "difference", "FLOPs", "at equal FLOPs", "compute worth"],
        rows,
    )


def bounded(times):
    """Times the standard model's compute, of which 0 and infinity mean: beyond its shortest and longest runs."""
    factors = [factor for factor, _ in LADDER]
    return f"< {min(factors)}" if times == 0 else f"> {max(factors)}" if math.isinf(times) else f"{times:.2f}"


def verdict(difference, half, p):
    found = "pays" if difference < 0 else "hurts"
    if p >= 0.05:
        found = f"undecided within ±{abs(difference) + half:.3f}"
    return f"{difference:+.3f} ± {half:.3f} {found}"


def show_slopes(curves):
    """How the difference at equal cost changes with each doubling of the layers."""
    rows = []
    for name in dict.fromkeys(name for curve in curves.values() for name in curve.flops):
        of_name = {n_layer: curve.models[name] for n_layer, curve in curves.items() if name in curve.flops}
        if len(of_name) > 1:
            points = [(math.log2(L), *model.estimate({name: 1})[:2], model.freedom) for L, model in of_name.items()]
            change, half = slope(points)
            rows.append([name, ", ".join(map(str, of_name)), f"{change:+.3f} ± {half:.3f}"])
    table("The difference at equal cost, for each doubling of the layers", ["model", "layers", "change"], rows)


def draw(groups, curves):
    """What a model is worth over what it costs, both in times the standard model's compute; a line joins its sizes."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 5))
    pays = [0.9, 4.5]
    axis.plot(pays, pays, color="black", linewidth=1)
    axis.annotate("breaks even", (2.5, 2.5), (-8, 8), textcoords="offset points", fontsize=9, ha="right")
    for name in dict.fromkeys(name for curve in curves.values() for name in curve.flops):
        color = next((color for start, color in COLORS.items() if name.startswith(start)), "#666666")
        style = {"color": color, "marker": "o" if "residual" in MODELS.get(name, {}) else "D", "linewidth": 0.8}
        style["markerfacecolor"] = "white" if style["marker"] == "o" and "kept" not in name else color
        points = []
        for place, (size, curve) in enumerate(curves.items()):
            if name in curve.flops:
                unit = groups[size]["standard"][0]["flops"]
                cost, *worth = (flops / unit for flops in (curve.flops[name], *curve.equal_cost(name)))
                worth, low, high = (min(max(times, LADDER[-1][0]), LADDER[0][0]) for times in worth)
                axis.plot([cost, cost], [low, high], color=color, linewidth=1.3)
                axis.plot(cost, worth, markersize=5 + 2 * place, **style)
                points.append((cost, worth))
        axis.plot(*zip(*points), color=color, linewidth=0.8, linestyle=":")
        axis.plot([], [], label=name, markersize=7, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log", base=2)
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_xlabel("cost: operations, over the standard model's")
    axis.set_ylabel("worth: operations of the standard model for the same loss")
    sizes = ", ".join(f"{n_layer} × {width}" for width, n_layer in curves)
    axis.set_title(f"layers × width, from small to large markers: {sizes}", fontsize=9, loc="left")
    axis.grid(color="#e4e4e4", linewidth=0.7)
    axis.spines[:].set_visible(False)
    axis.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize=9)
    figure.tight_layout()
    return figure


def add_arguments(parser):
    parser.add_argument("--data", default="text", help="folder in data/ with a prepared text (default: text)")
    parser.add_argument("--wide", action="store_true", help="8 layers of width 256, in the place of all else")
    parser.add_argument("--plot", action="store_true", help="draw a figure, with matplotlib, beside the results")


if __name__ == "__main__":
    experiment("depth", trial, main, __doc__, add_arguments)
