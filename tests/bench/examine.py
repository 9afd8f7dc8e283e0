"""
A variant's model, looked at in a process of that code's own, which answers in a JSON file:

    python examine.py HOME WINDOWS ANSWER SETTINGS.json     before training: what it costs, and whether it is sound
    python examine.py HOME WINDOWS ANSWER RUN               after: the loss of its weights, and whether they look ahead

HOME is a frozen code (frozen.py). WINDOWS has the referee's own windows of the text. Nothing is imported from HOME but
its model.py, and nothing that it says about its loss or its operations is believed.
"""

import copy
import dataclasses
import json
import math
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

TRIES = 8  # times that something is repeated in training: some methods leave out layers at random
ROUNDING = {torch.float32: 1e-5}  # what sums in another order may change, relative to the largest logit
ROUNDING |= {torch.bfloat16: 0.05, torch.float16: 0.05}


class Refused(Exception):
    """Why a model cannot take part."""


class Context:
    """Where and in which type a run computes, and the windows of its text."""

    def __init__(self, settings, windows):
        name = settings["device"]
        name = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
        self.device, self.dtype = torch.device(name), getattr(torch, settings["dtype"])
        self.vocab_size = windows["vocab_size"]
        self.x, self.y = windows["x"], windows["y"]  # (N, T); a target of -1 is not counted
        self.batch_size = settings["batch_size"]
        self.compiles = settings["compile"] == "true"

    def batch(self, first, size):
        """Return `size` windows, x and y, from the first on, again and again if there are fewer."""
        some = torch.arange(first, first + size) % len(self.x)
        return self.x[some].to(self.device).long(), self.y[some].to(self.device).long()

    def autocast(self):
        return nullcontext() if self.dtype == torch.float32 else torch.autocast(self.device.type, self.dtype)


def cross_entropy(logits, targets):
    """Return the sum of -log p of the targets, in nats, without those of -1."""
    logits, targets = logits.flatten(0, 1), targets.flatten()
    logits, targets = logits[targets >= 0].float(), targets[targets >= 0]
    return (logits.logsumexp(dim=-1) - logits.gather(1, targets[:, None])[:, 0]).double().sum()


# -- before training -------------------------------------------------------------------------------------------


def look_before(GPT, config, context):
    torch.manual_seed(0)
    model = GPT(config).to(context.device)
    answer = {"parameters": sum(p.numel() for p in model.parameters())}
    answer["flops_per_token"] = operations(GPT(config), context)
    disturbed = copy.deepcopy(model)
    with torch.no_grad():
        for p in disturbed.parameters():  # away from zeros and ones, behind which a part may hide
            if p.requires_grad:
                p.add_(0.1 * torch.randn_like(p))
        if call(disturbed, context, *context.batch(0, 2)).isfinite().all():  # not out of a parameter's domain
            model = disturbed
    check_causal(model, context)
    if context.compiles:
        compiled = copy.deepcopy(model)
        torch._dynamo.config.suppress_errors = True  # as in training, what cannot be compiled stays eager
        compiled.compile_blocks()
        check_causal(compiled, context, eager=model)
    check_loss(model.eval(), context)
    check_gradients(model.train(), context)
    return answer


def operations(model, context):
    """Return a training step's operations per token, as PyTorch counts them: its backward pass takes twice as many."""
    x, y, counter = context.x[:1].long(), context.y[:1].long(), FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:  # the fused kernel of a CPU counts 0
        model.train()(x, y)
    return 3 * counter.get_total_flops() / x.numel()


@torch.no_grad()
def check_loss(model, context):
    x, y = context.batch(0, 4)
    y[:, ::3] = -1
    with context.autocast():
        logits, loss, *_ = model(x, y)
    expected = (cross_entropy(logits, y) / (y >= 0).sum()).item()
    if not math.isclose(loss.item(), expected, rel_tol=1e-3 if context.dtype == torch.float32 else 2e-2):
        told = f"its loss is {loss.item():.4f} but the cross-entropy of its logits is {expected:.4f}"
        raise Refused(f"{told}, so it is not comparable with others")


def check_gradients(model, context):
    for seed in range(TRIES):
        x, y = context.batch(2 * seed, 2)
        torch.manual_seed(seed)
        with context.autocast():
            loss = model(x, y)[1]
        loss.backward()
        without = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
        if not without:
            break
    for name, p in model.named_parameters():
        if p.grad is not None and not p.grad.isfinite().all():
            raise Refused(f"the gradient of its parameter {name} is not finite")
    if without:
        raise Refused(f"its parameter {without[0]} gets no gradient, so it never learns")


# -- causality -------------------------------------------------------------------------------------------------


