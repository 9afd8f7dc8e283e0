"""
What a training step, a generated token and compiling cost: python tests/bench/speed.py [VARIANT ...] [--everything]

Models are timed in pairs, in one process: a step of one, a step of the other, and so on. The speed of a shared machine
drifts. The median ratio of such pairs hardly does. The tables are Markdown; `out` gets all figures after each section.

Any variants can be measured against the standard model, written as for compare.py:

    python tests/bench/speed.py config/m1_shakespeare.py "kept: --residual=m1 --keep_input" --sections=training
"""

import gc
import importlib.util
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext, redirect_stdout
from itertools import accumulate
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler is chatty
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch

from config import given_settings, read_settings
from config.runtime.checks import of_model
from config.runtime.common import UserError, atomic_write, install_excepthook, machine_name, pick_attention_kernel
from config.runtime.common import pick_device, pick_dtype, use_plain_attention
from config.runtime.log import code_version
from model import GPT, GPTConfig
from report import as_table

# -----------------------------------------------------------------------------
device = "auto"  # auto, cpu, cuda, cuda:1
nanogpt = ""  # a checkout of nanoGPT, to be timed next to this model
sections = "training,next_to_nanogpt,generating,compiling"  # what to measure
everything = False  # also how cost grows with depth, context and width, and on a GPU GPT-2's size
show = False  # print the committed tables; measure nothing
quick = False  # tiny sizes, to see that it works; the results are meaningless
out = "out/speed.json"  # where the figures go
# -----------------------------------------------------------------------------

VOCABULARY = 65  # Tiny Shakespeare's characters
STANDARD, NANOGPT = {}, None  # given instead of a variant's settings
VARIANTS = {
    "W2": {"attention": "w2"},
    "W2, diagonal σ": {"attention": "w2", "sigma": "diagonal"},
    "summed QKᵀ": {"attention": "summed_qk"},
    "Method 1": {"residual": "m1"},
    "Method 2": {"residual": "m2"},
}
COMPILE = """
from speed import GPT, GPTConfig, Trainer, torch
model = GPT(GPTConfig(n_layer=12, n_head=4, n_embd=128, block_size=256, vocab_size=65, **{settings}))
print(Trainer(model.to("{device}"), 4, torch.bfloat16, compiled=True).timed_step())
"""

# -- one step ------------------------------------------------------------------------------------------------


class Trainer:
    """A model on its device, and training steps on random tokens as train.py makes them."""

    def __init__(self, model, B, dtype, compiled=False):
        self.model, self.run, self.dtype = model.train(), model, dtype
        self.device = next(model.parameters()).device
        with redirect_stdout(None):  # nanoGPT prints its parameter count
            self.optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), self.device.type)
        self.autocast = torch.autocast(self.device.type, dtype) if dtype != torch.float32 else nullcontext()
        self.idx = torch.randint(model.config.vocab_size, (B, model.config.block_size + 1), device=self.device)
        if compiled and isinstance(model, GPT):
            model.compile_blocks()
        elif compiled:
            self.run = torch.compile(model)

    def step(self):
        if isinstance(self.model, GPT):
            pick_attention_kernel(self.model, self.device, self.dtype)
        else:
            use_plain_attention(False)
        with self.autocast:
            loss = self.run(self.idx[:, :-1].contiguous(), self.idx[:, 1:].contiguous())[1]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def timed_step(self):
        """Return the seconds of a step, including those of the GPU."""
        began = time.perf_counter()
        self.step()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter() - began

    def memory(self):
        """Return the peak bytes of a step: parameters, optimizer state, gradients and saved activations.

        Other models on the device do not count. At least one step must have been made before.
        """
        state = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *state]) + peak_bytes(self.step, self.device)


