"""
What a training step and a generated token cost: python tests/bench/speed.py [VARIANT ...]

Models are timed in pairs, in one process: a step of one, a step of the other, and so on. The speed of a shared machine
drifts. The median ratio of such pairs hardly does. The tables are Markdown; all numbers go to `out` after each section.

Any variants can be measured against the standard model, written as for compare.py:

    python tests/bench/speed.py config/m1_shakespeare.py "kept: --residual=m1 --keep_input"
"""

import gc
import json
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config.runtime.waiting import choose_waiting

choose_waiting()  # before PyTorch is imported

import torch

from config import read_settings
from config.runtime.checks import of_model
from config.runtime.devices import machine_name, pick_attention_kernel, pick_device, pick_dtype
from config.runtime.files import atomic_write
from config.runtime.processes import install_excepthook
from config.runtime.run import code_version
from model import GPT, GPTConfig
from report import as_table
from variants import read_words

# -----------------------------------------------------------------------------
device = "auto"  # auto, cpu, cuda, cuda:1
out = "out/speed.json"  # file for the numbers
# -----------------------------------------------------------------------------

SHAPE = {"n_layer": 6, "n_head": 6, "n_embd": 384, "vocab_size": 65}  # of all models
SECONDS = 5  # of alternating steps
NEW = 1000  # tokens that are generated
VARIANTS = [
    "W2: --attention=w2",
    "W2, diagonal σ: --attention=w2 --sigma=diagonal",
    "summed QKᵀ: --attention=summed_qk",
    "Method 1: --residual=m1",
    "Method 2: --residual=m2",
]


class Trainer:
    """A model on its device, and training steps on random tokens as train.py makes them."""

    def __init__(self, model, B, dtype):
        self.model, self.dtype, self.device = model.train(), dtype, next(model.parameters()).device
        self.optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), self.device.type)
        self.autocast = torch.autocast(self.device.type, dtype) if dtype != torch.float32 else nullcontext()
        self.idx = torch.randint(model.config.vocab_size, (B, model.config.block_size + 1), device=self.device)
        if self.device.type != "cpu":
            model.compile_blocks()

    def timed_step(self):
        began = time.perf_counter()
        pick_attention_kernel(self.model, self.device, self.dtype)
        with self.autocast:
            loss = self.model(self.idx[:, :-1].contiguous(), self.idx[:, 1:].contiguous())[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def memory(self):
        """Return the peak bytes of a step on a GPU: parameters, optimizer state, gradients and saved activations.

        Other models on the device do not count. At least one step must have been made before.
        """
        state = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        own, before = [*self.model.parameters(), *state], torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        self.timed_step()
        return sum(tensor.nbytes for tensor in own) + torch.cuda.max_memory_allocated(self.device) - before


def alternate(one, other, turns=5):
    """Return the median ratio of the other's step to the one before it."""
    torch.compiler.reset()  # or earlier models would count towards its limit of variants
    for trainer in (one, other) * 2:  # the first steps compile and allocate
        trainer.timed_step()
    times, began = [], time.time()
    while len(times) < turns or time.time() - began < SECONDS:
        times.append((one.timed_step(), other.timed_step()))
    return statistics.median(second / first for first, second in times)


def make_model(settings, T, device):
    return GPT(GPTConfig(**of_model(settings) | SHAPE | {"block_size": T})).to(device)


def training(variants, device):
    """Yield rows: time, and on a GPU memory, relative to the standard model's."""
    (_, standard), *others = variants
    B = 4 if device.type == "cpu" else 64
    for name, settings in others:
        row = {"": name}
        for dtype in dict.fromkeys([torch.float32, pick_dtype("auto", device)]):
            models = pair = None  # frees the last ones
            gc.collect()  # compiled models are cycles of references
            models = [make_model(words, 256, device) for words in (standard, settings)]
            pair = [Trainer(model, B, dtype) for model in models]
            baseline, flops = (model.flops_per_token() for model in models)
            slower, kind = alternate(*pair), str(dtype).removeprefix("torch.")
            row["operations"] = flops / baseline
            row |= {f"{kind}: time": slower, f"{kind}: time / operations": slower * baseline / flops}
        if device.type == "cuda":
            row["memory"] = pair[1].memory() / pair[0].memory()
        yield row


@torch.no_grad()
def generating(variants, device):
    """Yield rows: tokens per second of `generate`, one sequence, float32."""
    prompt = torch.randint(SHAPE["vocab_size"], (1, 24), device=device)
    for name, settings in variants:
        model = make_model(settings, NEW + 24, device).eval()
        model.generate(prompt, 4)
        began = time.time()
        model.generate(prompt, NEW)[0, -1].item()  # which waits for a GPU
        yield {"": name, "tokens/s": NEW / (time.time() - began)}


def markdown(title, rows):
    """Return a section's table."""
    rounded = lambda cell: f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}"
    cells = [[rounded(cell) if isinstance(cell, float) else str(cell) for cell in row.values()] for row in rows]
    return f"\n{title}\n\n{as_table(rows[0], cells)}"


def main(argv):
    words = [word for word in argv if not word.startswith("-")]
    options = read_settings(__file__, [word for word in argv if word.startswith("-")])
    variants = [read_words(one, []) for one in ["standard:", *(words or VARIANTS)]]
    torch.manual_seed(0)
    device, path, tables = pick_device(options["device"]), Path(options["out"]), {}
    machine = f"{machine_name(device)}, commit {code_version()['commit']}"
    print(machine, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name, measure in ("training", training), ("generating", generating):
        tables[name] = list(measure(variants, device))
        print(markdown(name, tables[name]), flush=True)
        with atomic_write(path) as file:  # after each section, since they take minutes
            file.write(json.dumps({"machine": machine, "tables": tables}, indent=1, ensure_ascii=False).encode())
    print(f"\nall numbers: {path}")


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
