"""
What a step, a token and a compilation cost: python tests/bench/speed.py [--nanogpt=PATH] [--naive] [--everything]

Everything that is compared is timed in one process, in turns, and given as a ratio: a shared machine's speed wanders,
a ratio of turns much less so. The tables go to the terminal, all figures to out/speed.json. Without --only it takes
some twenty-five minutes on two CPU cores.
"""

import gc
import importlib.util
import json
import os
import pickle
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch
import torch.nn.functional as F

import candidates
import measure
import naive
from cli import ArgumentParser
from config.runtime.common import UserError, atomic_write, install_excepthook, machine_name, pick_device
from config.runtime.common import pick_dtype
from config.runtime.metrics import code_version
from data.dataset import load_dataset
from measure import Trainer, ratio, synchronize
from model import GPT, GPTConfig

COMPILE = """
import time, torch
from model import GPT, GPTConfig
model = GPT(GPTConfig(block_size=256, vocab_size=64, n_layer=12, n_head=4, n_embd=128, {settings}))
model.compile_blocks()
model.to("{device}")
idx = torch.randint(64, (4, 256), device="{device}")
began = time.time()
with torch.autocast("{device.type}", torch.bfloat16):
    model(idx, idx)[1].backward()
print(time.time() - began)  # which waits for a GPU to have compiled, if not for it to have computed
"""

VOCABULARY = 65
METHODS = {
    "W2": {"attention": "w2"},
    "summed QK": {"attention": "summed_qk"},
    "Method 1": {"residual": "m1"},
    "Method 2": {"residual": "m2"},
}


