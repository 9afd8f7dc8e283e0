"""
The methods as their documents describe them, for comparisons of cost: explicit causal mask, T x T scores and
attention weights stored for every layer, whole lists summed. `loss(model, idx, targets)` takes a GPT's parameters
and gives the loss that the GPT itself gives.
"""

import math

import torch
import torch.nn.functional as F
from einops import rearrange

from model import rope_table


def scores(attn, config, normed, rope, earlier):
    """The T x T scores (B, H, T, T) of a layer; `earlier` has the QKᵀ of those before it, and gets this one's."""
    q, k = attn.project(normed, rope)
    k = k.repeat_interleave(attn.H // attn.G, dim=1)
    earlier.append(q @ k.mT)
    if config.attention == "standard":
        return earlier[-1] / math.sqrt(attn.D)
    if config.attention == "w2":

        def square_distance(a, b):
            return a.square().sum(-1).unsqueeze(-1) + b.square().sum(-1).unsqueeze(-2) - 2 * a @ b.mT

        sigma = F.softplus(rearrange(attn.sigma(normed), "B T (H K) -> B H T K", K=attn.K))
        sigma_q, sigma_k = sigma.split((attn.H, attn.G), dim=1)
        sigma_k = sigma_k.repeat_interleave(attn.H // attn.G, dim=1)
        tau = (attn.log_tau.exp() + 1e-6).view(-1, 1, 1)
        return -(square_distance(q, k) + square_distance(sigma_q, sigma_k)) / tau
    divisors = attn.divisors()
    if not isinstance(divisors, torch.Tensor) or divisors.dim() == 0:
        divisors = [divisors] * len(earlier)
    return torch.stack([qk / d for qk, d in zip(earlier, divisors)]).sum(dim=0)


def loss(model, idx, targets):
    config = model.config
    T = idx.size(1)
    future = torch.ones(T, T, dtype=torch.bool, device=idx.device).triu(1)
    x = model.embed(idx)
    rope = rope_table(0, T, config.head_dim, config.rope_theta, x)
    products, weights = [], []

    def attn(i, x):
        block = model.blocks[i]
        v = rearrange(block.attn.v_proj(block.attn_norm(x)), "B T (G D) -> B G T D", D=config.head_dim)
        v = v.repeat_interleave(block.attn.H // block.attn.G, dim=1)
        return block.attn.o_proj(rearrange(weights[i].type_as(v) @ v, "B H T D -> B T (H D)"))

    def mlp(i, h):
        return model.blocks[i].mlp_branch(h)

    def total(block, residual, outputs):
        summed = torch.stack([w * y for w, y in zip(block.weights(), outputs)]).sum(dim=0)
        return residual + summed if block.keep_input else summed.type_as(residual)

    for l, block in enumerate(model.blocks):
        raw = scores(block.attn, config, block.attn_norm(x), rope, products)
        weights.append(raw.masked_fill(future, -math.inf).softmax(dim=-1))
        branch = block.summed
        if branch == "attention":
            h = total(block, x, [attn(i, x) for i in [*block.sources, l]])
        else:
            h = x + attn(l, x)
        if branch == "mlp":
            x = total(block, h, [mlp(i, x + attn(i, x)) for i in [*block.sources, l]])
        else:
            x = h + mlp(l, h)
    return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), targets.flatten())
