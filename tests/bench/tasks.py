"""
The benchmarks of the W2 document: python tests/bench/tasks.py {recall,entailment,micro}

    recall       copy random tokens
    entailment   is one node of a tree an ancestor of another?
    micro        the copy task again, with a longer context or a deeper model; the memory and time of a step

Each compares standard attention with W2, by distance (as the document states) and by overlap (as its code computes): at
the document's widths and rates, then at equal widths or parameters and tuned rates. Rerun an interrupted experiment to
continue. --out=tests/bench/results prints the tables of the committed results.
"""

device = "auto"  # auto, cpu, cuda, cuda:1
out = "out/bench"  # folder of the results

import json
import math
import statistics
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from compare import as_table, search
from config import UserError, atomic_write, configure
from config.runtime import machine_name, pick_device
from model import GPT, GPTConfig
from speed import alternate, stepper

KINDS = {
    "standard": {},
    "W2, distance": {"attention": "w2", "sigma": "diagonal"},
    "W2, overlap": {"attention": "w2_overlap"},
}
TASKS = {  # the settings of their runs
    "copy": {"batch_size": 32, "steps": 500},
    "entailment": {"batch_size": 32, "steps": 2000},
}
SHAPES = {  # of their models
    "copy": {"block_size": 127, "vocab_size": 1024, "n_layer": 2},
    "entailment": {"block_size": 2, "vocab_size": 1024, "n_layer": 2},
}
TASKS["micro"], SHAPES["micro"] = TASKS["copy"], SHAPES["copy"]
# The document's runs, of the standard model and of W2 (with a diagonal σ, by its parameters): width and heads;
# the MLP's width, as a multiple; learning rates; losses that it reports. Its code starts from orthogonal matrices in
# recall, and elsewhere from PyTorch's initial values, but 0.02 in W2's attention.
PUBLISHED = {
    "recall": ("copy", ((96, 6), (64, 4)), 4, (1e-3, 5e-3), (3.68, 3.45), {"init": "orthogonal"}),
    "entailment": ("entailment", ((96, 6), (88, 4)), 2.68, (1e-3, 5e-4), (0.0078, 0.0067), {}),
    "base": ("micro", ((96, 6), (64, 4)), 4, (1e-3, 1e-3), (6.94, 6.80), {}),
    "long": ("micro", ((96, 6), (64, 4)), 4, (1e-3, 1e-3), (6.96, 6.94), {"batch_size": 4, "block_size": 511}),
    "deep": ("micro", ((96, 6), (64, 4)), 4, (1e-3, 1e-3), (6.49, 5.84), {"n_layer": 4}),
}
# Memory that it reports for these, in MB; of how many sequences ours is measured: the document's own, and 32 for all.
MEMORY = [("base", (192, 198), 32), ("long", (176, 227), 4), ("long", (176, 227), 32), ("deep", (300, 311), 32)]
TIMED = ("base", "long", "deep")  # the document: about 1.2 times as long
LAST = "last 100 steps"  # the mean loss of these steps of training

# -- data: x and y (B, T) for a step, y is -1 where there is no target --------------------------------------

UNSEEN, SEEN, HELD_OUT = 2**40, 2**40 + 1, 2**40 + 2  # streams of random numbers that no training step uses