def peak_bytes(function, device):
    """Return the peak of what a call allocates, on top of what was allocated before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        function()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events if event.name() == "[memory]"), initial=0))


def alternate(trainers, seconds=5, turns=5):
    """Return each trainer's median seconds per step, and its median ratio to the first one's step of the same turn."""
    torch.compiler.reset()  # or earlier models would count towards its limit of variants
    for trainer in trainers * 2:  # the first steps compile and allocate
        trainer.timed_step()
    times, began = [], time.time()
    while len(times) < turns or time.time() - began < seconds:
        times.append([trainer.timed_step() for trainer in trainers])
    ratios = [[step / turn[0] for step in turn] for turn in times]
    return [[statistics.median(of_one) for of_one in zip(*rows)] for rows in (times, ratios)]


# -- measuring and tables ------------------------------------------------------------------------------------


class Bench:
    """A device, the variants named on the command line, and the rows measured so far, by section."""

    def __init__(self, options, variants):
        self.quick, self.variants, self.tables = options["quick"], variants or VARIANTS, {}
        self.device = pick_device(options["device"])
        self.dtype, self.on_cpu = pick_dtype("auto", self.device), self.device.type == "cpu"
        self.dtypes = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, self.dtype)}
        self.nanogpt = import_nanogpt(Path(options["nanogpt"])) if options["nanogpt"] else None

    def model(self, settings, n_layer, n_embd, T, V=VOCABULARY):
        shape = {"n_layer": n_layer, "n_head": n_embd // 64, "n_embd": n_embd, "block_size": T, "vocab_size": V}
        if settings is not NANOGPT:
            return GPT(GPTConfig(**shape | settings)).to(self.device)
        with redirect_stdout(None):
            return self.nanogpt.GPT(self.nanogpt.GPTConfig(**shape, dropout=0.0, bias=False)).to(self.device)

    def cost(self, settings, shape, B, baseline=STANDARD, dtype=None, compiled=None):
        """Return ms and MB of a training step, the baseline's, and the ratios: time, operations and memory."""
        gc.collect()  # compiled models are cycles of references
        compiled = not self.on_cpu if compiled is None else compiled
        if self.quick:
            shape, B, compiled = (2, 64, 32), 2, False
        pair = [Trainer(self.model(s, *shape), B, dtype or self.dtype, compiled) for s in (baseline, settings)]
        (baseline_s, s), (_, slower) = alternate(pair, *((0, 1) if self.quick else ()))
        baseline_MB, MB = (trainer.memory() / 1e6 for trainer in pair)
        of_baseline, flops = (t.model.flops_per_token() if isinstance(t.model, GPT) else math.nan for t in pair)
        ratios = {"time": slower, "operations": flops / of_baseline, "memory": MB / baseline_MB}
        return ratios | {"ms": 1e3 * s, "MB": MB, "baseline_ms": 1e3 * baseline_s, "baseline_MB": baseline_MB}

    def row(self, cells):
        """Add a row to the table of the section that is under way, and print it."""
        rows = self.tables[self.section]
        rows.append(cells)
        print("\n".join(markdown(self.section, rows)[-1 if len(rows) > 1 else 0 :]), flush=True)


def import_nanogpt(folder):
    if not (folder / "model.py").is_file():
        raise UserError(f"nanogpt = '{folder}' does not work: it must be a checkout of nanoGPT")
    spec = importlib.util.spec_from_file_location("nanogpt", folder / "model.py")
    module = sys.modules["nanogpt"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def markdown(title, rows):
    """Return the lines of a section's table. Ratios of one pair share a cell: time (operations), memory."""

    def text(cell):
        if isinstance(cell, dict):
            return f"{cell['time']:.2f} ({cell['operations']:.2f}), {cell['memory']:.2f}"
        if isinstance(cell, float):
            return f"{cell:,.0f}" if cell >= 100 else f"{cell:.2f}"
        return str(cell)

    table = as_table(rows[0], [[text(cell) for cell in row.values()] for row in rows])
    return [f"\n{title}\n", *table.split("\n")]


# -- the sections --------------------------------------------------------------------------------------------


def training(bench):
    """Time over counted operations, each relative to the standard model's."""
    for name, settings in bench.variants.items():
        cells = {}
        for kind, dtype in bench.dtypes.items():
            cost = bench.cost(settings, (6, 384, 256), 4 if bench.on_cpu else 64, dtype=dtype)
            cells[f"{kind}: time"] = cost["time"]
            cells[f"{kind}: time / operations"] = cost["time"] / cost["operations"]
        bench.row({"": name, "operations": cost["operations"]} | cells | {"memory": cost["memory"]})


def next_to_nanogpt(bench):
    """The standard model next to nanoGPT's of the same shape, with tied weights."""
    B = 8 if bench.on_cpu else 64
    for compiled in (False, True) if bench.nanogpt else ():
        for kind, dtype in bench.dtypes.items():
            cost = bench.cost({"tie_weights": True}, (6, 384, 256), B, NANOGPT, dtype, compiled)
            name = f"{kind}, {'compiled' if compiled else 'eager'}"
            bench.row({"": name, "ms": cost["ms"], "nanoGPT": cost["baseline_ms"], "ratio": cost["time"]})


@torch.no_grad()
def generating(bench):
    """Tokens per second of `generate`, one sequence, float32."""
    n_layer, n_embd, T, new = (2, 64, 64, 16) if bench.quick else (6, 384, 1024, 1000)
    prompt = torch.randint(VOCABULARY, (1, T - new), device=bench.device)
    models = {"standard": STANDARD} | bench.variants | ({"nanoGPT": NANOGPT} if bench.nanogpt else {})
    for name, settings in models.items():
        model = bench.model(settings, n_layer, n_embd, T).eval()
        model.generate(prompt, 4)
        began = time.time()
        model.generate(prompt, new)[0, -1].item()  # which waits for a GPU
        bench.row({"": name, "tokens/s": new / (time.time() - began)})


def compiling(bench):
    """Seconds of a first step in a new process without a cache: importing the compiler, compiling, a step."""
    for name, settings in ({"standard": STANDARD} | bench.variants).items():
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(Path(__file__).parent)}
            code = COMPILE.format(settings=settings, device=bench.device)
            printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE)
        bench.row({"": name, "seconds": float(printed.stdout)})


