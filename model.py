"""
A GPT decoder in one file: Llama's block, with alternative attention kinds and residual methods.

A query and a key of standard attention are vectors q and k. In w2 they are Gaussians with means μ and standard
deviations σ, compared by their distance over a learned temperature τ. In layer l, summed_qk adds the scores of all
earlier layers i to its own, each with a scale s_i (Method 5). These three kinds are exactly softmax(q̂ k̂ᵀ) v for some
score vectors q̂ and k̂, where q, k and μ are rotated (RoPE):

    kind         score of a query and a key          q̂                        k̂
    standard     q·k/√D                              q/√D                      k
    w2           -(‖μ_q - μ_k‖² + ‖σ_q - σ_k‖²)/τ    (2/τ)·[μ_q, σ_q, -1/2]    [μ_k, σ_k, ‖μ_k‖² + ‖σ_k‖²]
    summed_qk    Σ_i s_i q_i·k_i                     [s_0·q_0, ..., s_l·q_l]   [k_0, ..., k_l]

In w2, q̂·k̂ leaves out a term of the query alone, which softmax cancels. So causal_attention serves all three kinds, and
no mask is passed around. Only w2_overlap, W2Attn's own score, does not factor: mix_values computes its T x T weights.

Under Methods 1 to 4 (residual m1 to m4.2), layer l >= 1 reruns every earlier layer i on layer l's input x, with the
attention weights that layer i computed before. The layers keep them as (q̂_i, k̂_i), never as a T x T matrix. So a rerun
gives attn_i(x) = softmax(q̂_i k̂_iᵀ) norm_i(x) W_V W_O, with layer i's norm and matrices, or mlp_i(x + attn_i(x)). In
training, each rerun draws its own dropout.

    m2, m4.*     h  = Σ_i w_i attn_i(x)                 all others    h  = x + attn_l(x)
    m1, m3.*     x' = Σ_i w_i mlp_i(x + attn_i(x))      all others    x' = h + mlp_l(h)

The sums run over i = 0..l. w_i is 1 (m1, m2), 1/(l + 1) (m3.1, m4.1) or learned, with sum 1 (m3.2, m4.2). keep_input
adds x to the first sum, h to the second. Layer 0 is always standard: h = x + attn_0(x), x' = h + mlp_0(h).

References
    Llama                      Touvron et al. 2023, https://arxiv.org/abs/2302.13971
    RoPE                       Su et al. 2021, https://arxiv.org/abs/2104.09864
    SwiGLU                     Shazeer 2020, https://arxiv.org/abs/2002.05202
    grouped-query attention    Ainslie et al. 2023, https://arxiv.org/abs/2305.13245
    Probabilistic Transformer  Wu & Tu 2023, https://arxiv.org/abs/2311.15211 (the origin of Methods 1 to 5)
    W2-RoPE                    ytfh44, https://github.com/ytfh44/W2Attn (overlap: its code at commit 48beca8)
    RealFormer                 He et al. 2020, https://arxiv.org/abs/2012.11747 (Method 5.1)
    L2 attention               Kim et al. 2020, https://arxiv.org/abs/2006.04710 (w2 without σ)

Shapes: B batch, T time, C = n_embd, H heads (G of keys and values), D = C/H, E the width of q̂ and k̂, K that of σ,
V vocabulary. Layers count from 0; m = l + 1 is the number of layers in a sum.
"""

import math
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

RESIDUALS = {  # method: (the branch whose outputs are summed, the weights of the sum)
    "standard": (None, None),
    "m1": ("mlp", "one"),
    "m2": ("attention", "one"),
    "m3.1": ("mlp", "mean"),
    "m3.2": ("mlp", "learned"),
    "m4.1": ("attention", "mean"),
    "m4.2": ("attention", "learned"),
}


