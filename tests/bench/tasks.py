"""
What the experiments that are no text share: a training loop, runs done side by side and remembered, and tables.

A run is a dict of settings from which everything else follows: a model, its batches, its learning rate, its seed.
An experiment names one function, `trial`, that takes a run and a device and returns what came of it, and asks a Sweep
for runs.
What is done is kept in a JSON file, one run per line, so an interrupted experiment goes on where it was.
"""

import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import numpy as np
import torch

from cli import ArgumentParser
from config.runtime.common import UserError, atomic_write, clock, install_excepthook, pick_attention_kernel
from config.runtime.common import pick_device, pick_dtype, quiet_pipe
from model import GPT, GPTConfig

# -- one run -------------------------------------------------------------------------------------------------


def random_numbers(seed, step):
    """A stream of random numbers of its own for each seed and step."""
    return np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, step, 0]))


# the kinds of attention that the W2 document's experiments are about, besides the standard one
W2_KINDS = {"W2, scalar σ": {"attention": "w2"}, "W2, diagonal σ": {"attention": "w2", "sigma": "diagonal"}}


def with_parameters(settings, like):
    """The settings of a GPTConfig, with an MLP as narrow as gives it the number of parameters of the model `like`."""
    with torch.device("meta"):  # only counted
        model, other = GPT(GPTConfig(**settings)), GPT(GPTConfig(**like))
    surplus = model.get_num_params() - other.get_num_params()
    columns = 3 * model.config.n_embd * model.config.n_layer  # of gate, up and down in all layers
    return settings | {"n_inner": model.config.n_inner - round(surplus / columns)}


def fair_cells(task, standard):
    """W2 and standard on a task, as wide as each other and with as many parameters: runs without rate and seed."""
    models = {"standard": standard}
    models |= {name: with_parameters(standard | kind, standard) for name, kind in W2_KINDS.items()}
    return {name: task | {"recipe": "fair", "model": model} for name, model in models.items()}


def published_cells(task, size, sides):
    """The two sides of the W2 document, {name: (model, learning rate)}: runs without seed."""
    task = task | {"recipe": "published"}
    return {name: task | {"model": size | model, "learning_rate": rate} for name, (model, rate) in sides.items()}


def make_orthogonal(model):
    """Start all matrices as the W2 document names. Its embeddings are small, so that the attention's output is not
    lost beside them, and a copy is learned sooner."""
    for p in model.parameters():
        if p.dim() == 2:
            torch.nn.init.orthogonal_(p)


def start_worker(device):
    """Makes this process one that trains on one core, and on `device`, and ends when its parent does."""
    torch.set_num_threads(1)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.set_float32_matmul_precision("high")
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def autocast(run, device):
    """Return the autocast context of a run on `device`: of run["dtype"], where auto is what train.py would take."""
    precision = pick_dtype(run.get("dtype", "float32"), device)
    return torch.autocast(device.type, precision) if precision != torch.float32 else nullcontext()


def fit(run, model, batch, loss):
    """Trains `model` where it is, on batch(step) -> (x, y) for run["steps"] steps, by run["recipe"]: fair or published.

    Returns the number of parameters, the floating-point operations (`flops_per_token`, for full contexts), the
    seconds, and the mean training loss of each twentieth of the run. A loss that is not finite stays in the curve.
    """
    steps, highest, device = run["steps"], run["learning_rate"], model.embed.weight.device
    model.train()
    pick_attention_kernel(model, device, pick_dtype(run.get("dtype", "float32"), device))
    if run["recipe"] == "fair":  # what train.py does
        optimizer = model.configure_optimizers(0.1, highest, (0.9, 0.99), device.type)
        warmup, final, largest_norm = steps // 10, 0.1, 1.0
    else:  # published: AdamW as PyTorch makes it, with nothing around it
        optimizer = torch.optim.AdamW(model.parameters(), highest)
        warmup, final, largest_norm = 0, 1.0, math.inf
    losses, tokens, began = torch.empty(steps, device=device), 0, time.time()
    for step in range(steps):
        done = (step - warmup) / max(steps - warmup, 1)
        decayed = final + (1 - final) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = highest * ((step + 1) / warmup if step < warmup else decayed)
        x, y = (tensor.to(device) for tensor in batch(step))
        with autocast(run, device):
            value = loss(model, x, y)
        value.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), largest_norm)
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = value.detach()  # in one tensor: many small ones would fragment the memory
        tokens += x.numel()
    model.eval()
    return {
        "parameters": model.get_num_params(),
        "flops": model.flops_per_token() * tokens,
        "seconds": time.time() - began,
        "curve": [part.mean().item() for part in losses.cpu().tensor_split(min(20, steps))],
    }