def random_numbers(seed, step):
    """Return an independent stream of random numbers for each seed and step."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, step, 0]))


def copies(run, step):
    """Return random tokens followed by the same tokens. All positions have targets; the first half is unpredictable."""
    half = (run["model"]["block_size"] + 1) // 2
    first = random_numbers(run["seed"], step).integers(run["model"]["vocab_size"], size=(run["batch_size"], half))
    tokens = torch.from_numpy(np.concatenate((first, first), axis=1))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def make_tree(random, most):
    """Return a random tree of N <= most nodes, `above` (N, N): above[n, c] if n descends from c. Node 0 is the root."""
    parents, level = [-1], [0]
    for _ in range(6):  # levels, of one to four children a node
        children = [parent for parent in level for _ in range(random.integers(1, 5))][: most - len(parents)]
        level = range(len(parents), len(parents) + len(children))
        parents += children
    above = np.zeros((len(parents), len(parents)), dtype=bool)
    for node, parent in enumerate(parents[1:], 1):
        above[node] = above[parent] | (np.arange(len(parents)) == parent)
    return above


@cache
def pairs_of_tree(seed, most):
    """Return (positives, negatives) to train on and those held out: pairs (node, candidate)."""
    random = random_numbers(seed, UNSEEN)
    above = make_tree(random, most)
    held_out, others = random.random(above.shape) < 0.1, ~above & ~np.eye(len(above), dtype=bool)
    return [[np.argwhere(mask.T & chosen.T)[:, ::-1] for mask in (above, others)] for chosen in (~held_out, held_out)]


def entailments(run, step):
    """Return pairs (B, 2) of a node and a candidate, half of them positives. The class is asked at the candidate."""
    seen, held_out = pairs_of_tree(run["seed"], run["model"]["vocab_size"])
    random, half = random_numbers(run["seed"], step), run["batch_size"] // 2
    pairs = [some[random.integers(len(some), size=half)] for some in (held_out if step == HELD_OUT else seen)]
    classes = np.stack((np.full(2 * half, -1), np.repeat([1, 0], half)), axis=1)
    return torch.from_numpy(np.concatenate(pairs)), torch.from_numpy(classes)


DATA = {"copy": copies, "entailment": entailments, "micro": copies}


def trial(run, device):
    """Train a model, and return its results on data that it has not seen, and those of training."""
    task = run["task"]
    torch.manual_seed(run["seed"])
    model = GPT(GPTConfig(**run["model"]))
    if task == "entailment":
        model.head = torch.nn.Linear(model.config.n_embd, 2, bias=False)
    initialize(model, run.get("init", "orthogonal"))
    losses = fit(run, model.to(device), DATA[task])
    results = {LAST: statistics.fmean(losses[-100:])}
    # the document's micro-benchmarks are judged by their last training steps alone
    tests = {"entailment": {"seen ": SEEN, "": HELD_OUT}, "micro": {}}.get(task, {"": UNSEEN})
    size = 4096 if task == "entailment" else 512
    for name, stream in tests.items():
        x, y = DATA[task](run | {"batch_size": size}, stream)
        with torch.no_grad():
            logits, loss, targets = answers(model, x.to(device), y.to(device))
        right = logits.argmax(-1) == targets
        if task == "copy":  # the half that can be predicted
            right = right.view(size, -1)[:, (run["model"]["block_size"] - 1) // 2 :]
        results |= {f"{name}loss": loss.item(), f"{name}accuracy": right.float().mean().item()}
    return results


def memory(run, device):
    """Return the MB that autograd keeps for a step's backward pass, parameters left out."""
    model, kept = GPT(GPTConfig(**run["model"])).to(device), {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()  # each once
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(*(tensor.to(device) for tensor in copies(run, 0)))
    return {"MB kept": sum(size for place, size in kept.items() if place not in own) / 1e6}


@torch.no_grad()
def initialize(model, init):
    """Give a model orthogonal matrices, or PyTorch's initial values, with W2's attention at 0.02 as in its code."""
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Embedding)):
            torch.nn.init.orthogonal_(module.weight) if init == "orthogonal" else module.reset_parameters()
    if model.config.attention in ("w2", "w2_overlap"):
        for attn in [block.attn for block in model.blocks]:
            if init == "orthogonal":  # W2Attn has one matrix for μ and σ together: each gets its part of it
                for parts in (attn.q_proj.weight, attn.sigma_q.weight), (attn.k_proj.weight, attn.sigma_k.weight):
                    both = torch.nn.init.orthogonal_(torch.cat(parts))
                    for part, rows in zip(parts, both.split([len(part) for part in parts]), strict=True):
                        part.copy_(rows)
            else:
                for p in [p for p in attn.parameters() if p.dim() == 2]:
                    torch.nn.init.normal_(p, std=0.02)