@dataclass
class GPTConfig:
    """The shape and the method of a model. Raises a ConfigError for a value that cannot work."""

    block_size: int = 1024  # the longest context, in tokens
    vocab_size: int = 50304  # GPT-2's 50257 rounded up to a multiple of 64
    n_layer: int = 12
    n_head: int = 12
    n_kv_head: int = 0  # 0: n_head; fewer: grouped-query attention
    n_embd: int = 768
    n_inner: int = 0  # width of the MLP; 0: 8/3 n_embd, rounded up to a multiple of 64
    dropout: float = 0.0
    bias: bool = False  # biases in q_proj, k_proj, v_proj, o_proj and the MLP
    attention: str = "standard"
    sigma: str = "scalar"  # w2: the form of σ
    qk_scale: str = "5.1"  # summed_qk: which of Method 5's scales
    residual: str = "standard"
    keep_input: bool = False  # m1 to m4.2: add the sum to the usual residual, which it otherwise replaces
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5
    tie_weights: bool = False  # one matrix for the embedding and the head

    def __post_init__(self):
        for field, choices in CHOICES.items():
            self.check(field, getattr(self, field) in choices, "one of " + ", ".join(map(repr, choices)))
        for field in fields(self):
            accepted = {int: Integral, float: Real}.get(field.type, field.type)  # NumPy's numbers, too, and 0 for 0.0
            self.check(field.name, isinstance(getattr(self, field.name), accepted), f"of type {field.type.__name__}")
        for field in ("block_size", "vocab_size", "n_layer", "n_head", "n_embd", "rope_theta"):
            self.check(field, getattr(self, field) >= 1, "at least 1")
        for field in ("n_kv_head", "n_inner", "norm_eps", "dropout"):
            self.check(field, getattr(self, field) >= 0, "at least 0")
        self.check("dropout", self.dropout < 1, "below 1")
        self.check("n_head", self.n_embd % self.n_head == 0, f"a divisor of n_embd = {self.n_embd}")
        self.check("n_head", self.head_dim % 2 == 0, f"such that n_embd / n_head is even; n_embd = {self.n_embd}")
        self.check("n_kv_head", self.n_head % self.kv_heads == 0, f"a divisor of n_head = {self.n_head}")

    def check(self, field, good, needed):
        if not good:
            raise ConfigError(f"{field} = {getattr(self, field)!r} is invalid: it must be {needed}")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head

    @property
    def kv_heads(self):
        return self.n_kv_head or self.n_head

    @property
    def mlp_width(self):
        return self.n_inner or 64 * math.ceil(8 * self.n_embd / (3 * 64))

    def summed_branch(self, layer):
        """Return the branch whose outputs this layer sums: "attention", "mlp" or None."""
        return RESIDUALS[self.residual][0] if layer > 0 else None


class ConfigError(ValueError):
    """The message names the field, the value, and what would work."""


# -----------------------------------------------------------------------------
# Attention: each kind makes its own score vectors; the rest is shared


