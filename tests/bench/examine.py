"""Check a candidate before training: is it causal, is its cost right, and does it compute the same as before?"""

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import runs
from config.runtime.checks import of_model
from config.runtime.errors import UserError
from config.runtime.files import sha256
from model import GPT, GPTConfig
from runs import options_of, read_log

HEAD_WIDTH = 8  # of a small model
FINGERPRINTS = "fingerprints.jsonl"  # in the folder of the runs
CLOSE = 0.02  # operations that differ by no more are the same


def small(settings) -> dict:
    """Return the settings of a few steps with a small width: layers, kind and decay stay unchanged."""
    width = HEAD_WIDTH * settings["n_head"]
    short = {"block_size": 128, "batch_size": 2, "grad_accum_steps": 2, "warmup_iters": 2}
    short = {name: min(most, settings[name]) for name, most in short.items()}
    once = {"max_iters": 4, "eval_interval": 4, "checkpoint_interval": 4, "log_interval": 1, "eval_tokens": 64}
    here = {"device": "cpu", "dtype": "float32", "compile": "false", "tensorboard": False, "wandb": False, "seed": 0}
    return settings | {"n_embd": width, "n_inner": settings["n_inner"] and 2 * width} | short | once | here


def examine(name, settings, vocab_size):
    """Raise a UserError if a model sees the future, misreports loss or operations, or has a part that never learns."""
    plain = small(settings) | {"dropout": 0.0, "activation_checkpointing": False}
    torch.manual_seed(0)
    model = GPT(GPTConfig(**of_model(plain), vocab_size=vocab_size))
    with torch.no_grad():
        for p in model.parameters():  # away from zeros and ones, behind which a part may hide
            p.add_(0.1 * torch.randn_like(p))
    idx = torch.randint(vocab_size, (2, plain["block_size"]))
    for training in (False, True):
        look_ahead(name, model.train(training), idx)
    check_loss(name, model.eval(), idx)
    check_operations(name, model.train(), idx)
    for parameter, p in model.named_parameters():
        if p.grad is None:
            raise UserError(f"{name}: its parameter {parameter} gets no gradient, so it never learns")
        if not p.grad.isfinite().all():
            raise UserError(f"{name}: the gradient of its parameter {parameter} is not finite")


@torch.no_grad()
def look_ahead(name, model, idx):
    """Raise a UserError if a token, as input or as target, changes an earlier logit.

    Logits are compared to the bit: the softmax gives later tokens a weight of exactly 0.
    """
    logits, T = model(idx, idx.roll(-1, dims=1))[0], idx.size(1)
    for t in [*range(1, min(T, 16)), *range(16, T, 16), T - 1]:  # a few of the later ones
        other = idx.clone()
        other[:, t] = (idx[:, t] + 1) % model.config.vocab_size
        changed = (model(other, other.roll(-1, dims=1))[0] != logits).any(dim=-1).any(dim=0)
        first = int(changed.int().argmax())
        if changed[first] and first < t:
            raise UserError(f"{name} sees the future: at position {first} its logits change with token {t}")


@torch.no_grad()
def check_loss(name, model, idx):
    """Raise a UserError if the evaluated loss is not the logits' cross-entropy."""
    logits, loss = model(idx, idx)
    expected = F.cross_entropy(logits.flatten(0, 1), idx.flatten())
    if not math.isclose(loss, expected, rel_tol=1e-4):
        told = f"its loss is {loss:.4f} where the cross-entropy of its logits is {expected:.4f}"
        raise UserError(f"{name}: {told}, so it is not comparable with others")


def check_operations(name, model, idx):
    """Raise a UserError if flops_per_token differs from PyTorch's count for a forward and backward pass."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:  # whose products are not padded
        model(idx, idx)[1].backward()
    counted, said = counter.get_total_flops() / idx.numel(), model.flops_per_token()
    if abs(counted / said - 1) > CLOSE:
        told = f"flops_per_token says {said:,.0f} operations at a small width, PyTorch counts {counted:,.0f}"
        raise UserError(f"{name}: {told}; its cost would be wrong by a factor of {counted / said:.3f}")


def identify(candidates, folder, code, vocab_size):
    """Return the candidates, each with its `identity`, under which its runs are stored.

    A candidate is examined and fingerprinted only if `code` is new. The identity changes only if the fingerprint
    does. On another machine or PyTorch, which may round differently, any change of code changes it.
    """
    new = {key_of(one): one for one in candidates if not identity_under(code, one, folder)}
    if new:
        print(f"examining {', '.join(candidate.name for candidate in new.values())}", flush=True)
    for candidate in new.values():
        examine(candidate.name, candidate.settings, vocab_size)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        marks = list(pool.map(fingerprint, new.values()))
    machine = f"{platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, torch {torch.__version__}"
    for key, mark in zip(new, marks):
        facts = {"key": key, "machine": machine, "fingerprint": mark}
        same = find(folder, **facts)
        facts |= {"code": code, "identity": same or sha256((code + mark).encode())[:8]}
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / FINGERPRINTS, "a", encoding="utf-8") as file:  # another comparison may add to it too
            file.write(json.dumps(facts) + "\n")
    return [replace(candidate, identity=identity_under(code, candidate, folder)) for candidate in candidates]


def identity_under(code, candidate, folder):
    """Return a variant's identity under `code`, or None if it has not been fingerprinted."""
    return find(folder, key=key_of(candidate), code=code)


def key_of(candidate):
    return sha256(json.dumps(small(candidate.settings), sort_keys=True).encode())[:16]


def find(folder, **facts):
    """Return the identity that the first fingerprint with these facts has, or None."""
    path = folder / FINGERPRINTS
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    return next((row["identity"] for row in rows if facts.items() <= row.items()), None)


def fingerprint(candidate, program=None) -> str:
    """Return the SHA-256 of the losses and weights of a few steps of train.py, in float32 by one thread of a CPU."""
    with tempfile.TemporaryDirectory(prefix="fingerprint-") as folder:
        options = options_of(small(candidate.settings))
        command = [sys.executable, str(program or runs.TRAIN), *options, f"--out_dir={folder}"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        lines = [line for line in read_log(Path(folder)) if line["event"] in ("step", "eval")]
        if not lines:
            print(done.stderr, end="", file=sys.stderr)
            said = (done.stderr.strip() or "it ended without any output").splitlines()[-1]
            raise UserError(f"{candidate.name}: train.py cannot finish a step of a small model: {said}")
        numbers = [[line.get(name) for name in ("loss", "grad_norm", "train_loss", "val_loss")] for line in lines]
        content = json.dumps(numbers).encode()
        checkpoint = Path(folder) / "ckpt.pt"
        if checkpoint.exists():  # none if it has diverged
            weights = torch.load(checkpoint, weights_only=True)["model"].values()
            content += b"".join(weight.contiguous().numpy().tobytes() for weight in weights)
        return sha256(content)
