"""
What a training step costs in time, over the standard model's: python tests/bench/speed.py [VARIANT ...]

Variants are written as for compare.py, as in "kept: --residual=m1 --keep_input". Steps of two models alternate: the
speed of a shared machine drifts, but the median ratio of such pairs hardly does.

With --nanogpt=FOLDER, nanoGPT's model and the standard one are timed instead, on a CPU and at the size of train.py.
With --seeds=3, both then train for as long as nanoGPT's model takes for 800 steps, each at its best learning rate. The
step counts follow from the times of an earlier command, if there was one, so a busy machine does no harm. Rerun the
command to continue.
"""

device = "auto"  # auto, cpu, cuda, cuda:1
nanogpt = ""  # folder of a checkout of nanoGPT
seeds = 0  # with nanogpt: runs of each model at its best learning rate; 0: only time steps
out = "out/nanogpt"  # with nanogpt: folder of the runs, and of nanogpt.json, which has all figures

import json
import runpy
import statistics
import sys
import time
from dataclasses import fields
from itertools import repeat
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from compare import ROOT, Comparison, Variant, as_table, copy_code, read_variant, search
from config import UserError, atomic_write, check_min, configure, read_settings
from config.runtime import Loss, git_commit, machine_name, pick_device, pick_dtype
from data.prepare import ensure_prepared
from model import GPT, GPTConfig

SHAPE = {"block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # of all models
SECONDS = 5  # of alternating steps
VARIANTS = ["--attention=w2", "--attention=summed_qk", "--residual=m1", "--residual=m2"]
STEPS, RATES = 800, [2e-3, 4e-3, 8e-3, 16e-3]  # of nanoGPT's model; of both models, to be tried first
SETTINGS = {"device": "cpu", "dtype": "float32"}  # of both, where they differ from train.py's
MISSING = b"\nConfigError, GPTConfig.attention = ValueError, 'standard'\n"  # in nanoGPT's model.py, for train.py


def stepper(config, batch_size, device, dtype, model_class=GPT):
    """Return a function that makes a training step on random tokens, as train.py does, and returns its seconds."""
    model = model_class(config).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    loss_of = Loss(model, compile=device.type != "cpu")
    shape = batch_size, model.config.block_size
    x, y = (torch.randint(model.config.vocab_size, shape, device=device) for _ in range(2))

    def step():
        began = time.perf_counter()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = loss_of(x, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        x[0, 0].item()  # which waits for a GPU
        return time.perf_counter() - began

    return step


def alternate(one, other, turns=5):
    """Return the median ratio of the other's step to the one before it."""
    torch.compiler.reset()  # or earlier models would count towards its limit of variants
    for step in (one, other) * 2:  # the first steps compile and allocate
        step()
    ratios, began = [], time.time()
    while len(ratios) < turns or time.time() - began < SECONDS:
        first = one()
        ratios.append(other() / first)
    return statistics.median(ratios)


def time_models(homes, settings):
    """Return {name: ms of a step, and steps in equal seconds} of the models of two copies of the code."""
    steppers = []
    for home in homes.values():
        module = runpy.run_path(str(home / "model.py"))
        config = {field.name: settings[field.name] for field in fields(module["GPTConfig"])}
        shape = module["GPTConfig"](**config), settings["batch_size"]
        steppers.append(stepper(*shape, torch.device("cpu"), torch.float32, module["GPT"]))
    ratio, ms = alternate(*steppers), 1000 * statistics.median(steppers[0]() for _ in range(20))
    return {name: {"ms": round(ms * cost, 1), "steps": round(STEPS / cost)} for name, cost in zip(homes, (1, ratio))}


def tuned_losses(variant, comparison):
    """Return a model's losses at several rates on seed 0, the best rate, and the losses of all seeds there."""

    def losses_of(rates, seeds):
        return [round(loss, 4) for loss, _ in comparison.pool.map(comparison.train, repeat(variant), rates, seeds)]

    rate, tuning = search(RATES, lambda rates: losses_of(rates, repeat(0)))
    return {"tuning": tuning, "rate": rate, "losses": losses_of(repeat(rate), comparison.seeds)}


def compare_with_nanogpt(checkout, out, seeds):
    """Print the times of both models and, with seeds, their losses. Write them to a file."""
    path, settings = out / "nanogpt.json", read_settings(ROOT / "train.py", []).values | SETTINGS
    model = (checkout / "model.py").read_bytes() + MISSING
    homes = {"nanoGPT's model": copy_code("", out / "code", {"model.py": model})}
    homes["standard"] = copy_code("", out / "code")
    if seeds and path.exists():
        results = json.loads(path.read_text())
    else:
        times = time_models(homes, settings | {"vocab_size": SHAPE["vocab_size"]})
        results = {"machine": machine_name(torch.device("cpu")), "commit": git_commit(), "models": times}
    if seeds:
        options = {"tune": True, "seeds": seeds, "first_seed": 1, "workers": 0}
        comparison = Comparison(out / "runs", ensure_prepared(settings["dataset"]).resolve(), options)
        try:
            for name, found in results["models"].items():
                variant = Variant(name, homes[name], settings | {"max_iters": found["steps"]})
                found |= tuned_losses(variant, comparison)
        finally:
            comparison.stop()
    with atomic_write(path) as file:
        file.write(json.dumps(results, indent=1).encode())
    rows = [[name, *map(str, found.values())] for name, found in results["models"].items()]
    print(results["machine"], "\n")
    print(as_table(["", *results["models"]["standard"]], rows))


def main(argv):
    words = [word for word in argv if not word.startswith("-")]
    own = configure(__file__, [word for word in argv if word.startswith("-")]).values
    check_min(own, "seeds", 0)
    if own["nanogpt"]:
        if words:
            raise UserError(f"{words[0]}: leave variants out with --nanogpt, which is for the standard model alone")
        compare_with_nanogpt(Path(own["nanogpt"]), Path(own["out"]).resolve(), own["seeds"])
        return
    device = pick_device(own["device"])
    torch.manual_seed(0)
    dtypes = torch.float32, pick_dtype("auto", device)
    standard = read_settings(ROOT / "train.py", []).values
    model_fields = {field.name for field in fields(GPTConfig)} & standard.keys()
    rows = []
    for name, _, settings in (read_variant(one, [], ROOT) for one in words or VARIANTS):
        fixed = settings.keys() - model_fields | SHAPE.keys()
        if other := [key for key in sorted(fixed) if settings.get(key) != standard.get(key)]:
            raise UserError(f"{name}: leave out {', '.join(other)}: all variants are timed at one size")
        configs = [GPTConfig(**{key: one[key] for key in model_fields} | SHAPE) for one in (standard, settings)]
        costs = [GPT(config).flops_per_token() for config in configs]
        size = 4 if device.type == "cpu" else 64
        pairs = ([stepper(config, size, device, dtype) for config in configs] for dtype in dtypes)
        rows.append([name, f"{costs[1] / costs[0]:.2f}", *(f"{alternate(*pair):.2f}" for pair in pairs)])
    print(machine_name(device), "\n")
    print(as_table(["", "operations", *(f"time, {dtype}" for dtype in dtypes)], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