class Attention(nn.Module):
    """softmax(q kᵀ/√D) v: the standard kind, and the base of the others.

    A layer calls project and score_vectors once. Later layers call values and forward again, on their own inputs.
    `normed` is the input (B, T, C) after the layer's norm.
    """

    reads_earlier = False  # whether score_vectors reads what earlier layers keep

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.H, self.G, self.D = config.n_head, config.kv_heads, config.head_dim
        self.q_proj, self.k_proj = self.query_and_key(config, layer, self.D, config.bias)
        self.v_proj = linear(config.n_embd, self.G * self.D, config.bias)
        self.o_proj = linear(self.H * self.D, config.n_embd, config.bias, terms=2 * config.n_layer)
        self.dropout = nn.Dropout(config.dropout)

    def query_and_key(self, config, layer, width, bias=False):
        """Return two Linears, to `width` numbers for each head of queries, and of keys."""
        q, k = (linear(config.n_embd, heads * width, bias) for heads in (self.H, self.G))
        # Without an identity path, averaging in layer after layer would make all tokens alike. With W_q = W_k a token
        # attends mostly to itself at first, which Methods 2 and 4 need to learn.
        if config.summed_branch(layer) == "attention" and not config.keep_input:
            heads = k.weight.detach().unflatten(0, (self.G, -1))
            q.weight.data = heads.repeat_interleave(self.H // self.G, dim=0).flatten(0, 1)
        return q, k

    def project(self, normed, rope):
        """Return q (B, H, T, D), k and v (B, G, T, D); q and k are rotated."""
        q = rearrange(self.q_proj(normed), "B T (H D) -> B H T D", D=self.D)
        k = rearrange(self.k_proj(normed), "B T (G D) -> B G T D", D=self.D)
        return apply_rope(q, rope), apply_rope(k, rope), self.values(normed)

    def values(self, normed):
        """Return v (B, G, T, D)."""
        return rearrange(self.v_proj(normed), "B T (G D) -> B G T D", D=self.D)

    def score_vectors(self, q, k, normed, earlier):
        """Return q̂ (B, H, T, E) and k̂ (B, G, T, E). Each vector depends on its own token only, or the future leaks.

        q, k and normed are this layer's. With reads_earlier, `earlier` has a Kept (below) from each layer before it.
        """
        return q * self.D**-0.5, k

    def mix_values(self, q_hat, k_hat, v):
        """Return softmax(q̂ k̂ᵀ) v, (B, H, T, D). k̂ and v hold every token read; q̂ holds them all, or only the last."""
        return causal_attention(q_hat, k_hat, v, self.dropout.p if self.training else 0.0)

    def forward(self, q_hat, k_hat, v):
        """Return softmax(q̂ k̂ᵀ) v W_O, (B, T, C)."""
        y = self.mix_values(q_hat, k_hat, v)
        return self.dropout(self.o_proj(rearrange(y, "B H T D -> B T (H D)")))


class W2Attention(Attention):
    """Minus the squared Wasserstein-2 distance of Gaussians N(μ, diag(σ²)) instead of q·k.

    score = -(‖Rμ_q - Rμ_k‖² + ‖σ_q - σ_k‖²)/τ. R is RoPE, which rotates the means only. Written out,
    score = (2/τ)(μ_q·μ_k + σ_q·σ_k - (‖μ_k‖² + ‖σ_k‖²)/2) - (‖μ_q‖² + ‖σ_q‖²)/τ, and softmax cancels the last term.
    Per token and head, σ is D numbers (diagonal), one that stands for D equal ones (scalar), or absent (none).
    Without it this is L2 attention, but with separate matrices for q and k and a learned τ instead of √D.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.K = {"scalar": 1, "diagonal": self.D, "none": 0}[config.sigma]
        if self.K:
            self.sigma_q, self.sigma_k = self.query_and_key(config, layer, self.K)
        self.tau_shift = nn.Parameter(torch.zeros(self.H))

    @property
    def log_tau(self):
        """Return log τ (H,): τ = 2√D · exp(0.1 tau_shift), so that q·k is scaled by 1/√D at first."""
        # The 0.1 slows τ down tenfold. At the full rate, it may grow, and flatten attention, before W2 learns.
        return math.log(2 * self.D**0.5) + 0.1 * self.tau_shift

    def score_vectors(self, q, k, normed, earlier):
        if self.K:  # q and k are the means
            q = torch.cat((q, self.sigma_columns(self.sigma_q(normed)).type_as(q)), dim=-1)
            k = torch.cat((k, self.sigma_columns(self.sigma_k(normed)).type_as(k)), dim=-1)
        norm = norm_columns(k)  # (‖μ_k‖² + ‖σ_k‖²)/64 in k̂, where q̂ has -64/2
        half_tau = ((self.log_tau.exp() + 1e-6) / 2).view(-1, 1, 1).type_as(q)  # 1e-6 as in W2Attn
        return F.pad(q, (0, norm.size(-1)), value=-32) / half_tau, torch.cat((k, norm), dim=-1)

    def sigma_columns(self, numbers):
        """Return √(D/K) (σ - log 2), (B, H, T, K): distances are those of σ, but numbers near 0 round less."""
        sigma = F.softplus(numbers.to(at_least_float32(numbers))) - math.log(2)
        return rearrange(sigma * (self.D / self.K) ** 0.5, "B T (H K) -> B H T K", K=self.K)


class W2OverlapAttention(Attention):
    """How much two Gaussians overlap, instead of q·k. Each has one σ, the mean of D numbers, as in W2Attn's code.

    score = -(‖Rμ_q - Rμ_k‖² / (σ_q + σ_k) + D log(σ_q + σ_k)) / 2: the log of their overlap, plus a constant, if σ is
    read as a variance. Only the distance of the means factors into vectors, so the weights are T x T.
    """

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.sigma_q, self.sigma_k = self.query_and_key(config, layer, self.D)

    def score_vectors(self, q, k, normed, earlier):
        sigma_q, sigma_k = self.sigma(self.sigma_q(normed)), self.sigma(self.sigma_k(normed))
        # The product of all columns but the last is ‖μ_q - μ_k‖². It takes float32 (on a GPU, train.py makes it TF32),
        # also under autocast: the small distances, which matter most, are differences of large numbers.
        q_hat = torch.cat((-2 * q, squared_norm(q), torch.ones_like(sigma_q), sigma_q), dim=-1)
        k_hat = torch.cat((k, torch.ones_like(sigma_k), squared_norm(k), sigma_k), dim=-1)
        return q_hat, k_hat

    def sigma(self, numbers):
        """Return one σ (B, H, T, 1), at least in float32, of each D of the numbers (B, T, H D)."""
        numbers = rearrange(numbers, "B T (H D) -> B H T D", D=self.D).to(at_least_float32(numbers))
        return F.softplus(numbers).mean(dim=-1, keepdim=True) + 1e-4

    def mix_values(self, q_hat, k_hat, v):
        k_hat, v = (heads.repeat_interleave(self.H // self.G, dim=1) for heads in (k_hat, v))
        (mu_q, sigma_q), (mu_k, sigma_k) = (vectors.tensor_split((-1,), dim=-1) for vectors in (q_hat, k_hat))
        with torch.autocast(v.device.type, enabled=False):
            distance = mu_q @ mu_k.mT
        inverse = (sigma_q + sigma_k.mT).reciprocal()
        # few passes over T x T numbers: log(1/(σ_q + σ_k)) - ‖μ_q - μ_k‖²/(σ_q + σ_k)/D, and D/2 times that
        scores = torch.addcmul(inverse.log(), distance, inverse, value=-1 / self.D)
        return weigh(scores, v, self.dropout.p if self.training else 0.0, scale=self.D / 2)


class SummedQKAttention(Attention):
    """softmax(Σ_i s_i q_i k_iᵀ) v over the layers i = 0..l, with 1/s_i from DIVISORS. 5.1 has RealFormer's scores."""

    reads_earlier = True

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__(config, layer)
        self.qk_scale, self.m = config.qk_scale, layer + 1
        # 5.4 starts equal to 5.3; 5.5 to 5.7 start equal to 5.1
        if self.qk_scale == "5.4":
            self.a, self.b = nn.Parameter(torch.tensor([0.5])), nn.Parameter(torch.tensor([1.0]))
        if self.qk_scale in ("5.5", "5.6"):
            self.log_a = nn.Parameter(torch.zeros(self.m))
        if self.qk_scale == "5.6":
            self.b = nn.Parameter(torch.full((self.m,), 0.5))
        if self.qk_scale == "5.7":
            self.log_a = nn.Parameter(torch.full((self.m,), math.log(self.D) / 2))

    def score_vectors(self, q, k, normed, earlier):
        queries = torch.stack([*(layer.q for layer in earlier), q], dim=-2)  # (B, H, T, m, D)
        keys = torch.cat([*(layer.k for layer in earlier), k], dim=-1)
        divisors = DIVISORS[self.qk_scale](self, self.D, self.m)
        return (queries / divisors).flatten(-2).type_as(q), keys


# Method 5: what the scores of the layers 0..l are divided by, as one number or (m, 1), from the learned parameters p,
# d = D and m. a_i = exp(log_a_i) > 0; in the authors' later 5.6 and 5.7, a_i may change sign.
DIVISORS = {
    "5.1": lambda p, d, m: d**0.5,
    "5.2": lambda p, d, m: d**0.5 * m**0.5,
    "5.3": lambda p, d, m: d**0.5 * m,
    "5.4": lambda p, d, m: d**p.a * m**p.b,
    "5.5": lambda p, d, m: p.log_a.exp()[:, None] * d**0.5,
    "5.6": lambda p, d, m: p.log_a.exp()[:, None] * d ** p.b[:, None],
    "5.7": lambda p, d, m: p.log_a.exp()[:, None],
}
ATTENTIONS = {
    "standard": Attention,
    "w2": W2Attention,
    "w2_overlap": W2OverlapAttention,
    "summed_qk": SummedQKAttention,
}
CHOICES = {  # of a GPTConfig
    "attention": tuple(ATTENTIONS),
    "sigma": ("scalar", "diagonal", "none"),
    "qk_scale": tuple(DIVISORS),
    "residual": tuple(RESIDUALS),
}

# -----------------------------------------------------------------------------
# The block, and the residual methods


class MLP(nn.Module):
    """SwiGLU: W_down (silu(W_gate x) ⊙ W_up x)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.gate_proj = linear(config.n_embd, config.mlp_width, config.bias)
        self.up_proj = linear(config.n_embd, config.mlp_width, config.bias)
        self.down_proj = linear(config.mlp_width, config.n_embd, config.bias, terms=2 * config.n_layer)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class Kept(NamedTuple):
    """A layer i that has run, and what it keeps of that run, so that later layers can rerun it on another input."""

    block: nn.Module
    q: torch.Tensor  # rotated, of the new tokens, for summed_qk
    k: torch.Tensor
    q_hat: torch.Tensor  # its attention weights are those of q̂ and k̂
    k_hat: torch.Tensor  # of all tokens, cached ones included

    def attn(self, x, cache, name):
        """Return attn_i(x), with the attention weights of the layer's own run. The cache keeps its values by `name`."""
        v = self.block.attn.values(self.block.attn_norm(x))
        if cache is not None:
            v = cache.append(name, v)
        return self.block.attn(self.q_hat, self.k_hat, v)

    def mlp(self, h):
        """Return mlp_i(h)."""
        return self.block.mlp(self.block.mlp_norm(h))


class Block(nn.Module):
    """A layer: attention, then MLP. Under Methods 1 to 4 it also reruns the earlier layers on its own input."""

    def __init__(self, config: GPTConfig, layer: int):
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.attn = ATTENTIONS[config.attention](config, layer)
        self.mlp_norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.mlp = MLP(config)

        self.layer, self.keep_input = layer, config.keep_input
        branch, self.weighting = RESIDUALS[config.residual]
        self.keeps = branch is not None or self.attn.reads_earlier  # whether later layers need this one's Kept
        self.summed = config.summed_branch(layer)
        if self.summed and self.weighting == "learned":
            self.mix = nn.Parameter(torch.zeros(layer + 1))

    def forward(self, x, rope, earlier=(), cache=None):
        """Return x' (B, T, C) for x (B, T, C), and a Kept, or None if no later layer needs it. `earlier` has theirs."""
        l = len(earlier)
        if self.keeps and l != self.layer:
            raise ValueError(f"layer {self.layer} needs what each layer before it has kept; it got {l} of them")
        normed = self.attn_norm(x)
        q, k, v = self.attn.project(normed, rope)
        q_hat, k_hat = self.attn.score_vectors(q, k, normed, earlier)
        if cache is not None:
            k_hat, v = cache.append((l, "keys"), k_hat), cache.append((l, l), v)
        own = Kept(self, q, k, q_hat, k_hat)
        attn = self.attn(q_hat, k_hat, v)  # attn_l(x)

        if self.summed == "attention":  # h = Σ_i w_i attn_i(x)
            reruns = [layer.attn(x, cache, (l, i)) for i, layer in enumerate(earlier)]
            h = self.weighted_sum([*reruns, attn], residual=x)
        else:
            h = x + attn
        if self.summed == "mlp":  # x' = Σ_i w_i mlp_i(x + attn_i(x))
            reruns = [layer.mlp(x + layer.attn(x, cache, (l, i))) for i, layer in enumerate(earlier)]
            out = self.weighted_sum([*reruns, own.mlp(h)], residual=h)
        else:
            out = h + own.mlp(h)
        return out, own if self.keeps else None

    def weighted_sum(self, outputs, residual):
        """Return Σ_i w_i outputs_i, which replaces the residual or, with keep_input, is added to it."""
        total = residual if self.keep_input else torch.zeros_like(residual)  # in its type, also under autocast
        for w, output in zip(self.weights(), outputs, strict=True):
            total = total + w * output
        return total

    def weights(self):
        """Return w_i of the layers 0..l."""
        if self.weighting == "learned":
            return self.mix.softmax(dim=0).unbind()
        m = self.layer + 1
        return [{"one": 1.0, "mean": 1 / m}[self.weighting]] * m


# -----------------------------------------------------------------------------
# The model


class GPT(nn.Module):
    """A decoder that runs in nanoGPT's unmodified train.py and sample.py; it has no from_pretrained."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.flops = None  # per token, once they are counted
        self.embed = nn.Embedding(config.vocab_size, config.n_embd)  # starts at a standard deviation of 1, unless tied
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layer))
        self.norm = nn.RMSNorm(config.n_embd, eps=config.norm_eps)
        self.head = linear(config.n_embd, config.vocab_size)
        self.tie_weights()
        self.register_load_state_dict_post_hook(GPT.tie_weights)  # with assign=True, loading gives each its own

    def tie_weights(self, incompatible_keys=None):
        """Make the embedding and the head one matrix, if the config says so."""
        if self.config.tie_weights:
            self.embed.weight = self.head.weight

    def features(self, idx, cache=None):
        """Return the final hidden states (B, T, C) of idx (B, T): a whole context, or the one token after `cache`'s."""
        start = 0 if cache is None else cache.length
        stop = start + idx.size(1)
        if not start < stop <= self.config.block_size:
            raise ValueError(f"the context has {stop} tokens; it must be 1 to block_size = {self.config.block_size}")
        x = self.embed(idx)
        rope = rope_table(start, stop, self.config.head_dim, self.config.rope_theta, x)
        earlier = ()
        for block in self.blocks:
            x, kept = block(x, rope, earlier, cache)
            earlier += (kept,)
        if cache is not None:
            cache.length = stop
        return self.norm(x)

    def forward(self, idx, targets=None):
        """Return logits (B, T, V) and, with targets (B, T), their mean loss in nats; targets of -1 are ignored."""
        if targets is not None and targets.shape != idx.shape:
            raise ValueError(f"targets are {tuple(targets.shape)}; they must be {tuple(idx.shape)}, as idx is")
        logits = self.head(self.features(idx))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    @torch.no_grad()
    def generate(self, idx, max_new_tokens, temperature=1.0, top_k=None, generator=None, vocab_size=None, stop=None):
        """Return idx (B, T) continued by max_new_tokens, or fewer if every row has produced the token `stop` before.

        temperature 0 takes the likeliest token; top_k draws from the k likeliest ones. Only ids below vocab_size are
        drawn: give the tokenizer's if the model's was rounded up. Whenever the context is full, its older half is
        dropped and the newer half read again.
        """
        if not temperature >= 0:
            raise ValueError(f"temperature = {temperature} is invalid: it must be at least 0")
        block_size, prompt = self.config.block_size, idx.size(1)
        room = min(block_size, prompt + max_new_tokens)
        unread, cache = idx[:, -block_size:], KVCache(room)  # the context: what the cache holds, then `unread`
        for _ in range(max_new_tokens):
            logits = self.head(self.features(unread, cache)[:, -1])[:, :vocab_size].float()
            if top_k:
                least = logits.topk(min(top_k, logits.size(-1))).values[:, -1:]
                logits = logits.masked_fill(logits < least, -math.inf)
            if temperature < 1e-6:
                token = logits.argmax(dim=-1, keepdim=True)
            else:
                token = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
            idx = torch.cat((idx, token), dim=1)
            if stop is not None and (idx[:, prompt:] == stop).any(dim=1).all():
                break
            unread = token
            if cache.length == block_size:
                unread, cache = idx[:, -(block_size // 2 + 1) :], KVCache(room)
        return idx

    def configure_optimizers(self, weight_decay, learning_rate, betas, device_type):
        """Return AdamW. Only matrices decay, the parameters of at least two dimensions."""
        decayed = [p for p in self.parameters() if p.dim() >= 2]
        others = [p for p in self.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, learning_rate, betas=betas, fused=device_type in ("cuda", "cpu", "mps"))

    def get_num_params(self):
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self):
        """Return the operations of a forward and backward pass, per token of a full context; not the optimizer's."""
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils.flop_counter import FlopCounterMode

        # PyTorch counts them, on tensors without data. Unfused attention counts in full, as is customary, although a
        # causal kernel does half of it. A backward pass takes twice as many operations as a forward pass.
        if self.flops is None:
            counter, T = FlopCounterMode(display=False), self.config.block_size
            with FakeTensorMode(), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
                type(self)(self.config)(torch.zeros(1, T, dtype=torch.long))
            self.flops = 3 * counter.get_total_flops() / T
        return self.flops

    def estimate_mfu(self, fwdbwd_per_iter, dt):
        """Return the MFU of fwdbwd_per_iter contexts in dt seconds on an A100, which nanoGPT's train.py shows."""
        return self.flops_per_token() * self.config.block_size * fwdbwd_per_iter / dt / 312e12

    def crop_block_size(self, block_size):
        if not 1 <= block_size <= self.config.block_size:
            raise ValueError(f"block_size = {block_size} is invalid: it must be 1 to {self.config.block_size}")
        self.config.block_size, self.flops = block_size, None


# -----------------------------------------------------------------------------
# Functions used above


def causal_attention(q_hat, k_hat, v, dropout=0.0):
    """Return softmax(q̂ k̂ᵀ) v, (B, H, T, D), causal by position; a single query is the last position."""
    q_hat, k_hat = q_hat.to(v.dtype), k_hat.to(v.dtype)
    T, E, D = q_hat.size(2), q_hat.size(3), v.size(3)
    if T > 1 and k_hat.size(2) != T:
        raise ValueError(f"{T} queries for {k_hat.size(2)} keys: after the first pass, give one query at a time")

    # Plain products keep T x T weights. They are faster for one query that is wider than v and, in 16 bits, for vectors
    # too wide for a GPU's fast kernels, or for short contexts on a CPU.
    if (T == 1 and E > D) or (is_half(v) and (E > 256 and T <= 2048 or v.is_cpu and T <= 512)):
        heads = q_hat.reshape(*k_hat.shape[:2], -1, E)  # those of a group are rows of one product
        return weigh((heads @ k_hat.mT).view(*q_hat.shape[:3], -1), v, dropout)

    # PyTorch's fused kernels keep none. For wider vectors, and in float32, a GPU has only one, which takes no grouped
    # heads. All others need v as wide as q̂ and k̂ (unless they are switched off, as to count operations).
    if v.is_cuda and (E > 256 or not is_half(v)):
        k_hat, v = (heads.repeat_interleave(q_hat.size(1) // heads.size(1), dim=1) for heads in (k_hat, v))
    elif E > D and (torch.compiler.is_compiling() or torch.backends.cuda.flash_sdp_enabled()):
        v = F.pad(v, (0, E - D))
    # where lengths vary (torch.export), T > 1 is a symbol, but PyTorch's function takes only bools
    options = {"is_causal": True if T > 1 else False, "enable_gqa": True if q_hat.size(1) > k_hat.size(1) else False}
    return F.scaled_dot_product_attention(q_hat, k_hat, v, dropout_p=dropout, scale=1.0, **options)[..., :D]


def weigh(scores, v, dropout, scale=1.0):
    """Return softmax(scale * scores) v, (B, H, T, D), causal by position, for scores (B, H, T, tokens so far)."""
    B, H, T, tokens = scores.shape
    if T == 1:
        scores = scale * scores
    else:
        mask = scores.new_full((T, tokens), -math.inf).triu(tokens - T + 1)
        scores = torch.add(mask, scores, alpha=scale)  # mask + scale * scores, in one pass
    weights = F.dropout(scores.softmax(dim=-1), dropout).type_as(v)
    return (weights.view(B, v.size(1), -1, tokens) @ v).view(B, H, T, -1)  # the heads of a group are rows


def linear(n_in, n_out, bias=False, terms=1):
    """Return a Linear whose weights start with a standard deviation of 1/√(n_in · terms), and its biases at 0.

    So a sum of `terms` outputs is as large as the inputs.
    """
    made = nn.Linear(n_in, n_out, bias)
    nn.init.normal_(made.weight, std=(n_in * terms) ** -0.5)
    if bias:
        nn.init.zeros_(made.bias)
    return made


def at_least_float32(x):
    return torch.promote_types(x.dtype, torch.float32)  # or a model's float64


def is_half(x):
    return x.dtype in (torch.bfloat16, torch.float16)


def rope_table(start, stop, head_dim, theta, like):
    """Return cos and sin of the angles position · theta^(-2j/D), j < D/2, for start..stop-1, each (T, D).

    The first half of sin is negated, so that apply_rope can swap halves by a roll.
    """
    dtype = at_least_float32(like)
    frequency = theta ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=dtype) / head_dim)
    angle = torch.outer(torch.arange(start, stop, device=like.device, dtype=dtype), frequency)
    return torch.cat((angle.cos(), angle.cos()), dim=-1), torch.cat((-angle.sin(), angle.sin()), dim=-1)


def apply_rope(x, rope):
    """Rotate x (B, H, T, D) by its positions' angles: halves (a, b) become (a cos - b sin, b cos + a sin)."""
    cos, sin = (table.type_as(x) for table in rope)
    return torch.addcmul(x * cos, x.roll(x.size(-1) // 2, dims=-1), sin)


def squared_norm(x):
    return x.to(at_least_float32(x)).square().sum(dim=-1, keepdim=True)


def norm_columns(k):
    """Return ‖k‖²/64 as columns to append to k: one, or in 16 bits, which would round it too much, two that sum to it.

    Divided, it fits into a float16 up to a root mean square of 256 (at 64 dimensions).
    """
    columns = norm = squared_norm(k) / 64
    if is_half(k):  # the first 8 bits, which bfloat16 holds exactly, and the rest, which has the gradient
        # by arithmetic, since compilers drop a cast to bfloat16 and back
        step = torch.exp2(norm.detach().clamp_min(1e-30).log2().floor() - 7)
        coarse = (norm.detach() / step).trunc() * step
        columns = torch.cat((coarse, norm - coarse), dim=-1)
    if k.is_cuda:  # zeros change nothing, but a GPU's fused kernels need multiples of 8
        columns = F.pad(columns, (0, -(k.size(-1) + columns.size(-1)) % 8))
    return columns.type_as(k)


class KVCache:
    """The keys k̂ of each layer, and the values of each run of a layer, for at most `size` tokens of each sequence."""

    def __init__(self, size):
        self.size, self.length = size, 0  # length: tokens that all layers have read
        self.tensors, self.filled = {}, {}  # filled: tokens that each tensor holds

    def append(self, name, new):
        """Append the new tokens' keys (B, G, T, E) or values (B, G, T, D), and return those of all tokens."""
        if name not in self.tensors:
            self.tensors[name], self.filled[name] = new.new_empty(*new.shape[:2], self.size, new.size(3)), 0
        tensor, end = self.tensors[name], self.length + new.size(2)
        if self.filled[name] != self.length:
            found = f"{self.filled[name]} tokens of {name} instead of {self.length}: "
            raise ValueError(f"the cache has {found}an earlier pass failed, or two layers use this name")
        if end > self.size or len(new) != len(tensor):
            room = f"{len(tensor)} sequences of {self.size} tokens"
            raise ValueError(f"{len(new)} sequences of {end} tokens do not fit a cache for {room}")
        tensor[:, :, self.length : end] = new
        self.filled[name] = end
        return tensor[:, :, :end]