def gpt(n_layer, n_embd, T, **settings):
    shape = {"n_layer": n_layer, "n_embd": n_embd, "n_head": n_embd // 64, "block_size": T, "vocab_size": VOCABULARY}
    return GPT(GPTConfig(**shape | settings)).to(device)


def nano_gpt(n_layer, n_embd, T, vocab_size=VOCABULARY):
    """nanoGPT's model of the same shape."""
    config = nanogpt.GPTConfig(T, vocab_size, n_layer, n_embd // 64, n_embd, dropout=0.0, bias=False)
    with redirect_stdout(None):  # it counts its parameters aloud
        return nanogpt.GPT(config).to(device)


rows = []


def report(section, what, value, target=None, at_least=False, **facts):
    """A line of the first table; the target is about `value`."""
    if quick:
        target = None
    met = None if target is None else bool(value >= target if at_least else value <= target)
    rows.append({"section": section, "what": what, "value": value, "target": target, "met": met, **facts})
    against = f"target {'≥' if at_least else '≤'} {target:g}{'' if met else '   MISSED'}" if target is not None else ""
    detail = "   ".join(f"{name} {short(fact)}" for name, fact in facts.items())
    print(f"{section:10} {what:58} {value:8.3f}   {against:22} {detail}".rstrip(), flush=True)


@contextmanager
def spared(section, what):
    """Too little memory for what is measured in here is a line of the table, and no more than that."""
    try:
        yield
    except torch.OutOfMemoryError:
        rows.append({"section": section, "what": f"{what}: out of memory", "value": None, "target": None, "met": None})
        print(f"{section:10} {what}: out of memory", flush=True)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


COLUMNS = ("section", "what", "value", "target", "met")


def short(fact):
    if fact is None or isinstance(fact, str):
        return fact or ""
    return f"{fact:,.0f}" if abs(fact) >= 1000 else f"{fact:.3g}"


def markdown(title):
    """The rows so far as a table for a README, under what they were measured on and at which commit."""
    lines = [title, "", "| | | value | target | met | |", "|---|---|---|---|---|---|"]
    for row in rows:
        section, what, value, target, met = map(row.get, COLUMNS)
        met = {True: "yes", False: "no", None: ""}[met]
        facts = [f"{name.replace('_', ' ')} {short(fact)}" for name, fact in row.items() if name not in COLUMNS]
        lines.append(f"| {section} | {what} | {short(value)} | {short(target)} | {met} | {', '.join(facts)} |")
    return "\n".join(lines) + "\n"


def name_of(precision):
    return str(precision).removeprefix("torch.")


# -- the sections --------------------------------------------------------------------------------------------


def against_nanogpt():
    """Standard attention and residuals at nanoGPT's shape and number of parameters, the tied head included."""
    n_layer, n_embd, T, B = (2, 64, 64, 4) if quick else (6, 384, 256, 8 if device.type == "cpu" else 64)

    def theirs(precision, compiled):
        return Trainer(nano_gpt(n_layer, n_embd, T), B, precision, compiled)

    def ours(precision, compiled):
        return Trainer(gpt(n_layer, n_embd, T, tie_weights=True), B, precision, compiled)

    for compiled, target in ((False, 1.00), (True, 0.95)):
        for precision in dict.fromkeys((torch.float32, default_precision)):
            a, b = in_turns([ours(precision, compiled), theirs(precision, compiled)])
            what = f"standard / nanoGPT, {name_of(precision)}, {'compiled' if compiled else 'eager'}"
            report("step", what, ratio(a, b), target, ours_ms=1e3 * min(a), theirs_ms=1e3 * min(b))
    if device.type == "cpu":
        a, b = in_turns([ours(default_precision, False), theirs(torch.float32, False)])
        what = f"our defaults ({name_of(default_precision)}) / nanoGPT's (float32)"
        report("step", what, ratio(a, b), 0.60, ours_ms=1e3 * min(a), theirs_ms=1e3 * min(b))


def against_naive():
    """The fused forms next to the explicit one."""
    n_layer, n_embd, T, B = (2, 64, 64, 2) if quick else (6, 384, 512, 2)
    for method in ({}, *METHODS.values()):
        model = gpt(n_layer, n_embd, T, **method)
        trainers = [Trainer(model, B, default_precision, loss=loss) for loss in (None, naive.loss)]
        a, b = in_turns(trainers)
        memory = [trainer.memory() for trainer in trainers]
        what = f"{', '.join(method.values()) or 'standard'} / its explicit form, T = {T}"
        report("naive", what, ratio(a, b), memory_ratio=memory[0] / memory[1])


def kinds():
    """W2 next to standard attention."""
    n_layer, n_embd = (2, 64) if quick else (6, 384) if device.type == "cpu" else (12, 768)
    compiled = device.type == "cuda"
    for T in (64, 128) if quick else (128, 256, 512, 1024, 4096):
        B = max(1, (2048 if device.type == "cpu" else 16384) // T)
        settings = [{}, {"attention": "w2"}, {"attention": "w2", "sigma": "diagonal"}]
        trainers = [Trainer(gpt(n_layer, n_embd, T, **s), B, default_precision, compiled) for s in settings]
        standard, scalar, diagonal = in_turns(trainers)
        memory = [trainer.memory() for trainer in trainers]
        long = T > 1024
        report("kinds", f"W2 scalar / standard, T = {T}: time", ratio(scalar, standard), 1.10 if long else 1.05)
        report("kinds", f"W2 scalar / standard, T = {T}: memory", memory[1] / memory[0], 1.03)
        target = 1.25 if T == 1024 else None
        report("kinds", f"W2 diagonal / standard, T = {T}: time", ratio(diagonal, standard), target)


def summed():
    """Summed scores at 12 layers."""
    n_layer, n_embd, T, B = (3, 64, 64, 1) if quick else (12, 768, 1024, 1 if device.type == "cpu" else 16)
    settings = [{}, {"attention": "summed_qk"}]
    trainers = [Trainer(gpt(n_layer, n_embd, T, **s), B, default_precision, device.type == "cuda") for s in settings]
    flops = trainers[1].model.flops_per_token() / trainers[0].model.flops_per_token()
    a, b = in_turns(trainers)
    what = f"summed QK / standard, {n_layer} layers, T = {T}"
    report("summed", f"{what}: time", ratio(b, a), 1.8 if device.type == "cpu" else 1.5, counted_flops=flops)
    report("summed", f"{what}: memory", trainers[1].memory() / trainers[0].memory(), 1.15)


def methods():
    """Methods 1-4: time per counted operation."""
    n_layer, n_embd, T, B = (3, 64, 64, 2) if quick else (6, 384, 256, 4 if device.type == "cpu" else 64)
    for precision in dict.fromkeys((torch.float32, default_precision)):
        standard = Trainer(gpt(n_layer, n_embd, T), B, precision, device.type == "cuda")
        for residual in ("m1", "m2", "m3.1", "m3.2", "m4.1", "m4.2"):
            trainer = Trainer(gpt(n_layer, n_embd, T, residual=residual), B, precision, device.type == "cuda")
            flops = trainer.model.flops_per_token() / standard.model.flops_per_token()
            a, b = in_turns([trainer, standard])
            what = f"{residual} / standard / FLOPs, {name_of(precision)}"
            report("methods", what, ratio(a, b) / flops, 1.05, time=ratio(a, b), counted_flops=flops)


def replays():
    """What activation_checkpointing saves, and costs."""
    n_layer, n_embd, T, B = (12, 384, 1024, 1) if device.type == "cpu" else (12, 768, 1024, 8)
    if quick:
        n_layer, n_embd, T, B = 3, 64, 64, 1
    for residual in ("m1", "m2"):
        what = f"{residual}, {n_layer} layers, T = {T}, activation_checkpointing"
        with spared("replays", what):
            settings = [{}, {"residual": residual}, {"residual": residual, "activation_checkpointing": True}]
            trainers = [Trainer(gpt(n_layer, n_embd, T, **s), B, default_precision) for s in settings]
            _, plain, checkpointed = in_turns(trainers)
            memory = [trainer.memory() for trainer in trainers]
            report("replays", f"{what}: memory / standard", memory[2] / memory[0], 1.5, without=memory[1] / memory[0])
            report("replays", f"{what}: time / without", ratio(checkpointed, plain), 1.35)


def compilation():
    """Cold, in a process of its own: importing the compiler, compiling, and a first step."""
    for settings in ("residual='m1'", "residual='standard'", "residual='m3.2', attention='w2'"):
        with tempfile.TemporaryDirectory() as cache:
            environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
            code = COMPILE.format(settings=settings, device=device)
            printed = subprocess.run([sys.executable, "-c", code], env=environment, check=True, stdout=subprocess.PIPE)
        seconds = float(printed.stdout)
        report("compile", f"{settings}, 12 layers: seconds", seconds, 20 if settings == "residual='m1'" else None)


@torch.no_grad()
def generation():
    """Tokens per second of generate, batch 1, float32."""
    n_layer, n_embd, T, new = (2, 64, 64, 32) if quick else (6, 384, 1024, 1000)
    prompt = torch.randint(VOCABULARY, (1, T - new if T > new else 1), device=device)

    def speed(model):
        model.eval()
        model.generate(prompt, 4)
        synchronize(device)
        began = time.time()
        model.generate(prompt, new)
        synchronize(device)
        return new / (time.time() - began)

    settings = [{}, *METHODS.values(), {"attention": "summed_qk", "residual": "m1"}]
    speeds = {", ".join(s.values()) or "standard": speed(gpt(n_layer, n_embd, T, **s)) for s in settings}
    theirs = speed(nano_gpt(n_layer, n_embd, T)) if nanogpt else None
    for name, tokens in speeds.items():
        if theirs:
            target = 15 if name == "standard" else 5
            what = f"{name} / nanoGPT, {new} tokens"
            report("generate", what, tokens / theirs, target, True, ours=tokens, theirs=theirs)
        else:
            report("generate", f"{name}, {new} tokens: tokens/s", tokens)


def train(*arguments):
    """The log of a training run, as a list of dicts."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "train.py", *arguments, f"--out_dir={folder}/run", f"--device={device}"]
        subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
        return [json.loads(line) for line in (Path(folder) / "run" / "log.jsonl").read_text().splitlines()]


def race():
    """Seconds of training to the validation loss of nanoGPT's CPU quick start, which its README gives."""
    ours = train("config/race_cpu.py", "--eval_tokens=1000000000")
    start, end = ours[0], ours[-1]
    settings = start["settings"]
    tokens = settings["max_iters"] * settings["batch_size"] * settings["block_size"]
    our_seconds, our_loss = tokens / end["tokens_per_second"], end["best_loss"]

    data = load_dataset(ROOT / "data" / "shakespeare_char")
    steps = 10 if quick else 2000
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "nanogpt"
        shutil.copytree(args.nanogpt, copy, ignore=shutil.ignore_patterns("out*", ".git"))
        place = copy / "data" / "shakespeare_char"
        for split in ("train", "val"):
            shutil.copy(data.folder / f"{split}.bin", place)
        (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": data.meta["vocab_size"]}))
        quick_start = "config/train_shakespeare_char.py --device=cpu --compile=False --eval_iters=20 --log_interval=1"
        quick_start += " --block_size=64 --batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --dropout=0.0"
        quick_start += f" --max_iters={steps} --lr_decay_iters={steps} --eval_interval={min(steps, 250)}"
        quick_start += " --always_save_checkpoint=True"
        command = [sys.executable, "train.py", *quick_start.split()]
        printed = subprocess.run(command, check=True, cwd=copy, capture_output=True, text=True).stdout
        iterations = re.findall(r"iter (\d+): loss .* time ([\d.]+)ms", printed)
        # those that begin with an evaluation count it, and are left out
        their_seconds = sum(float(ms) for step, ms in iterations if int(step) % 250) / 1e3
        saved = torch.load(copy / "out-shakespeare-char" / "ckpt.pt")
    with redirect_stdout(None):
        model = nanogpt.GPT(nanogpt.GPTConfig(**saved["model_args"]))
    model.load_state_dict(saved["model"])
    losses = []
    with torch.no_grad():  # over the same windows as ours
        for x, y in data.windows("val", 16, 64, 10**9):
            losses.append((model(x, y)[1].item(), (y >= 0).sum().item()))
    their_loss = sum(loss * count for loss, count in losses) / sum(count for _, count in losses)
    parameters = sum(p.numel() for p in model.parameters())
    report("race", "validation loss, ours - nanoGPT's", our_loss - their_loss, 0, ours=our_loss, theirs=their_loss)
    seconds = {"ours": our_seconds, "theirs": their_seconds}
    report("race", "seconds of training, ours / nanoGPT's", our_seconds / their_seconds, 0.2, **seconds)
    report("race", "parameters, ours / nanoGPT's", start["parameters"] / parameters, 1)


def size_124m():
    """GPT-2's size, compiled: utilisation, the methods over the standard model, and the first step, which compiles."""
    n_layer, n_embd, T, B, vocab_size = (2, 64, 64, 2, 65) if quick else (12, 768, 1024, 16, 50304)
    medians = {}
    for name, target in {"standard": 0.4, "W2": None, "summed QK": 0.2, "Method 1": 0.35, "Method 2": None}.items():
        cold = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        with spared("124m", name), cold as cache, patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=cache):
            model = gpt(n_layer, n_embd, T, vocab_size=vocab_size, **METHODS.get(name, {}))
            trainer = Trainer(model, B, default_precision, compiled=not quick)
            (seconds,) = in_turns([trainer])
            medians[name] = statistics.median(seconds)
            facts = {"first_step_s": trainer.first_seconds, "GB": trainer.memory() / 1e9}
            report("124m", f"{name}: tokens/s", B * T / medians[name], **facts)
            if device.type == "cuda":
                report("124m", f"{name}: MFU", model.estimate_mfu(B, medians[name]), target, True)
    for name, target in {"W2": 1.1, "summed QK": None}.items():
        if {name, "standard"} <= medians.keys():
            report("124m", f"{name} / standard: time", medians[name] / medians["standard"], target)


class Attending:
    """Causal attention to values 64 wide, padded to `v_width`, forward and backward, timed as a Trainer is."""

    def __init__(self, heads, T, width, v_width=64, attend=None):
        shapes = [(1, heads, T, size) for size in (width, width, 64)]
        like = {"device": device, "dtype": default_precision, "requires_grad": True}
        self.device, self.inputs = device, [torch.randn(shape, **like) for shape in shapes]
        self.pad, self.attend = v_width - 64, attend or partial(F.scaled_dot_product_attention, is_causal=True, scale=1)

    def step(self):
        q, k, v = self.inputs
        y = self.attend(q / q.size(-1), k, F.pad(v, (0, self.pad)))[..., :64]
        torch.autograd.grad(y, self.inputs, torch.ones_like(y))

    def kernel(self):
        """Return the name of what takes the longest on the GPU."""
        if device.type == "cpu":
            return "none"
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self.step()
            synchronize(device)
        return max(profile.key_averages(), key=lambda event: event.device_time_total).key[:60]


def kernels():
    """What attention_layout chooses between: how wide the values are made beside scores of a width, or plain products."""
    by_products = candidates.attend_by_products
    if not quick:
        by_products = torch.compile(by_products, dynamic=False)
    for width in (72, 128) if quick else (64, 72, 128, 136, 192, 256, 384, 768):  # 72: W2's, 136: with diagonal σ
        for T in (64,) if quick else (256, 1024):
            heads = 2 if quick else 12 * 16384 // T
            with spared("kernels", f"scores {width} wide, T = {T}"):
                v_widths = sorted({64, width} | ({128} if 64 < width <= 192 else set()))
                forms = {f"values {v_width} wide": Attending(heads, T, width, v_width) for v_width in v_widths}
                forms["plain products"] = Attending(heads, T, width, attend=by_products)
                for (name, form), seconds in zip(forms.items(), in_turns(list(forms.values()), budget=1)):
                    what = f"scores {width} wide, {name}, T = {T}: ms"
                    report("kernels", what, 1e3 * statistics.median(seconds), kernel=form.kernel())


def of_gpt2_size(make=gpt, **settings):
    """A model of 12 layers, width 768 and context 1,024, or a tiny one if quick."""
    return make(*((2, 64, 64) if quick else (12, 768, 1024)), vocab_size=65 if quick else 50304, **settings)


def over_standard(section, others, target, micro_steps=1):
    """Report the time of models, {name: () -> model}, over the standard one's. Only one is in memory at a time."""
    standard = None
    for name, make in ({"standard": of_gpt2_size} | others).items():
        torch.compiler.reset()
        with spared(section, name):
            trainer = Trainer(make(), 2 if quick else 16, default_precision, not quick, micro_steps=micro_steps)
            milliseconds = 1e3 * statistics.median(in_turns([trainer])[0])
            GB = trainer.memory() / 1e9
            if name == "standard":
                standard = milliseconds
                report(section, "standard: ms", standard, GB=GB)
            elif standard:
                report(section, f"{name} / standard: time", milliseconds / standard, target, ms=milliseconds, GB=GB)
            del trainer


def wide():
    """Other forms of summed QKᵀ, whose scores are wider than what fused kernels take."""
    whole = candidates.compile_whole_blocks if not quick else lambda model: model

    def summed():
        return of_gpt2_size(attention="summed_qk")

    def accumulated():
        return whole(candidates.remake(summed(), attention=candidates.AccumulatedQKAttention))

    with torch._dynamo.config.patch(recompile_limit=64):
        over_standard("wide", {"summed QK": summed, "summed QK, accumulated": accumulated}, 1.7)
        with candidates.by_products():
            forms = {"summed QK by products": summed, "the same, blocks compiled whole": lambda: whole(summed())}
            over_standard("wide", forms, 1.7)


def joined():
    """q, k and v as one product, gate and up as one, beside each by itself and nanoGPT's model."""
    attention, mlp = candidates.JoinedAttention, candidates.JoinedMLP
    forms = {
        "gate and up joined": lambda: candidates.remake(of_gpt2_size(), mlp=mlp),
        "q, k, v joined": lambda: candidates.remake(of_gpt2_size(), attention),
        "both": lambda: candidates.remake(of_gpt2_size(), attention, mlp),
    }
    if nanogpt:
        forms["nanoGPT"] = lambda: of_gpt2_size(nano_gpt)
    forms["standard again"] = of_gpt2_size  # how far two measurements of one thing lie apart
    over_standard("joined", forms, 0.97, micro_steps=4)


def graphs():
    """A micro-step and an update as CUDA graphs, at train.py's default size: time, and whether the losses are the same."""
    shape = (2, 64, 64) if quick else (3, 128, 128)
    for name, method in {"standard": {}, "Method 1": {"residual": "m1"}, "W2": {"attention": "w2"}}.items():
        trainers, losses = [], []
        for kind in (Trainer, candidates.GraphedTrainer):
            torch.manual_seed(0)
            trainers.append(kind(gpt(*shape, n_head=4, **method), 16, default_precision, compiled=not quick))
            losses.append([trainers[-1].step().item() for _ in range(20)])
        apart = max(abs(a - b) for a, b in zip(*losses))
        plain, graphed = in_turns(trainers)
        report("graphs", f"{name}, as graphs / as it is: time", ratio(graphed, plain), 1 / 3, losses_apart=apart)


def shakespeare():
    """nanoGPT's Shakespeare size to its end."""
    tiny = "--max_iters=10 --n_layer=2 --n_embd=64 --n_head=2 --block_size=32 --batch_size=2 --eval_tokens=64".split()
    log = train("config/standard_shakespeare.py", *(tiny if quick else ["config/size_gpu.py"]))
    report("train", "size_gpu.py, 5000 steps: validation loss", log[-1]["best_loss"], 1.47)
    report("train", "size_gpu.py, 5000 steps: seconds, evaluations included", log[-1]["seconds"], 90)


# -- how cost grows ------------------------------------------------------------------------------------------


def growth():
    """Step time and memory over the standard model's, against depth, context and width, eager."""
    base = {"n_layer": 4, "T": 256, "n_embd": 256}
    points = [base | {"n_layer": n} for n in (4, 8, 12, 24)]
    points += [base | {"T": T} for T in (512, 1024, 2048, 4096, 8192)]
    points += [base | {"n_embd": n} for n in (128, 512, 1024)]
    if quick:
        points = [{"n_layer": 2, "T": 32, "n_embd": 64}]
    print("\n| layers | context | width | standard |", " | ".join(METHODS), "|\n|" + "---|" * (4 + len(METHODS)))
    for point in points:
        B = max(1, (1024 if device.type == "cpu" else 16384) // point["T"])
        trainers = [Trainer(gpt(**point, **s), B, default_precision) for s in ({}, *METHODS.values())]
        seconds = in_turns(trainers)
        memory = [trainer.memory() for trainer in trainers]
        flops = [trainer.model.flops_per_token() for trainer in trainers]
        ms, MB = 1e3 * statistics.median(seconds[0]), memory[0] / 1e6
        rows.append({"section": "growth", "what": "standard", **point, "ms": ms, "MB": MB})
        cells = [f"{ms:.0f} ms, {MB:.0f} MB"]
        for i, name in enumerate(METHODS, 1):
            facts = ratio(seconds[i], seconds[0]), flops[i] / flops[0], memory[i] / memory[0]
            cells.append("{:.2f} ({:.2f}), {:.2f}".format(*facts))
            rows.append({"section": "growth", "what": name, **point, **dict(zip(("time", "flops", "memory"), facts))})
        print("|", " | ".join([str(value) for value in point.values()] + cells), "|", flush=True)


# -- all of it -----------------------------------------------------------------------------------------------

SECTIONS = {
    "step": against_nanogpt, "naive": against_naive, "kinds": kinds, "summed": summed, "methods": methods,
    "replays": replays, "124m": size_124m, "kernels": kernels, "wide": wide, "joined": joined, "graphs": graphs,
    "compile": compilation, "generate": generation, "race": race, "train": shakespeare, "growth": growth,
}  # fmt: skip
EVERYTHING = "124m,kernels,wide,joined,graphs,replays,generate,train"  # what a GPU is for

if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda")
    parser.add_argument("--nanogpt", type=Path, help="a checkout of nanoGPT, to be timed next to this model")
    parser.add_argument("--naive", action="store_true", help="time the explicit T x T form too")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that it runs; no figure counts")
    parser.add_argument("--only", default="", help=f"sections, separated by commas: {', '.join(SECTIONS)}")
    parser.add_argument("--everything", action="store_true", help="what a GPU is for, ten minutes on one")
    parser.add_argument("--out", type=Path, help="where the figures go; out/speed.json, with --everything out/gpu.json")
    args = parser.parse_args()
    args.out = args.out or Path("out/gpu.json" if args.everything else "out/speed.json")
    quick = args.quick
    in_turns = partial(measure.in_turns, budget=0, turns=1) if quick else measure.in_turns
    device = pick_device(args.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    default_precision = pick_dtype("auto", device)
    only = args.only or (EVERYTHING if args.everything else "")
    chosen = only.split(",") if only else list(SECTIONS)
    for name in chosen:
        if name not in SECTIONS:
            raise UserError(f"--only={args.only}: {name!r} is none of {', '.join(SECTIONS)}")
    if args.nanogpt and not (args.nanogpt / "model.py").is_file():
        raise UserError(f"--nanogpt={args.nanogpt}: no checkout of nanoGPT, it has no model.py")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    nanogpt = None
    if args.nanogpt:
        spec = importlib.util.spec_from_file_location("nanogpt", args.nanogpt / "model.py")
        nanogpt = sys.modules["nanogpt"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(nanogpt)
    impossible = set() if nanogpt else {"step", "race"}
    impossible |= set() if args.naive else {"naive"}
    impossible |= {"race"} if device.type == "cuda" else {"graphs"}
    impossible |= set() if args.everything or device.type == "cuda" else {"124m", "kernels", "wide", "joined", "train"}
    impossible |= {"compile"} if quick else set()

    torch.manual_seed(0)
    machine = f"{machine_name(device)}, {name_of(default_precision)}, commit {code_version()['commit'] or 'unknown'}"
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability()
        machine += f", capability {major}.{minor}, cuDNN {torch.backends.cudnn.version()}"
    print(machine, flush=True)
    for name in chosen:
        if name not in impossible:
            with spared(name, "the rest"):
                SECTIONS[name]()
            with atomic_write(args.out) as file:  # after each section, since they take minutes
                file.write(json.dumps({"machine": machine, "quick": quick, "rows": rows}, indent=1).encode() + b"\n")
            if args.everything:
                args.out.with_suffix(".md").write_text(markdown(machine), encoding="utf-8")
    table = f", as a table: {args.out.with_suffix('.md')}" if args.everything else ""
    print(f"\nall figures: {args.out}{table}")