# -- many runs -----------------------------------------------------------------------------------------------


class Lacking(UserError):
    """Runs that --show would need have not been done."""


class Sweep:
    """The runs of one experiment, and its command line."""

    def __init__(self, name, trial, description):
        parser = ArgumentParser(description=description)
        parser.add_argument("--quick", action="store_true", help="tiny runs, to see that it works; no figure counts")
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
        parser.add_argument("--workers", type=int, default=min(os.cpu_count(), 8), help="runs at a time")
        parser.add_argument("--out", type=Path, default=ROOT / "out" / "bench", help="folder of the results")
        parser.add_argument("--show", action="store_true", help="show the results that are there; run nothing")
        self.args = args = parser.parse_args()
        if args.workers < 1:
            raise UserError(f"--workers={args.workers}: at least one is needed")
        self.trial, self.quick, self.showing = trial, args.quick, args.show
        self.device, self.workers = pick_device(args.device), args.workers
        self.path = args.out / f"{name}{'_quick' * args.quick}.json"
        self.machine = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"
        self.machine += f", torch {torch.__version__}"
        args.out.mkdir(parents=True, exist_ok=True)
        self.done = read_results(self.path)
        spawn = multiprocessing.get_context("spawn")  # a GPU cannot be used by a fork
        self.pool = ProcessPoolExecutor(self.workers, spawn, start_worker, (self.device,))

    def run(self, runs):
        """What came of each of `runs`, in their order. Those not yet known are done now; with --show, Lacking."""
        missing = list({key(run): run for run in runs if key(run) not in self.done}.values())
        if missing and self.showing:
            lack = f"{self.path} lacks {len(missing)} of the next {len(runs)} runs"
            raise Lacking(f"{lack}: without --show they are done")
        if missing:
            print(f"{len(missing)} runs, {self.workers} at a time, on {self.machine}; {self.path}", flush=True)
        began = time.time()
        futures = {self.pool.submit(self.trial, run, self.device): run for run in missing}
        for count, future in enumerate(as_completed(futures), 1):
            run = futures[future]
            result = plain({"run": run, **future.result(), "machine": self.machine})
            self.done[key(run)] = result
            self.save()
            left = (time.time() - began) / count * (len(missing) - count)
            came = f"loss {result['loss']}" if "loss" in result else "done"
            print(f"[{count}/{len(missing)}] {name_of(run)}: {came}; {clock(left)} left", flush=True)
        return [self.done[key(run)] for run in runs]

    def tuned(self, cells, rates, seeds, by="loss", tuning_seeds=(0,)):
        """Runs each of `cells` (by name, runs without rate and seed) for each seed at the learning rate it likes.

        That is the best `by` loss or accuracy in the mean of runs of `tuning_seeds`: one of `rates` or, where the best
        of these is the lowest or highest, of as many halves or doubles as it takes for the best to have a worse one on
        either side. Returns a list of results by each name.
        """

        def trials(name, rate):
            return [cells[name] | {"learning_rate": rate, "seed": seed} for seed in tuning_seeds]

        values = {name: dict.fromkeys(rates) for name in cells}  # of the rates to try
        while untried := [(name, rate) for name in cells for rate, value in values[name].items() if value is None]:
            found = self.run([run for name, rate in untried for run in trials(name, rate)])
            for (name, rate), results in zip(untried, in_groups(found, len(tuning_seeds))):
                value = average(result[by] for result in results)
                values[name][rate] = -math.inf if math.isnan(value) else value if by == "accuracy" else -value
            for name, of_cell in values.items():
                best, lowest, highest = max(of_cell, key=of_cell.get), min(of_cell), max(of_cell)
                beyond = best * 2 if best == highest else best / 2
                wanted = all(key(run) in self.done for run in trials(name, beyond)) if self.showing else not self.quick
                if best in (lowest, highest) and wanted:
                    of_cell.setdefault(beyond)
        best = {name: max(of_cell, key=of_cell.get) for name, of_cell in values.items()}
        return self.repeated({name: cell | {"learning_rate": best[name]} for name, cell in cells.items()}, seeds)

    def repeated(self, runs, seeds):
        """Runs each of `runs` (by their names, without a seed) for each seed; a list of results by each name."""
        results = self.run([run | {"seed": seed} for run in runs.values() for seed in seeds])
        return dict(zip(runs, in_groups(results, len(seeds))))

    def save(self):
        lines = ",\n".join(json.dumps(result) for result in self.done.values())
        with atomic_write(self.path) as file:
            file.write(f"[\n{lines}\n]\n".encode())