def growth(bench):
    """How cost grows with depth, context and width, relative to the standard model's, and on a GPU at GPT-2's size."""
    shapes = [(n_layer, 256, 256) for n_layer in (4, 8, 12, 24)]
    shapes += [(4, 256, T) for T in (512, 1024, 2048, 4096, 8192)] + [(4, n_embd, 256) for n_embd in (128, 512, 1024)]
    if not bench.on_cpu:
        shapes = [(12, 768, 1024, 50304), *shapes]
    for shape in shapes[: 1 if bench.quick else None]:
        B = max(1, (1024 if bench.on_cpu else 16384) // shape[2])
        costs = {name: bench.cost(settings, shape, B) for name, settings in bench.variants.items()}
        standard = next(iter(costs.values()))
        cells = {"layers": shape[0], "width": shape[1], "context": shape[2]}
        bench.row(cells | {"ms": standard["baseline_ms"], "MB": standard["baseline_MB"]} | costs)


SECTIONS = {section.__name__: section for section in (training, next_to_nanogpt, generating, compiling, growth)}


def read_variant(words):
    """Return the name and the model's settings of a variant such as "NAME: config/m1_shakespeare.py --keep_input"."""
    name, colon, rest = f"{words} ".partition(": ")
    return name.strip(), of_model(given_settings(ROOT / "train.py", shlex.split(rest if colon else words)))


def main(argv):
    variants = dict(read_variant(word) for word in argv if not word.startswith("-"))
    options = read_settings(__file__, [word for word in argv if word.startswith("-")])
    if options["show"]:
        for path in sorted(Path(__file__).parent.glob("results/speed_*.json")):
            found = json.loads(path.read_text(encoding="utf-8"))
            tables = [line for section, rows in found["tables"].items() for line in markdown(section, rows)]
            print(f"\n{found['machine']}\n" + "\n".join(tables))
        return
    chosen = list(SECTIONS) if options["everything"] else options["sections"].split(",")
    for name in chosen:
        if name not in SECTIONS:
            raise UserError(f"sections: {name!r} does not work: it must be one of {', '.join(SECTIONS)}")
    torch.manual_seed(0)
    bench, path = Bench(options, variants), Path(options["out"])
    machine = f"{machine_name(bench.device)}, {bench.dtype}, commit {code_version()['commit']}{', quick' * bench.quick}"
    print(machine, flush=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    for name in chosen:
        bench.section, bench.tables[name] = name, []
        SECTIONS[name](bench)
        with atomic_write(path) as file:  # after each section, since they take minutes
            file.write(json.dumps({"machine": machine, "tables": bench.tables}, indent=1, ensure_ascii=False).encode())
    print(f"\nall figures: {path}")


if __name__ == "__main__":
    install_excepthook()
    main(sys.argv[1:])