def check_causal(model, context, eager=None):
    for training in (False, True):
        model.train(training)
        when = "in training" if training else "in evaluation"
        look_ahead(model, eager or model, context, f"{when} when compiled" if eager else when)


@torch.no_grad()
def look_ahead(model, eager, context, when):
    """Raise Refused if a logit changes with a later token, as input or as target, or with those of another row.

    In a batch of the run's size, the first row changes, then the last, then each from a place of its own on, until all
    places were tried. Other rows' logits and those before that place are compared to the bit. What differs between two
    equal calls is random or keeps state, and is no leak.
    """
    x, y = context.batch(0, max(2, context.batch_size))
    y[:, 5::7] = -1
    rows, T = x.shape
    position = torch.arange(T, device=x.device)
    logits = call(model, context, x, y)
    if not model.training and not (call(model, context, x, y) == logits).all():
        raise Refused("repeated evaluations differ: it is random or keeps state, so its loss cannot be compared")
    steady = torch.ones_like(x, dtype=torch.bool)
    tries = [{0: 0}, {rows - 1: 0}]  # {row: the place from which on it changes}
    tries += [dict(enumerate(range(t, min(t + rows, T)))) for t in range(1, T, rows)]
    for places in tries:
        starts = torch.tensor([places.get(row, T + 1) for row in range(rows)], device=x.device)[:, None]
        changed = x.where(position < starts, x.flip(0, 1)), y.where(position < starts - 1, y.flip(0, 1))
        difference = (call(model, context, *changed) - logits).abs().amax(dim=-1)
        difference[(position >= starts) | ~steady] = 0
        if model.training and difference.any():  # so may equal calls
            for _ in range(TRIES):
                steady &= (call(model, context, x, y) == logits).all(dim=-1)
            difference[~steady] = 0
        if difference.any() and not is_rounding(eager, context.dtype, difference, logits, (x, y), changed):
            row, place = divmod(int(difference.argmax()), T)
            if row not in places:
                raise Refused(f"it sees other sequences in its batch {when}: changing one changes another's logits")
            told = f"its logits at position {place} change with tokens from {places[row]} on"
            raise Refused(f"it sees the future {when}: {told}")


def call(model, context, x, y):
    torch.manual_seed(0)
    with context.autocast():
        return model(x, y)[0].float()


def is_rounding(model, dtype, difference, logits, before, after):
    """Return whether a small difference vanishes in float64, as that of a sum in another order does."""
    if difference.max() > ROUNDING[dtype] * logits.abs().max():
        return False
    wide, exact = copy.deepcopy(model).double(), []
    for x, y in (before, after):
        torch.manual_seed(0)
        exact.append(wide(x, y)[0])
    left = (exact[0] - exact[1]).abs().amax(dim=-1)[difference > 0]
    return bool(left.max() < 1e-9 * exact[0].abs().max())


# -- after training --------------------------------------------------------------------------------------------


def look_after(GPT, config, saved, context):
    model = GPT(config)
    model.load_state_dict(saved["model"])
    model.to(context.device)
    answer = {"step": saved["iter_num"], "loss": measure(model.eval(), context)}
    check_causal(model, context)
    return answer


@torch.no_grad()
def measure(model, context):
    """Return the mean cross-entropy of a model's logits over the referee's windows, in nats per token."""
    total, counted = 0.0, 0
    for first in range(0, len(context.x), context.batch_size):
        x, y = context.batch(first, min(context.batch_size, len(context.x) - first))
        torch.manual_seed(0)
        with context.autocast():
            logits = model(x, torch.zeros_like(y))[0]  # it is not told the targets
        total, counted = total + cross_entropy(logits, y).item(), counted + (y >= 0).sum().item()
    return total / counted


def main(home, windows, answer, source):
    source, windows = Path(source), torch.load(windows, weights_only=True)
    trained = source.is_dir()
    if trained:
        saved = torch.load(source / "ckpt.pt", map_location="cpu", weights_only=True)
        settings = saved["settings"]
    else:
        settings = json.loads(source.read_text())
    sys.path[0] = home
    from model import GPT, GPTConfig

    context = Context(settings, windows)
    if trained:
        config = GPTConfig(**saved["config"])
    else:
        fields = {field.name for field in dataclasses.fields(GPTConfig)} & settings.keys()
        config = GPTConfig(**{name: settings[name] for name in fields}, vocab_size=context.vocab_size)
    try:
        facts = look_after(GPT, config, saved, context) if trained else look_before(GPT, config, context)
        facts["refused"] = ""
    except Refused as why:
        facts = {"refused": str(why)}
    temporary = Path(f"{answer}.tmp")
    temporary.write_text(json.dumps(facts))
    os.replace(temporary, answer)


if __name__ == "__main__":
    main(*sys.argv[1:])
