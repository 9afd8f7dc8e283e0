"""What a training step costs: seconds, in turns with what it is compared with, and peak memory."""

import os
import statistics
import time
from contextlib import nullcontext, redirect_stdout

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # PyTorch's profiler talks

import torch

from config.runtime.common import pick_attention_kernel, pick_dtype, use_plain_attention
from model import GPT, GPTConfig


class Trainer:
    """A model, and training steps of it on random tokens, on the device it is on, as train.py makes them."""

    def __init__(self, model, B, precision, compiled=False, loss=None, micro_steps=1):
        self.model, self.precision, self.device = model.train(), precision, next(model.parameters()).device
        self.micro_steps = micro_steps
        self.loss = loss or (lambda model, x, y: model(x, y)[1])
        with redirect_stdout(None):  # nanoGPT counts its parameters aloud
            self.optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.99), self.device.type)
        self.autocast = torch.autocast(self.device.type, precision) if precision != torch.float32 else nullcontext()
        self.idx = torch.randint(model.config.vocab_size, (B, model.config.block_size + 1), device=self.device)
        self.run = model
        if compiled and isinstance(model, GPT):
            model.compile_blocks()
        elif compiled:
            self.run = torch.compile(model)

    def step(self):
        """Train one step. Return the loss of its last micro-step."""
        if isinstance(self.model, GPT):
            pick_attention_kernel(self.model, self.device, self.precision)
        else:
            use_plain_attention(False)
        for _ in range(self.micro_steps):
            loss = self.forward_and_backward()
        self.clip_and_update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def forward_and_backward(self):
        """Add up the gradients of a micro-step. Return its loss."""
        with self.autocast:
            loss = self.loss(self.run, self.idx[:, :-1].contiguous(), self.idx[:, 1:].contiguous())
        loss.backward()
        return loss.detach()

    def clip_and_update(self):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()

    def memory(self):
        """Peak bytes of a step: parameters and optimizer, gradients, and what is kept for the backward pass.

        The state of other models on the device is no part of it. This one must have made a step before.
        """
        state = [tensor for state in self.optimizer.state.values() for tensor in state.values()]
        return sum(tensor.nbytes for tensor in [*self.model.parameters(), *state]) + self.allocated_by_a_step()

    def allocated_by_a_step(self):
        """The most bytes that a step has allocated at any moment, over what was there before it.

        On a CPU that is the highest sum of PyTorch's allocations and frees, in the order the profiler saw them.
        """
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            self.step()
            return torch.cuda.max_memory_allocated(self.device) - before
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.step()
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        highest = allocated = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            allocated += event.nbytes()
            highest = max(highest, allocated)
        return highest


def synchronize(device):
    """Waits for what a GPU has been given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed_step(trainer):
    """Return the seconds of a step, the GPU's part included."""
    began = time.perf_counter()
    trainer.step()
    synchronize(trainer.device)
    return time.perf_counter() - began


def in_turns(trainers, budget=5, turns=5):
    """Seconds per step of each trainer, one step of each in turn: `turns` of them, and on for `budget` seconds."""
    torch.compiler.reset()  # or the variants of earlier comparisons would count towards its limit
    for trainer in trainers:  # compiles, allocates
        trainer.first_seconds = timed_step(trainer)
        timed_step(trainer)
    seconds = [[] for _ in trainers]
    began = time.time()
    while len(seconds[0]) < turns or time.time() - began < budget:
        for trainer, list_of_seconds in zip(trainers, seconds):
            list_of_seconds.append(timed_step(trainer))
    return seconds


def ratio(a, b):
    """The median, over the turns, of a's seconds in b's."""
    return statistics.median(x / y for x, y in zip(a, b))


def cost_of_steps(run, device):
    """Median seconds and peak bytes of a training step of each model, the seconds also over those of the first one.

    `run` has the models' settings, batch_size, dtype (float32 unless it says so) and a budget of seconds.
    """
    models = [GPT(GPTConfig(**model)).to(device) for model in run["models"]]
    precision = pick_dtype(run.get("dtype", "float32"), device)
    trainers = [Trainer(model, run["batch_size"], precision) for model in models]
    seconds = in_turns(trainers, run["budget"])
    return {
        "seconds": [statistics.median(of_one) for of_one in seconds],
        "ratios": [ratio(of_one, seconds[0]) for of_one in seconds],
        "bytes": [trainer.memory() for trainer in trainers],
    }
