"""The loop once more, written to be read: what train.py makes of its settings, by formulas.

It shares no code with train.py and config/runtime.py, so that the two can be held against each other.

It has its model from model.py, and from data the documented windows and seeds: a micro-step trains on
`batch(seed, step, micro_step, ...)`, and its dropout is drawn from `derive_seed(seed, step, micro_step)`.
"""

import math
from dataclasses import fields
from types import SimpleNamespace

import torch
from torch.nn import Embedding, Linear

from data.dataset import derive_seed, load_dataset
from model import GPT, GPTConfig

EPSILON = 1e-8  # of AdamW
LOSS_SCALE = 2.0**16  # float16 would lose small gradients; a power of two changes no others


def train(settings):
    """Train under settings of train.py, on the CPU. Return the log's steps and evaluations, and the weights."""
    s = SimpleNamespace(**settings)
    data = load_dataset(f"data/{s.dataset}")
    model = make_model(s, data.meta["vocab_size"])
    optimizer = Optimizer(s, model)
    log = []
    for step in range(s.max_iters):
        losses = []
        for micro_step in range(s.gradient_accumulation_steps):
            torch.manual_seed(derive_seed(s.seed, step, micro_step))
            x, y = data.batch(s.seed, step, micro_step, s.batch_size, s.block_size, s.gradient_accumulation_steps)
            losses.append(token_losses(s, model, x, y).mean())
        loss = sum(losses) / len(losses)
        gradients = torch.autograd.grad(loss * LOSS_SCALE, list(model.parameters()))
        gradients = [g / LOSS_SCALE for g in gradients]
        norm = sum((g.double() ** 2).sum() for g in gradients).sqrt().item()
        if s.grad_clip and norm > s.grad_clip:
            gradients = [g * (s.grad_clip / norm) for g in gradients]
        rate = learning_rate(s, step)
        optimizer.step(gradients, rate)

        done = step + 1  # the log counts the steps that are done
        log.append({"step": done, "loss": loss.item(), "grad_norm": norm, "learning_rate": rate})
        if done % s.eval_interval == 0 or done == s.max_iters:
            log.append({"step": done, **evaluate(s, model, data)})
    return log, model.state_dict()


def make_model(s, vocab_size):
    """Return the model as it starts, drawn from the seed."""
    torch.manual_seed(s.seed)
    config = {field.name: getattr(s, field.name) for field in fields(GPTConfig) if hasattr(s, field.name)}
    return GPT(GPTConfig(**config, vocab_size=vocab_size))


def token_losses(s, model, x, y):
    """Return -log p of each target that is not -1; the model computes in s.dtype."""
    with torch.autocast("cpu", getattr(torch, s.dtype), enabled=s.dtype != "float32"):
        logits, _ = model(x)
    log_p = torch.log_softmax(logits.float(), dim=-1)
    counted = y >= 0
    return -log_p[counted, y[counted]]


def learning_rate(s, step):
    """Return a rate that rises in equal parts to s.learning_rate, then falls towards min_lr_frac of it at max_iters."""
    warmup = s.warmup_iters or min(100, math.ceil(0.125 * s.max_iters))
    if step < warmup:
        return s.learning_rate * (step + 1) / warmup
    lowest = s.learning_rate * s.min_lr_frac
    fallen = (step - warmup) / (s.max_iters - warmup)
    if s.lr_decay == "cosine":
        return lowest + (s.learning_rate - lowest) * 0.5 * (1 + math.cos(math.pi * fallen))
    if s.lr_decay == "linear":
        return s.learning_rate + (lowest - s.learning_rate) * fallen
    if s.lr_decay == "wsd" and fallen > 0.8:
        return s.learning_rate + (lowest - s.learning_rate) * (fallen - 0.8) / 0.2
    return s.learning_rate


class Optimizer:
    """AdamW."""

    def __init__(self, s, model):
        self.s = s
        self.t = 0  # updates so far
        self.parameters = dict(model.named_parameters())
        self.m = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.v = {name: torch.zeros_like(p) for name, p in self.parameters.items()}
        self.decayed = {module.weight for module in model.modules() if isinstance(module, (Linear, Embedding))}

    @torch.no_grad()
    def step(self, gradients, rate):
        """Move p by its smoothed gradient over the root of its smoothed square, and a matrix towards 0."""
        self.t += 1
        beta1, beta2 = self.s.beta1, self.s.beta2
        for (name, p), gradient in zip(self.parameters.items(), gradients):
            self.m[name] = beta1 * self.m[name] + (1 - beta1) * gradient
            self.v[name] = beta2 * self.v[name] + (1 - beta2) * gradient**2
            m = self.m[name] / (1 - beta1**self.t)
            v = self.v[name] / (1 - beta2**self.t)
            decay = self.s.weight_decay if p in self.decayed else 0.0
            p -= rate * (m / (v.sqrt() + EPSILON) + decay * p)


@torch.no_grad()
def evaluate(s, model, data):
    """Return mean losses per token, without dropout: of at most eval_tokens to validate on, 1/16 to train on."""
    model.eval()
    losses = {}
    for split, tokens in (("train", s.eval_tokens // 16), ("val", s.eval_tokens)):
        windows = data.windows(split, 1, s.block_size, tokens)
        losses[split] = torch.cat([token_losses(s, model, x, y) for x, y in windows]).mean().item()
    model.train()
    tokens = data.splits["val"]
    bits = len(tokens) * losses["val"] / math.log(2)  # of the whole split, were all of it as likely
    return {
        "train_loss": losses["train"],
        "val_loss": losses["val"],
        "perplexity": math.exp(losses["val"]),
        "bits_per_byte": bits / len(data.tokenizer.decode(tokens).encode()),
    }
