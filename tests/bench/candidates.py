"""
What may be faster on a GPU than model.py is: other forms of its parts, which have not been measured on one yet.

speed.py times each beside model.py. tests/test_candidates.py holds what they compute to it. A form that wins goes into
model.py or train.py; one that loses goes.
"""

import math
from unittest.mock import patch

import torch
import torch.nn.functional as F
from einops import rearrange

import model as model_file
from measure import Trainer
from model import MLP, Attention, SummedQKAttention, apply_rope

ROWS = 256  # queries at a time


# -- attention by plain products -----------------------------------------------------------------------------
# PyTorch's fused kernels take score vectors of up to 256 numbers, or are slow beyond that, and its unfused path
# multiplies 16-bit numbers in float32. These multiply them as they are.


def causal_softmax(scores, first=0):
    """Return softmax(scores), (B, H, rows, T), where the rows are the queries `first`, `first` + 1, ..."""
    rows, T = scores.shape[-2:]
    future = torch.ones(rows, T, dtype=torch.bool, device=scores.device).triu(first + 1)
    exact = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return exact.masked_fill(future, -math.inf).softmax(dim=-1).type_as(scores)


def attend_by_products(q_hat, k_hat, v, dropout=0.0):
    """Return what model.py's causal_attention does. Each block of queries sees no key after its last one."""
    T = q_hat.size(-2)
    if T == 1:
        return causal_attention(q_hat, k_hat, v, dropout)
    q_hat, group = q_hat.to(v.dtype), q_hat.size(1) // k_hat.size(1)
    k_hat, v = (tensor.repeat_interleave(group, dim=1) for tensor in (k_hat.to(v.dtype), v))
    mixed = []
    for first in range(0, T, ROWS):
        seen = min(first + ROWS, T)
        weights = causal_softmax(q_hat[:, :, first:seen] @ k_hat[:, :, :seen].mT, first)
        mixed.append(F.dropout(weights, dropout) @ v[:, :, :seen])
    return torch.cat(mixed, dim=-2)


causal_attention = model_file.causal_attention


def by_products():
    """Let model.py attend by plain products, within a with block. What is compiled in it stays so."""
    return patch.object(model_file, "causal_attention", attend_by_products)


class AccumulatedQKAttention(SummedQKAttention):
    """Method 5 with one divisor for a layer (5.1 to 5.4): A_l = A_{l-1} + q_l k_lᵀ, (B, H, T, T); softmax(A_l / d_l) V.

    One product as wide as a head in each layer, in the place of one that grows. It cannot generate: there is no cache.
    """

    def score_vectors(self, x, rope, earlier):
        q, k = self.project(x, rope)
        k = k.repeat_interleave(self.H // self.G, dim=1).mT
        scores = q @ k if not earlier else earlier[-1].qk[0] + q @ k
        return scores, k, (scores,)

    def mix_values(self, scores, k_hat, v):
        weights = causal_softmax((scores / self.divisors()).to(v.dtype))
        v = v.repeat_interleave(self.H // self.G, dim=1)
        return F.dropout(weights, self.dropout.p, self.training) @ v


# -- fewer, larger products ----------------------------------------------------------------------------------


def joined(*layers):
    """Return the weight and the bias of several linear layers as of one."""
    biases = [layer.bias for layer in layers]
    return torch.cat([layer.weight for layer in layers]), None if biases[0] is None else torch.cat(biases)


class JoinedAttention(Attention):
    """Standard attention with q, k and v made by one product. Its k̂ is the pair of keys and values; no cache."""

    def score_vectors(self, x, rope, earlier):
        qkv = F.linear(x, *joined(self.q_proj, self.k_proj, self.v_proj))
        heads = rearrange(qkv, "B T (H D) -> B H T D", D=self.D)
        q, k, v = heads.split((self.H, self.G, self.G), dim=1)
        return apply_rope(q, rope) * self.D**-0.5, (apply_rope(k, rope), v), None

    def values(self, x, earlier):
        return None  # they are in k̂

    def forward(self, x, q_hat, keys_and_values, v, cache=None, slot=None):
        y = self.mix_values(q_hat, *keys_and_values)
        return self.dropout(self.o_proj(rearrange(y, "B H T D -> B T (H D)")))


class JoinedMLP(MLP):
    """The MLP with gate and up made by one product."""

    def forward(self, x):
        gate, up = F.linear(x, *joined(self.gate_proj, self.up_proj)).chunk(2, dim=-1)
        return self.dropout(self.down_proj(F.silu(gate) * up))


def remake(model, attention=None, mlp=None):
    """Let the layers of a model compute in another class's way, with the parameters that they have. Return it."""
    for block in model.blocks:
        block.attn.__class__ = attention or block.attn.__class__
        block.mlp.__class__ = mlp or block.mlp.__class__
    return model


def compile_whole_blocks(model):
    """Compile each block as one, also where layers differ in shape: a compilation for each of them. Return the model.

    Of more than eight layers PyTorch compiles the rest only under a higher torch._dynamo.config.recompile_limit.
    """
    for block in model.blocks:
        block.forward = torch.compile(block.forward, dynamic=False)
    model.loss = torch.compile(model.loss)
    model.compile_blocks = lambda: None  # which a Trainer calls
    return model


# -- CUDA graphs ---------------------------------------------------------------------------------------------


class GraphedTrainer(Trainer):
    """A Trainer whose micro-step and update are a CUDA graph each, so that a small model need not wait for the CPU.

    The first step is an eager one: it compiles, allocates, and begins the optimizer's state. Gradients stay where they
    are, and are set to 0 after each update. The learning rate is a tensor, which a schedule may fill.
    """

    def __init__(self, *arguments, **settings):
        super().__init__(*arguments, **settings)
        for group in self.optimizer.param_groups:
            group |= {"capturable": True, "lr": torch.tensor(group["lr"], device=self.device)}
        self.micro, self.update = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.captured, self.seen = False, None

    def step(self):
        if self.captured:
            for _ in range(self.micro_steps):
                self.micro.replay()
            self.update.replay()
            return self.seen.clone()  # before the next replay overwrites it
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loss = super().step()
            self.seen = self.forward_and_backward()  # gradients are there now
            self.optimizer.zero_grad(set_to_none=False)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(self.micro):
            self.seen = self.forward_and_backward()
        with torch.cuda.graph(self.update):
            self.clip_and_update()
            self.optimizer.zero_grad(set_to_none=False)
        self.captured = True
        return loss