def answers(model, x, y):
    """Return logits, loss and targets of the positions that have a target; all logits would cost far more."""
    asked = y >= 0
    logits = model.head(model.features(x)[asked][None])
    return logits[0], torch.nn.functional.cross_entropy(logits[0], y[asked]), y[asked]


def fit(run, model, data):
    """Train like train.py, but for the warm-up ("fair"), or with AdamW's defaults ("published"). Return losses."""
    steps, highest, device = run["steps"], run["learning_rate"], model.embed.weight.device
    if run["recipe"] == "fair":
        optimizer = model.configure_optimizers(0.1, highest, (0.9, 0.99), device.type)
        warmup, final, largest_norm = steps // 10, 0.1, 1.0
    else:
        optimizer = torch.optim.AdamW(model.parameters(), highest)
        warmup, final, largest_norm = 0, 1.0, math.inf
    losses = []
    for step in range(steps):
        done = (step - warmup) / max(steps - warmup, 1)
        decayed = final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = highest * ((step + 1) / warmup if step < warmup else decayed)
        loss = answers(model, *(tensor.to(device) for tensor in data(run, step)))[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Sweep:
    """The runs of an experiment: read from its file if they are finished, else run now. JSON has null for nan."""

    def __init__(self, experiment, options, measure=None):
        self.path, self.measure = Path(options["out"]) / f"{experiment}.json", measure or trial
        self.device = pick_device(options["device"])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        results = json.loads(self.path.read_text()) if self.path.exists() else []
        self.finished = {json.dumps(result["run"], sort_keys=True): result for result in results}

    def result(self, run):
        key = json.dumps(run, sort_keys=True)
        if key not in self.finished:
            found = {name: None if x != x else x for name, x in self.measure(run, self.device).items()}
            self.finished[key] = {"run": run, **found, "machine": machine_name(self.device)}
            with atomic_write(self.path) as file:  # a line for each run
                file.write(("[\n" + ",\n".join(map(json.dumps, self.finished.values())) + "\n]\n").encode())
            print(f"{key}: {found}", flush=True)
        return self.finished[key]

    def repeated(self, cells, seeds=(1, 2, 3)):
        """Return {name: results of all seeds} of `cells`, {name: run without a seed}."""
        return {name: [self.result(cell | {"seed": seed}) for seed in seeds] for name, cell in cells.items()}

    def tuned(self, cells, rates, seeds=(1, 2, 3), by="loss", tuning_seeds=(0,)):
        """Return `repeated` at each cell's best learning rate. The grid grows until the best is not at its edge."""

        def score(cell, rate):
            found = [self.result(cell | {"learning_rate": rate, "seed": seed})[by] for seed in tuning_seeds]
            return math.inf if None in found else statistics.fmean(found) * (-1 if by == "accuracy" else 1)

        for name, cell in cells.items():
            best, _ = search(rates, lambda new, cell=cell: [score(cell, rate) for rate in new])
            cells = cells | {name: cell | {"learning_rate": best}}
        return self.repeated(cells, seeds)


def fair_cells(task, model):
    """Return runs of standard and W2, without rate and seed: as wide as each other, and with as many parameters."""
    standard, cells = GPTConfig(**SHAPES[task] | model), {}
    for name, kind in KINDS.items():
        settings = SHAPES[task] | model | kind
        with torch.device("meta"):  # only counted
            surplus = GPT(GPTConfig(**settings)).get_num_params() - GPT(standard).get_num_params()
        if surplus:  # it comes out of the columns of gate, up and down in all layers
            settings["n_inner"] = standard.mlp_width - round(surplus / (3 * standard.n_embd * standard.n_layer))
        cells[name] = TASKS[task] | {"task": task, "recipe": "fair", "model": settings}
    return cells


def published_cells(name, equal_widths=False):
    """Return the document's runs of a benchmark, without a seed; or the same with a standard model as wide as W2."""
    task, widths, inner, rates, _, changes = PUBLISHED[name]
    run = {"init": "pytorch"} | TASKS[task] | {"task": task, "recipe": "published"}
    shape, cells = dict(SHAPES[task]), {}
    for field, value in changes.items():
        (shape if field in shape else run)[field] = value
    for kind, settings in KINDS.items():
        width, heads = widths[equal_widths or bool(settings)]
        model = shape | {"n_embd": width, "n_head": heads, "n_inner": int(inner * width)} | settings
        cells[kind] = run | {"model": model, "learning_rate": rates[bool(settings)]}
    return cells


def print_results(name, results, *columns):
    """Print mean and standard deviation of columns over each kind's seeds, with the document's losses or the rates."""
    rates, rows = [group[0]["run"]["learning_rate"] for group in results.values()], []
    numbers = PUBLISHED[name][4] if name in PUBLISHED else rates
    for column in columns:
        cells = []
        for group in results.values():
            values = [math.nan if one[column] is None else one[column] for one in group]
            cells.append(f"{statistics.fmean(values):.3f} ± {statistics.stdev(values):.3f}")
        rows.append([name if column == LAST else f"{name}: {column}", *cells, ", ".join(map(str, numbers))])
    print(f"\n{as_table(['', *results, 'document (standard, W2), or rates'], rows)}", flush=True)


def recall(sweep):
    seeds = [1, 2, 3, 4, 5]
    print_results("recall", sweep.repeated(published_cells("recall"), seeds), LAST)
    cells = fair_cells("copy", {"n_embd": 64, "n_head": 4, "n_inner": 256})
    results = sweep.tuned(cells, [1e-3, 2e-3, 5e-3], seeds)
    print_results("copy, equal parameters", results, "loss", "accuracy")


def entailment(sweep):
    seeds, tuning_seeds = [1, 2, 3, 4, 5], [6, 7, 8]  # several, since accuracy on held-out pairs is noisy
    columns = "seen accuracy", "accuracy", "seen loss", "loss"  # the others are of held-out pairs
    print_results("entailment", sweep.repeated(published_cells("entailment"), seeds), *columns)
    cells = fair_cells("entailment", {"n_embd": 96, "n_head": 6})
    results = sweep.tuned(cells, [5e-4, 1e-3, 2e-3], seeds, "accuracy", tuning_seeds)
    print_results("entailment, equal parameters", results, *columns)


def micro(sweep):
    rows = []
    for name in TIMED:
        print_results(name, sweep.repeated(published_cells(name)), LAST)
        results = sweep.tuned(published_cells(name, equal_widths=True), [1e-3, 2e-3, 4e-3], by=LAST)
        print_results(f"{name}, equal widths", results, LAST)
    memories = Sweep("memory", {"device": str(sweep.device), "out": sweep.path.parent}, memory)
    for name, reported, size in MEMORY:
        cells = published_cells(name)
        found = [memories.result(cell | {"batch_size": size, "seed": 1})["MB kept"] for cell in cells.values()]
        rows.append([f"{name}, {size} sequences", *(f"{kept:.1f}" for kept in found), ", ".join(map(str, reported))])
    print(f"\n{as_table(['MB kept', *cells, 'document (standard, W2)'], rows)}")
    rows = []
    for name in TIMED:
        shapes = [(GPTConfig(**cell["model"]), cell["batch_size"]) for cell in published_cells(name).values()]
        standard, *others = (stepper(*shape, sweep.device, torch.float32) for shape in shapes)
        rows.append([name, *(f"{alternate(standard, other):.2f}" for other in others)])
    print(f"\n{as_table(['time of a step, over standard', *list(cells)[1:]], rows)}")


EXPERIMENTS = {"recall": recall, "entailment": entailment, "micro": micro}


def main(argv):
    words = [word for word in argv if not word.startswith("-")]
    own = configure(__file__, [word for word in argv if word.startswith("-")]).values
    if len(words) != 1 or words[0] not in EXPERIMENTS:
        raise UserError(f"'{' '.join(words)}' is invalid: the experiment must be one of {', '.join(EXPERIMENTS)}")
    torch.set_num_threads(1)  # the models are so small that threads would mostly wait for each other
    EXPERIMENTS[words[0]](Sweep(words[0], own))


if __name__ == "__main__":
    main(sys.argv[1:])
