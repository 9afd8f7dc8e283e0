"""
What a training step costs in time, over the standard model's: python tests/bench/speed.py [VARIANT ...]

Variants are written as for compare.py, as in "kept: --residual=m1 --keep_input". Steps of two models alternate: the
speed of a shared machine drifts, but the median ratio of such pairs hardly does.
"""

device = "auto"  # auto, cpu, cuda, cuda:1

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from config.runtime.program import choose_waiting

choose_waiting()  # before PyTorch is imported

import torch

from compare import ROOT, as_table, read_variant
from config import read_settings, start_program
from config.runtime.checkpoints import of_model
from config.runtime.devices import compile_blocks, machine_name, pick_attention_kernel, pick_device, pick_dtype
from model import GPT, GPTConfig

SHAPE = {"block_size": 256, "n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # of all models
SECONDS = 5  # of alternating steps
VARIANTS = ["--attention=w2", "--attention=summed_qk", "--residual=m1", "--residual=m2"]


def stepper(config, batch_size, device, dtype):
    """Return a function that makes a training step on random tokens, as train.py does, and returns its seconds."""
    model = GPT(config).to(device)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), device.type)
    shape = batch_size, model.config.block_size
    x, y = (torch.randint(model.config.vocab_size, shape, device=device) for _ in range(2))
    if device.type != "cpu":
        compile_blocks(model)

    def step():
        began = time.perf_counter()
        pick_attention_kernel(model, device, dtype)
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            loss = model(x, y)[1]
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


def main(argv):
    words = [word for word in argv if not word.startswith("-")]
    own = start_program(__file__, [word for word in argv if word.startswith("-")]).values
    device = pick_device(own["device"])
    torch.manual_seed(0)
    dtypes = torch.float32, pick_dtype("auto", device)
    standard = read_settings(ROOT / "train.py", []).defaults
    rows = []
    for name, _, settings in (read_variant(one, [], ROOT) for one in words or VARIANTS):
        configs = [GPTConfig(**of_model(one) | SHAPE) for one in (standard, settings)]
        costs = [GPT(config).flops_per_token() for config in configs]
        size = 4 if device.type == "cpu" else 64
        pairs = ([stepper(config, size, device, dtype) for config in configs] for dtype in dtypes)
        rows.append([name, f"{costs[1] / costs[0]:.2f}", *(f"{alternate(*pair):.2f}" for pair in pairs)])
    print(machine_name(device), "\n")
    print(as_table(["", "operations", *(f"time, {dtype}" for dtype in dtypes)], rows))


if __name__ == "__main__":
    main(sys.argv[1:])