def key(run):
    return json.dumps(run, sort_keys=True)


def name_of(run):
    """The settings that tell a run from its neighbours, for people."""
    shown = ("attention", "sigma", "n_embd")
    model = [f"{name}={value}" for name, value in run.get("model", {}).items() if name in shown]
    facts = [f"{run[name]}" for name in ("task", "setting", "candidates", "recipe", "scores") if name in run]
    numbers = ("tau_rate", "tau_start", "key_size", "learning_rate", "seed")
    return " ".join([*facts, *model, *(f"{name}={run[name]:g}" for name in numbers if name in run)])


def plain(x):
    """x for JSON: numbers to six digits, and None for those that are not finite."""
    if isinstance(x, dict):
        return {name: plain(value) for name, value in x.items()}
    if isinstance(x, list):
        return [plain(value) for value in x]
    if isinstance(x, float):
        return float(f"{x:.6g}") if math.isfinite(x) else None
    return x


def read_results(path):
    """The results kept in a file, by their runs; UserError if it is not one."""
    if not path.exists():
        return {}
    try:
        return {key(result["run"]): result for result in json.loads(path.read_text())}
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{path}: damaged: move it away to start anew") from None


def in_groups(items, size):
    return [items[i : i + size] for i in range(0, len(items), size)]


# -- what they show ------------------------------------------------------------------------------------------


def average(values):
    """The mean, or nan where a run diverged."""
    return statistics.fmean(math.nan if value is None else value for value in values)


def mean_sd(results, name="loss", digits=3):
    """Mean ± standard deviation over the seeds."""
    values = [math.nan if result[name] is None else result[name] for result in results]
    deviation = statistics.stdev(values) if len(values) > 1 else math.nan
    return f"{statistics.fmean(values):.{digits}f} ± {deviation:.{digits}f}"


def table(title, header, rows):
    """Prints a table in Markdown."""
    print(f"\n{title}\n")
    print("| " + " | ".join(header) + " |\n" + "|---" * len(header) + "|")
    for row in rows:
        print("| " + " | ".join(map(str, row)) + " |")
    print(flush=True)


def experiment(name, trial, main, description):
    """Runs main(sweep) as a program."""
    install_excepthook()
    sweep = Sweep(name, trial, description)
    if sweep.showing:
        quiet_pipe()
    try:
        main(sweep)
    finally:
        sweep.pool.shutdown(cancel_futures=True)
