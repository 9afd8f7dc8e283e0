"""
A GPT decoder in one file: Llama's block, with alternative attention kinds, residual methods and connections.

The key idea: every attention kind is exactly softmax(q̂ k̂ᵀ) V for some score vectors q̂ and k̂:

    kind         q̂ of a query                      k̂ of a key
    standard     q/√d                               k
    w2           (2/τ)·[μ_q, σ_q, 1]                [μ_k, σ_k, -(‖μ_k‖² + ‖σ_k‖²)/2]
    summed_qk    [s_0·q_0, ..., s_l·q_l]            [k_0, ..., k_l]        (layer l)
    cosine       s·q/‖q‖                            k/‖k‖

So PyTorch's causal attention serves all of them, and recomputing as well: a layer's attention weights are remembered
as its (q̂, k̂), never as a T x T matrix. No mask is passed anywhere, so none can be forgotten.

Recomputing is what the residual methods m1 to m4.2 do. With attn_i(x) = W_O softmax(q̂_i k̂_iᵀ) W_V norm_i(x)
and mlp_i(h) the branches of layer i, layer l >= 1 adds up the layers i = 0..l:

    m2, m4.*     h  = Σ_i w_i attn_i(x)                 all others    h  = x + attn_l(x)
    m1, m3.*     x' = Σ_i w_i mlp_i(x + attn_i(x))      all others    x' = h + mlp_l(h)

A connection says what a layer reads: the output of the layer before it, or a mix of all earlier outputs.

References
    Llama                      Touvron et al. 2023, https://arxiv.org/abs/2302.13971
    RoPE                       Su et al. 2021, https://arxiv.org/abs/2104.09864
    SwiGLU                     Shazeer 2020, https://arxiv.org/abs/2002.05202
    grouped-query attention    Ainslie et al. 2023, https://arxiv.org/abs/2305.13245
    Probabilistic Transformer  Wu & Tu 2023, https://arxiv.org/abs/2311.15211 (what m1-m5 start from)
    RealFormer                 He et al. 2020, https://arxiv.org/abs/2012.11747 (Method 5.1)
    QK-norm                    Henry et al. 2020, https://arxiv.org/abs/2010.04245
    L2 attention               Kim et al. 2020, https://arxiv.org/abs/2006.04710
    value residual             Zhou et al. 2024, https://arxiv.org/abs/2410.17897
    x0 lambdas                 Jordan et al. 2024, https://github.com/KellerJordan/modded-nanogpt
    DenseFormer                Pagliardini et al. 2024, https://arxiv.org/abs/2402.02622
    attention residuals        Kimi Team 2026, https://arxiv.org/abs/2603.15031

Shapes: B batch, T time, C = n_embd, H heads (G of keys and values), D = C/H, V vocabulary. Layers count from 0.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Residual:
    """A residual method: how a layer sums its own branch and those of the earlier layers it recomputes."""

    branch: str  # whose outputs are summed: "attention" (the sum makes h) or "mlp" (it makes x')
    weights: str = "one"  # w_i: "one", "mean" (1/m) or "learned" (softmax of the block's `mix`)
    sources: Callable = range  # layer l -> the earlier layers that it recomputes; range(l) is all of them


RESIDUALS = {
    "standard": None,
    "m1": Residual("mlp"),
    "m2": Residual("attention"),
    "m3.1": Residual("mlp", weights="mean"),
    "m3.2": Residual("mlp", weights="learned"),
    "m4.1": Residual("attention", weights="mean"),
    "m4.2": Residual("attention", weights="learned"),
}


class ConfigError(ValueError):
    """A value of a GPTConfig that cannot work. The message names the field, the value, and what would work."""

    for_user = True


@dataclass
class GPTConfig:
    """The shape and the method of a model. Raises ConfigError for a value that cannot work."""

    block_size: int = 1024  # the longest context, in tokens
    vocab_size: int = 50304  # GPT-2's 50257 rounded up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int | None = None  # None or 0: n_head; fewer: grouped-query attention
    n_embd: int = 768
    n_inner: int | None = None  # width of the MLP; None or 0: 8/3 n_embd, rounded up to a multiple of 64
    dropout: float = 0.0
    bias: bool = False  # biases in the linear layers of attention and MLP
    attention: str = "standard"  # standard, w2, summed_qk, cosine
    qk_scale: str = "5.1"  # summed_qk: 5.1 to 5.7
    sigma: str = "scalar"  # w2: scalar, diagonal, none
    value_residual: bool = False  # mix the first layer's values into every layer's
    residual: str = "standard"  # standard, m1, m2, m3.1, m3.2, m4.1, m4.2
    keep_input: bool = False  # m1 to m4.2: add the sum to the usual residual, which it otherwise replaces
    connection: str = "latest"  # what a layer reads: latest, x0, dense, attnres
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_weights: bool = False  # one matrix for the embedding and the head
    activation_checkpointing: bool = False  # less memory: the backward pass runs every block once more

    def __post_init__(self):
        for field, choices in CHOICES.items():
            self.check(field, getattr(self, field) in choices, "one of " + ", ".join(choices))
        self.n_kv_head = self.n_kv_head or self.n_head
        self.n_inner = self.n_inner or 64 * math.ceil(8 * self.n_embd / (3 * 64))
        self.check("n_head", self.n_head > 0 and self.n_embd % self.n_head == 0, f"a divisor of n_embd = {self.n_embd}")
        self.check("n_head", self.head_dim % 2 == 0, f"such that n_embd / n_head is even; n_embd = {self.n_embd}")
        self.check("n_kv_head", self.n_head % self.n_kv_head == 0, f"a divisor of n_head = {self.n_head}")

    def check(self, field, good, needed):
        if not good:
            raise ConfigError(f"{field} = {getattr(self, field)!r} does not work: it must be {needed}")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def label(self):
        """The method in words, such as "w2 attention (sigma=scalar), m1 residual with input"."""
        options = ", ".join(f"{name}={getattr(self, name)}" for name in ATTENTIONS[self.attention].options)
        kept = " with input" if self.keep_input and self.residual != "standard" else ""
        label = f"{self.attention} attention{options and f' ({options})'}, {self.residual} residual{kept}"
        label += ", value residual" if self.value_residual else ""
        return label + (f", {self.connection} connection" if self.connection != "latest" else "")


# -----------------------------------------------------------------------------
# Stateless math


def rope_table(start, stop, head_dim, theta, like):
    """Return cos and ±sin (- in the first half) of position · theta^(-2j/D) for start..stop-1, each (T, D)."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim)
    angle = torch.outer(torch.arange(start, stop, device=like.device, dtype=dtype), frequency)
    return torch.cat((angle.cos(), angle.cos()), dim=-1), torch.cat((-angle.sin(), angle.sin()), dim=-1)


def apply_rope(x, rope):
    """Rotate x (B, H, T, D) by its positions' angles."""
    cos, sin = (table.type_as(x) for table in rope)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


def weighted_sum(weights, tensors):
    """Return Σ_i w_i x_i, without the matrix product that autocast would round to bfloat16."""
    total = weights[0] * tensors[0]
    for w, x in zip(weights[1:], tensors[1:]):
        total = torch.addcmul(total, w, x)
    return total


def multiply_adds(module, without=()):
    """Return the multiply-adds per token of every nn.Linear in `module`, except in its parts `without`."""
    total, skipped = 0, {part for name in without for part in getattr(module, name).modules()}
    for part in set(module.modules()) - skipped:
        for name, p in part.named_parameters(recurse=False):
            if isinstance(part, nn.Linear):
                total += p.numel() if name == "weight" else 0
            elif p.dim() > 1 and p.numel() > max(p.shape):
                raise NotImplementedError(f"{type(part).__name__}.{name} is not in an nn.Linear: override `operations`")
    return total


def causal_attention(q_hat, k_hat, v, dropout=0.0):
    """Return softmax(q̂ k̂ᵀ) v, (B, H, T, D), causal by position; a single query is the last position."""
    q_hat, k_hat, D = q_hat.to(v.dtype), k_hat.to(v.dtype), v.size(-1)
    T, S = q_hat.shape[-2:]
    assert T == 1 or T == k_hat.size(-2), "causal only if queries and keys are the same tokens"
    fused = torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()  # a CPU has the same switch
    width, repeats = attention_layout(v.device.type, v.dtype, T, S, D, q_hat.size(1) // k_hat.size(1), fused)
    if width > D:
        v = F.pad(v, (0, width - D))
    if repeats > 1:
        k_hat, v = k_hat.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
    grouped = {"enable_gqa": q_hat.size(1) != k_hat.size(1)}
    y = F.scaled_dot_product_attention(q_hat, k_hat, v, dropout_p=dropout, is_causal=T > 1, scale=1.0, **grouped)
    return y[..., :D]


def attention_layout(device_type, dtype, T, S, D, group, fused=True):
    """Return the width to pad v to, and how often to repeat the heads of k̂ and v, for PyTorch's best kernel."""
    if device_type == "mps":  # its kernel was wrong where v is narrower, up to PyTorch 2.11
        return S, 1
    if T == 1 or device_type == "cpu" and not fused:  # for a single query the cache is not worth padding
        return D, 1
    if device_type == "cuda" and (S > 256 or dtype not in (torch.bfloat16, torch.float16)):
        return D, group  # the memory-efficient kernel takes any widths, but no grouped heads
    return S, 1  # a CPU's fused kernel, flash and cuDNN need equal widths


class RMSNorm(nn.RMSNorm):
    """RMSNorm whose output has autocast's type already: one cast for all the matrix products that follow."""

    def forward(self, x):
        device = x.device.type
        normed = super().forward(x)
        return normed.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else normed


# -----------------------------------------------------------------------------
# Attention: each kind says how to make its score vectors, the rest is common


class Attention(nn.Module):
    """softmax(q kᵀ/√d_k) V: the standard kind, and the base of the others."""

    options = {}  # the fields of GPTConfig that only this kind reads, and the choices of each, or None
    scoring = ("q_proj", "k_proj")  # its modules that make score vectors: recomputing does not run them again
    reads_earlier = False  # whether score vectors or values use what `earlier` layers have kept

    def __init__(self, config, layer):
        super().__init__()
        self.H, self.G, self.D = config.n_head, config.n_kv_head, config.head_dim
        self.q_proj = nn.Linear(config.n_embd, self.H * self.D, bias=config.bias)
        self.k_proj = nn.Linear(config.n_embd, self.G * self.D, bias=config.bias)
        self.v_proj = nn.Linear(config.n_embd, self.G * self.D, bias=config.bias)
        self.o_proj = nn.Linear(self.H * self.D, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        if config.value_residual and layer > 0:
            self.value_mix = nn.Parameter(torch.full((2,), 0.5))  # a and b of Block.values, from 1/2 as in the paper

    def init_queries_as_keys(self):
        """Start queries equal to their keys: without an identity path, deep models would average tokens away."""
        per_group = self.q_proj.weight.unflatten(0, (self.G, -1, self.D))
        per_group.copy_(self.k_proj.weight.unflatten(0, (self.G, 1, self.D)))

    def project(self, x, rope):
        """Project x (B, T, C) to q (B, H, T, D) and k (B, G, T, D), rotated."""
        q = rearrange(self.q_proj(x), "B T (H D) -> B H T D", D=self.D)
        k = rearrange(self.k_proj(x), "B T (G D) -> B G T D", D=self.D)
        return apply_rope(q, rope), apply_rope(k, rope)

    def score_vectors(self, x, rope, earlier):
        """Return q̂ (B, H, T, S) and k̂ (B, G, T, S), and anything that later layers need, or None.

        Each vector depends on its own token only. x is the normed input; `earlier` holds each earlier layer's Kept.
        """
        q, k = self.project(x, rope)
        return q * self.D**-0.5, k, None

    def values(self, x, earlier):
        """Return the values v (B, G, T, D) of the normed input x."""
        return rearrange(self.v_proj(x), "B T (G D) -> B G T D", D=self.D)

    def output(self, y, x):
        """Return (B, T, C) for the mixed values y (B, T, H D) and the normed input x."""
        return self.o_proj(y)

    def forward(self, x, q_hat, k_hat, v, cache=None, slot=None):
        """Return W_O softmax(q̂ k̂ᵀ) v, (B, T, C). The cache has the values of earlier tokens in its slot."""
        if cache is not None:
            v = cache.update(slot, v)
        y = self.mix_values(q_hat, k_hat, v)
        return self.dropout(self.output(rearrange(y, "B H T D -> B T (H D)"), x))

    def mix_values(self, q_hat, k_hat, v):
        """Return softmax(q̂ k̂ᵀ) v, (B, H, T, D), for the keys and values of all tokens read."""
        return causal_attention(q_hat, k_hat, v, self.dropout.p if self.training else 0.0)

    def score_width(self):
        """Return S, the numbers in a score vector, without padding."""
        return self.D

    def operations(self, T, recomputed=False):
        """Return the multiply-adds per token in a context of T: of matrices, scores and mixed values."""
        return multiply_adds(self, self.scoring if recomputed else ()) + T * self.H * (self.score_width() + self.D)


class W2Attention(Attention):
    """Minus the squared Wasserstein-2 distance of Gaussians N(μ, diag(σ²)) instead of q·k.

    S = -(‖Rμ_q - Rμ_k‖² + ‖σ_q - σ_k‖²)/τ. R is RoPE, which turns the means only. Written out,
    S = (2/τ)(μ_q·μ_k + σ_q·σ_k - (‖μ_k‖² + ‖σ_k‖²)/2) - (‖μ_q‖² + ‖σ_q‖²)/τ, and softmax cancels the last term.
    σ is a number per head (scalar), a vector (diagonal) or none: L2 attention, but with two matrices for q and k
    and with a learned τ instead of √d_k.
    """

    options = {"sigma": ("scalar", "diagonal", "none")}

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.K = {"scalar": 1, "diagonal": self.D, "none": 0}[config.sigma]
        if self.K:
            self.sigma = nn.Linear(config.n_embd, (self.H + self.G) * self.K, bias=False)
            self.scoring = (*self.scoring, "sigma")
        self.tau_shift = nn.Parameter(torch.zeros(self.H))

    @property
    def log_tau(self):
        """log τ (H,), which starts such that q·k is scaled by 1/√d_k."""
        # It learns at a tenth of the rate: at the full rate τ grows before there is anything to attend to.
        return math.log(2 * self.D**0.5) + 0.1 * self.tau_shift

    def score_vectors(self, x, rope, earlier):
        queries, keys = ([mu] for mu in self.project(x, rope))
        if self.K:
            sigma = F.softplus(rearrange(self.sigma(x), "B T (H K) -> B H T K", K=self.K)).type_as(queries[0])
            queries.append(sigma[:, : self.H])
            keys.append(sigma[:, self.H :])
        scale = (2 / (self.log_tau.exp() + 1e-6)).view(-1, 1, 1)

        # A key's bias is large compared with the differences between keys, so rounding it to bfloat16 would dominate
        # the error. It is split into its first 8 bits and the rest, arithmetically: compilers drop round-trip casts.
        exact = torch.promote_types(keys[0].dtype, torch.float32)
        bias = -sum(part.to(exact).square().sum(-1, keepdim=True) for part in keys) / 2
        step = torch.exp2(bias.detach().abs().clamp_min(1e-30).log2().floor() - 7)
        coarse = (bias.detach() / step).trunc() * step

        # a GPU's fused kernels need multiples of 8; the CPU's is fastest without padding
        pad = (0, 0 if x.device.type == "cpu" else -self.score_width() % 8)
        ones = F.pad(torch.ones_like(queries[0][..., :2]), pad)
        biases = F.pad(torch.cat((coarse, bias - coarse), dim=-1), pad).type_as(keys[0])
        q_hat = (torch.cat((*queries, ones), dim=-1) * scale).type_as(ones)
        return q_hat, torch.cat((*keys, biases), dim=-1), None

    def score_width(self):
        return self.D + self.K + 2


class SummedQKAttention(Attention):
    """softmax(Σ_i q_i k_iᵀ / d_i) V over the layers i = 0..l (Method 5). 5.1 is RealFormer, here in a fused kernel."""

    options = {"qk_scale": ("5.1", "5.2", "5.3", "5.4", "5.5", "5.6", "5.7")}
    reads_earlier = True

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.m, self.qk_scale = layer + 1, config.qk_scale
        match self.qk_scale:  # 5.4 starts equal to 5.3; 5.5 to 5.7 start equal to 5.1
            case "5.4": self.a, self.b = nn.Parameter(torch.full((1,), 0.5)), nn.Parameter(torch.ones(1))
            case "5.5": self.log_a = nn.Parameter(torch.zeros(self.m))
            case "5.6": self.log_a, self.b = nn.Parameter(torch.zeros(self.m)), nn.Parameter(torch.full((self.m,), 0.5))
            case "5.7": self.log_a = nn.Parameter(torch.full((self.m,), math.log(self.D) / 2))

    def divisors(self):
        """Return d_i of the layers 0..l, (m,), or one number for all."""
        d, m = self.D, self.m
        match self.qk_scale:
            case "5.1": return d**0.5
            case "5.2": return d**0.5 * m**0.5
            case "5.3": return d**0.5 * m
            case "5.4": return d**self.a * m**self.b
            case "5.5": return self.log_a.exp() * d**0.5
            case "5.6": return self.log_a.exp() * d**self.b
            case "5.7": return self.log_a.exp()

    def score_vectors(self, x, rope, earlier):
        own = self.project(x, rope)
        layers = [*(kept.qk for kept in earlier), own]
        q = torch.stack([q for q, k in layers], dim=-2)  # (B, H, T, m, D)
        scale = 1 / self.divisors()
        if isinstance(scale, torch.Tensor):
            scale = scale.view(-1, 1)
        return (q * scale).flatten(-2).type_as(q), torch.cat([k for q, k in layers], dim=-1), own

    def score_width(self):
        return self.m * self.D


class CosineAttention(Attention):
    """softmax(s_h cos(q, k)) V with a learned s_h per head: QK-norm (paper: one s, initially log₂(T² - T))."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        # s_h starts at √d_k, where standard attention starts: |q| ≈ |k| ≈ √d_k makes q·k/√d_k = √d_k cos(q, k)
        self.log_scale = nn.Parameter(torch.full((self.H,), math.log(self.D) / 2))

    def score_vectors(self, x, rope, earlier):
        q, k = self.project(x, rope)
        # one factor per vector: F.normalize would make several passes over q and k, in float32 under autocast
        q_norm, k_norm = (vector.square().sum(-1, keepdim=True).clamp_min(1e-6).sqrt() for vector in (q, k))
        s = self.log_scale.exp().view(-1, 1, 1)
        return q * (s / q_norm).type_as(q), k * (1 / k_norm).type_as(k), None


ATTENTIONS = {"standard": Attention, "w2": W2Attention, "summed_qk": SummedQKAttention, "cosine": CosineAttention}

# -----------------------------------------------------------------------------
# MLP, block and residual methods


class MLP(nn.Module):
    """SwiGLU: W_down (silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, config):
        super().__init__()
        self.gate_proj = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.up_proj = nn.Linear(config.n_embd, config.n_inner, bias=config.bias)
        self.down_proj = nn.Linear(config.n_inner, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Kept(NamedTuple):
    """The tensors that a layer keeps for later layers."""

    block: nn.Module  # itself, which they recompute
    q_hat: torch.Tensor  # its score vectors, which stand for its attention weights
    k_hat: torch.Tensor
    v: torch.Tensor  # its values, of the tokens that it has just read
    qk: object  # what score_vectors returns third, such as the plain (q, k) of summed_qk


class Block(nn.Module):
    """One layer. Under Methods 1 to 4 later layers recompute it on their own input."""

    def __init__(self, config, layer):
        super().__init__()
        self.layer = layer
        self.attn_norm = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = ATTENTIONS[config.attention](config, layer)
        self.mlp_norm = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = MLP(config)
        self.residual, self.keep_input = RESIDUALS[config.residual], config.keep_input
        self.sources = self.residual.sources(layer) if self.residual else ()  # the layers recomputed; none in layer 0
        self.summed = self.residual.branch if self.sources else None  # the branch whose residual is a sum here
        if self.summed and self.residual.weights == "learned":
            self.mix = nn.Parameter(torch.zeros(len(self.sources) + 1))
        self.value_residual = config.value_residual
        self.reads_earlier = bool(self.residual or self.value_residual or self.attn.reads_earlier)

    def forward(self, x, rope, earlier=(), cache=None):
        """Return x' for x, both (B, T, C), and the layer's Kept, or None if later layers need nothing."""
        if self.reads_earlier and len(earlier) < self.layer:
            raise ValueError(f"layer {self.layer} needs `earlier`: what each of the layers before it has Kept")
        v_0 = earlier[0].v if self.value_residual and earlier else None
        normed, q_hat, k_hat, v, qk = self.vectors(x, rope, earlier, v_0)
        if cache is not None:
            k_hat = cache.update((self.layer, "keys"), k_hat)

        attn = self.attn(normed, q_hat, k_hat, v, cache, (self.layer, self.layer))  # attn_l(x)
        if self.summed == "attention":  # Methods 2 and 4: h = Σ_i w_i attn_i(x)
            h = self.sum_over_layers(attn, x, earlier, cache, usual=x)
        else:
            h = x + attn

        mlp = self.mlp_branch(h)  # mlp_l(h)
        if self.summed == "mlp":  # Methods 1 and 3: x' = Σ_i w_i mlp_i(x + attn_i(x))
            out = self.sum_over_layers(mlp, x, earlier, cache, usual=h)
        else:
            out = h + mlp
        return out, (Kept(self, q_hat, k_hat, v, qk) if self.reads_earlier or qk is not None else None)

    def sum_over_layers(self, last_output, x, earlier, cache, usual):
        """Return Σ_i w_i attn_i(x), or Σ_i w_i mlp_i(x + attn_i(x)), instead of the usual residual or added to it."""
        total = usual if self.keep_input else torch.zeros_like(usual)  # in float32 also under autocast
        *weights, last_weight = self.weights()
        for w, i in zip(weights, self.sources):
            block, q_hat, k_hat, *_ = earlier[i]
            v_0 = earlier[0].v if self.value_residual and i else None
            total = total + block.recompute(w, x, q_hat, k_hat, earlier[:i], v_0, cache, (self.layer, i))
        return total + last_weight * last_output

    def weights(self):
        """Return w_i of the layers summed, this one's own last."""
        m = len(self.sources) + 1
        match self.residual.weights:
            case "one": return [1.0] * m
            case "mean": return [1 / m] * m
            case "learned": return self.mix.softmax(dim=0).unbind()
            case other: raise NotImplementedError(f"Residual(weights={other!r}) has no case in Block.weights")

    def operations(self, T, recomputed=False):
        """Return the multiply-adds per token in a context of T, without those of the layers that it recomputes."""
        attention_alone = recomputed and self.residual.branch == "attention"
        return self.attn.operations(T, recomputed) + (0 if attention_alone else multiply_adds(self, without=("attn",)))

    def vectors(self, x, rope, earlier, v_0):
        """Return the normed input, q̂, k̂, the values, and what `score_vectors` returns third."""
        normed = self.attn_norm(x)
        q_hat, k_hat, qk = self.attn.score_vectors(normed, rope, earlier)
        return normed, q_hat, k_hat, self.values(normed, earlier, v_0), qk

    def values(self, normed, earlier, v_0):
        """Return v, or a v + b v_0 (value residual): v_0 is from the first layer's first run, even when recomputing."""
        v = self.attn.values(normed, earlier)
        return v if v_0 is None else weighted_sum(self.attn.value_mix.type_as(v).unbind(), (v, v_0))

    def mlp_branch(self, h):
        return self.mlp(self.mlp_norm(h))

    def recompute(self, w, x, q_hat, k_hat, earlier, v_0, cache=None, slot=None):
        """Return w attn_i(x) or w mlp_i(x + attn_i(x)) on a later layer's x, with the (q̂, k̂) of the first run."""
        normed = self.attn_norm(x)
        attn = self.attn(normed, q_hat, k_hat, self.values(normed, earlier, v_0), cache, slot)
        return w * (attn if self.residual.branch == "attention" else self.mlp_branch(x + attn))


class KVCache:
    """The keys k̂ of each layer, the values of each pair (layer, recomputed layer), for up to `size` tokens."""

    def __init__(self, size):
        self.size = size
        self.length = 0  # tokens read by all layers
        self.slots = {}

    def update(self, slot, new):
        """Append new (B, G, T, S or D) to the slot, and return all that it holds."""
        if slot not in self.slots:
            self.slots[slot] = new.new_empty(*new.shape[:2], self.size, new.size(-1))
        end = self.length + new.size(2)
        self.slots[slot][:, :, self.length : end] = new
        return self.slots[slot][:, :, :end]


# -----------------------------------------------------------------------------
# Connections: what a layer reads


class Latest(nn.Module):
    """x_l, the output of the layer before: the standard connection, and the base of the others."""

    def __init__(self, config):
        super().__init__()

    def forward(self, outputs, inputs):
        """Return the input (B, T, C) of layer l = len(inputs), or of the head if l = n_layer, token by token.

        `outputs` has the embedding x_0 and the layers' outputs x_1 to x_l; `inputs` has what they read.
        """
        return outputs[-1]

    def operations(self):
        """Return the multiply-adds per token of its matrix products, for all layers together."""
        return multiply_adds(self)


class X0(Latest):
    """a_l x_l + b_l x_0 in every layer (modded-nanogpt, where x_0 is normed). Starts as `latest`: a = 1, b = 0."""

    def __init__(self, config):
        super().__init__(config)
        self.a = nn.Parameter(torch.ones(config.n_layer))
        self.b = nn.Parameter(torch.zeros(config.n_layer))

    def forward(self, outputs, inputs):
        l = len(inputs)
        if l == len(self.a):  # the head reads the last layer alone
            return outputs[-1]
        return weighted_sum((self.a[l], self.b[l]), (outputs[-1], outputs[0]))


class Dense(Latest):
    """Σ_{i≤l} w_li x_i (DenseFormer, without its dilation and period). Starts as `latest`: w_ll = 1, the rest 0."""

    def __init__(self, config):
        super().__init__(config)
        self.w = nn.ParameterList(torch.eye(l + 1)[l] for l in range(1, config.n_layer + 1))

    def forward(self, outputs, inputs):
        l = len(inputs)
        return weighted_sum(self.w[l - 1].unbind(), outputs) if l else outputs[0]


class AttnRes(Latest):
    """Attention residuals: Σ_{i≤l} p_li f_i with p_l = softmax_i(w_l · rms_norm(f_i)). Starts as the mean: w = 0.
    f_0 is the embedding, f_i layer i-1's addition; the paper counts attention and MLP as separate layers.
    """

    def __init__(self, config):
        super().__init__(config)
        self.w = nn.Parameter(torch.zeros(config.n_layer, config.n_embd))

    def forward(self, outputs, inputs):
        l = len(inputs)
        if l == 0:
            return outputs[0]
        added = [outputs[0], *(after - before for before, after in zip(inputs, outputs[1:]))]
        scores = [(F.rms_norm(f, f.shape[-1:]) * self.w[l - 1]).sum(-1, keepdim=True) for f in added]
        return weighted_sum(torch.stack(scores).softmax(dim=0), added)

    def operations(self):
        return 0  # w is a row of vectors, and in no matrix product


CONNECTIONS = {"latest": Latest, "x0": X0, "dense": Dense, "attnres": AttnRes}
CHOICES = {"attention": ATTENTIONS, "residual": RESIDUALS, "connection": CONNECTIONS}  # of fields of GPTConfig
CHOICES |= {option: choices for kind in ATTENTIONS.values() for option, choices in kind.options.items() if choices}

# -----------------------------------------------------------------------------
# The model


class GPT(nn.Module):
    """The model. It can replace the GPT in nanoGPT's model.py."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.connection = CONNECTIONS[config.connection](config)
        self.norm = RMSNorm(config.n_embd, eps=config.norm_eps)
        self.head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.head.weight = self.embed.weight
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        # a std of 1/√fan-in preserves the scale of activations; at the usual 0.02, Methods 1 to 4 hardly learn
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight)  # tied to the head, it takes the head's size below
        for block in self.blocks:
            for output in (block.attn.o_proj, block.mlp.down_proj):  # 2L branches add up to about what one would be
                output.weight.mul_((2 * self.config.n_layer) ** -0.5)
            if block.summed == "attention" and not block.keep_input:
                block.attn.init_queries_as_keys()

    def features(self, idx, cache=None):
        """Return the final hidden states (B, T, C) of idx (B, T), which continues the tokens in `cache`."""
        start = 0 if cache is None else cache.length
        stop = start + idx.size(1)
        if not start < stop <= self.config.block_size:
            raise ValueError(f"the context has {stop} tokens; it must be 1 to block_size = {self.config.block_size}")

        x = self.embed(idx)
        rope = rope_table(start, stop, self.config.head_dim, self.config.rope_theta, x)
        outputs, inputs, earlier = (x,), (), ()  # tuples, since checkpointing reads each of them again
        saving = self.config.activation_checkpointing and torch.is_grad_enabled()
        run = partial(checkpoint, use_reentrant=False) if saving else lambda module, *args: module(*args)
        for block in self.blocks:
            inputs += (run(self.connection, outputs, inputs),)
            x, kept = run(block, inputs[-1], rope, earlier, cache)
            outputs += (x,)
            earlier += (kept,)
        x = run(self.connection, outputs, inputs)
        if cache is not None:
            cache.length = stop
        return self.norm(x)

    def forward(self, idx, targets=None):
        """Return logits (B, T, V) for idx (B, T) and, with targets (B, T) (-1: ignored), their mean loss in nats."""
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets have shape {tuple(targets.shape)}, idx has {tuple(idx.shape)}: they must match")
        x = self.features(idx)
        missing = -self.config.vocab_size % 64
        if x.device.type == "cuda" and missing:  # GPT-2's V of 50,257 would misalign the head's products
            logits = F.linear(x, F.pad(self.head.weight, (0, 0, 0, missing)))
        else:
            logits = self.head(x)
        loss = None if targets is None else self.loss(logits, targets)
        return logits[..., : self.config.vocab_size], loss

    def loss(self, logits, targets):
        # compiled separately: if compiled code also returned the logits, it would materialize a zero gradient for them
        logits = logits[..., : self.config.vocab_size]
        return F.cross_entropy(logits.flatten(0, -2), targets.flatten().long(), ignore_index=-1)

    # -- generation

    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
        """Return idx (B, T) continued by max_new_tokens, (B, T + max_new_tokens). See `stream`."""
        tokens = self.stream(idx, max_new_tokens, temperature, top_k, top_p, generator)
        return torch.cat((idx, *tokens), dim=1)

    @torch.no_grad()
    def stream(self, idx, max_new_tokens, temperature=1.0, top_k=None, top_p=None, generator=None):
        """Yield max_new_tokens tensors (B, 1), the continuation of idx (B, T), each as soon as it is drawn.

        temperature 0 takes the likeliest token; top_k draws from the k likeliest ones, top_p from the fewest whose
        probabilities sum to p. Whenever the context is full, its older half is dropped and the newer half read again.
        """
        if temperature < 0 or top_k is not None and top_k < 1 or top_p is not None and not 0 < top_p <= 1:
            given = f"temperature = {temperature}, top_k = {top_k}, top_p = {top_p}"
            raise ValueError(f"{given}: temperature must be >= 0, top_k None or >= 1, top_p None or in (0, 1]")

        block_size = self.config.block_size
        window = idx[:, -block_size:]  # the context; the cache holds all of it but what `unread` has
        room = min(block_size, idx.size(1) + max_new_tokens)
        unread, cache = window, KVCache(room)
        for _ in range(max_new_tokens):
            logits = self.head(self.features(unread, cache)[:, -1])
            token = sample_next_token(logits, temperature, top_k, top_p, generator)
            yield token
            if window.size(1) < block_size:
                window, unread = torch.cat((window, token), dim=1), token
            else:
                window = unread = torch.cat((window[:, block_size - block_size // 2 :], token), dim=1)
                cache = KVCache(room)

    # -- training

    def compile_blocks(self):
        """Compile each layer's functions in place. Recomputation reuses them: no graph per pair of layers."""
        for block in self.blocks:
            if not block.reads_earlier:
                block.forward = torch.compile(block.forward)
                continue
            if block.attn.reads_earlier:  # its vectors differ in shape from layer to layer
                block.attn.project = torch.compile(block.attn.project)
            else:
                block.vectors = torch.compile(block.vectors)
            block.attn.forward = torch.compile(block.attn.forward)
            block.mlp_branch = torch.compile(block.mlp_branch)
            block.recompute = torch.compile(block.recompute)
        self.loss = torch.compile(self.loss)

    def param_groups(self, weight_decay):
        """Return parameters by role: the blocks' matrices, for Muon; other matrices; and, undecayed, all else."""
        matrices = [part.weight for part in self.blocks.modules() if isinstance(part, nn.Linear)]
        weights = {part.weight for part in self.modules() if isinstance(part, (nn.Linear, nn.Embedding))}
        others = weights.difference(matrices)  # embedding and head, once where they are tied
        tables = [p for p in self.parameters() if p in others]
        vectors = [p for p in self.parameters() if p not in weights]
        decays = ((matrices, weight_decay), (tables, weight_decay), (vectors, 0.0))
        return [{"params": params, "weight_decay": decay} for params, decay in decays]

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        fused = device_type in ("cuda", "cpu", "mps")
        return torch.optim.AdamW(self.param_groups(weight_decay), learning_rate, betas=betas, fused=fused)

    def get_num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Return the floating-point operations of a forward and backward pass, per token of a full context."""
        # Attention counts in full, as is customary, although a causal kernel does half of it. Sums do not count.
        T, total = self.config.block_size, multiply_adds(self.head) + self.connection.operations()
        for block in self.blocks:
            total += block.operations(T)
            total += sum(self.blocks[i].operations(T, recomputed=True) for i in block.sources)
        return 6 * total  # two per multiply-add forward, twice that backward

    def estimate_mfu(self, fwdbwd_per_iter, dt, peak_flops=312e12):
        """Return the MFU of fwdbwd_per_iter contexts in dt seconds (peak_flops: an A100's, as in nanoGPT)."""
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / peak_flops

    def crop_block_size(self, block_size):
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size = {block_size} does not work: it must be 1 to {self.config.block_size}")
        self.config.block_size = block_size


def sample_next_token(logits, temperature, top_k, top_p, generator):
    """Draw a token (B, 1) from logits (B, V)."""
    if temperature < 1e-6:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float()
    logits = (logits - logits.max(dim=-1, keepdim=True).values) / temperature  # no overflow at low temperatures
    if top_k is not None:
        least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
        logits = logits.masked_fill(logits < least, -math.inf)
    if top_p is not None and top_p < 1:  # sorting a large vocabulary takes time
        ordered, order = logits.sort(descending=True)
        p = ordered.softmax(dim=-1)
        beyond = p.cumsum(dim=-1) - p >= top_p
        beyond[:, 0] = False  # the likeliest always stays
        logits = torch.empty_like(logits).scatter(1, order, ordered.masked_fill(beyond, -math.inf))
    return torch.multinomial(logits.softmax(dim=-1), 1, generator=generator)
