"""
Every entry of model.py's tables, and what somebody adds to them by the steps of tests/README.md, keeps all that is
promised of a kind of attention and of a residual method: here at five layers, with grouped heads.
"""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

import model
import reference
from config.runtime.maps import look_inside
from model import GPT, Attention, GPTConfig
from reference import KINDS, causal_softmax, perturb, standard_scores, uncached_greedy
from test_model import Shapes, counted_flops, rounding_error

T = 13


def hold(**choice):
    """Every promise, for one kind and method."""
    shape = dict(block_size=T, vocab_size=19, n_layer=5, n_head=4, n_kv_head=2, n_embd=32, n_inner=24)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # under which what torch.empty gives is not a number
    gpt = GPT(GPTConfig(**shape, **choice))
    torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in gpt.parameters()), "a parameter has no initial value"
    gpt = perturb(gpt.double()).eval()
    idx = torch.randint(19, (2, T), generator=torch.Generator().manual_seed(1))
    changed = torch.cat((idx[:, :6], (idx[:, 6:] + 1) % 19), dim=1)

    logits, loss = gpt(idx, idx.roll(1))
    loss.backward()
    for name, p in gpt.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), f"{name} has no gradient, or no finite one"
    with torch.no_grad():
        assert torch.equal(gpt(changed)[0][:, :6], logits[:, :6]), "the future leaks"
        assert (logits - reference.reference_logits(gpt, idx)).abs().max() < 1e-9, "not its float64 form"
        short = idx[:, :3]
        assert torch.equal(gpt.generate(short, 12, temperature=0), uncached_greedy(gpt, short, 12)), "the cache differs"

    gpt = gpt.float()
    with Shapes(T) as shapes:
        gpt(idx, idx.roll(1))[1].backward()
    assert not shapes.found or gpt.config.attention in reference.T_BY_T, "a T x T tensor"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rough, moved = gpt(idx)[0], gpt(changed)[0]
    assert torch.equal(rough[:, :6], moved[:, :6]), "the future leaks in bfloat16"
    assert (rough.double() - logits).norm() < 5 * rounding_error(gpt, idx), "bfloat16 is far off"


# every kind with one method, and every method with standard attention; tests/test_model.py has all of them together
PAIRS = [
    (kind, residual)
    for kind in KINDS
    for residual in model.RESIDUALS
    if residual == "m1" or KINDS[kind] == {"attention": "standard"}
]


@pytest.mark.parametrize("kind, residual", PAIRS)
def test_every_entry_keeps_every_promise(kind, residual):
    hold(**KINDS[kind], residual=residual)


@pytest.mark.parametrize("residual", [name for name in model.RESIDUALS if name != "standard"])
def test_every_method_does_with_its_input_kept(residual):
    hold(residual=residual, keep_input=True)


def test_every_entry_has_a_float64_form():
    assert set(model.ATTENTIONS) == set(reference.WEIGHTS)
    assert set(model.RESIDUALS) == set(reference.BLOCKS)


@pytest.mark.parametrize("choice", [{}, dict(attention="w2", residual="m1"), dict(attention="summed_qk", residual="m4.2")])
def test_gradients_by_sample(choice):
    """torch.func's vmap over samples gives each one's own gradients."""
    gpt = GPT(GPTConfig(block_size=8, vocab_size=11, n_layer=3, n_head=2, n_embd=16, **choice))
    idx = torch.randint(11, (4, 8), generator=torch.Generator().manual_seed(0))
    weights = {name: p.detach() for name, p in gpt.named_parameters()}

    def loss(weights, sample):
        return torch.func.functional_call(gpt, weights, (sample[None], sample[None]))[1]

    found = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, idx)
    for i, sample in enumerate(idx):
        expected = torch.autograd.grad(gpt(sample[None], sample[None])[1], list(gpt.parameters()))
        for name, gradient in zip(weights, expected):
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-3, atol=1e-5)


# -- the steps of "Adding your own" --------------------------------------------------------------------------


class Tempered(Attention):
    """softmax(exp(t_h) q kᵀ/√d_k) V, with a learned t per head: step 1."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.t = nn.Parameter(torch.zeros(self.H, 1, 1))

    def score_vectors(self, x, rope, earlier):
        q, k, _ = super().score_vectors(x, rope, earlier)
        return q * self.t.exp().type_as(q), k, None


def weights_tempered(q, k, h, extras, **_):  # step 2
    return causal_softmax(torch.exp(extras["t"][h, 0, 0]) * standard_scores(q, k))


def weights_cosine(q, k, h, extras, **_):
    cosines = [[q_m @ k_n / (q_m.norm() * k_n.norm()) for k_n in k] for q_m in q]
    return causal_softmax(torch.exp(extras["log_scale"][h, 0, 0]) * torch.stack([torch.stack(row) for row in cosines]))


class ALiBi(Attention):
    """softmax(q kᵀ/√d_k - 2^-h (m - n)) V without RoPE: the position n of a key is its place among all so far."""

    def score_width(self):
        return self.D + 2

    def score_vectors(self, x, rope, earlier):
        q = rearrange(self.q_proj(x), "B T (H D) -> B H T D", D=self.D) * self.D**-0.5
        k = rearrange(self.k_proj(x), "B T (G D) -> B G T D", D=self.D)
        slope = 2.0 ** -torch.arange(1, self.H + 1, device=q.device, dtype=q.dtype).view(-1, 1, 1)
        return torch.cat((q, slope.expand(*q.shape[:-1], 2)), dim=-1), k, None

    def mix_values(self, q_hat, k_hat, v):
        n = torch.arange(k_hat.size(2), device=k_hat.device)
        n = torch.stack((n % 256, n - n % 256), dim=-1).type_as(k_hat)  # bfloat16 has whole numbers up to 256
        return super().mix_values(q_hat, torch.cat((k_hat, n.expand(*k_hat.shape[:2], -1, -1)), dim=-1), v)


def weights_alibi(unrotated, h, **_):
    scores = standard_scores(*unrotated)
    steps = [[-(m - n) / 2 ** (h + 1) for n in range(len(scores))] for m in range(len(scores))]
    return causal_softmax(scores + torch.tensor(steps, dtype=torch.float64))


class Sink(Tempered):
    """Weights exp(s_n) / (exp(t_h) + Σ_n exp(s_n)): a key before all others, of score t_h and value 0."""

    def score_width(self):
        return self.D + 1

    def score_vectors(self, x, rope, earlier):
        q, k = self.project(x, rope)
        t = self.t.expand(q.size(0), -1, q.size(2), -1).type_as(q)
        return torch.cat((q * self.D**-0.5, t), dim=-1), F.pad(k, (0, 1)), None

    def mix_values(self, q_hat, k_hat, v):
        sink = torch.zeros_like(k_hat[:, :, :1])
        sink[..., -1] = 1
        k_hat, v = torch.cat((sink, k_hat), dim=2), F.pad(v, (0, 0, 1, 0))
        if q_hat.size(2) == 1:
            return super().mix_values(q_hat, k_hat, v)
        return super().mix_values(F.pad(q_hat, (0, 0, 1, 0)), k_hat, v)[:, :, 1:]  # the sink sees itself alone

    def context_operations(self, T):
        return super().context_operations((T + 1) ** 2 / T)


def weights_sink(q, k, h, extras, **_):
    e = torch.exp(standard_scores(q, k)).tril()
    return e / (torch.exp(extras["t"][h, 0, 0]) + e.sum(dim=-1, keepdim=True))


class Differential(Tempered):
    """(softmax(q₁ k₁ᵀ/√(d_k/2)) - t_h softmax(q₂ k₂ᵀ/√(d_k/2))) V: even dimensions are of the one, odd of the other."""

    def score_vectors(self, x, rope, earlier):
        q, k = self.project(x, rope)
        return q * (self.D / 2) ** -0.5, k, None

    def mix_values(self, q_hat, k_hat, v):
        even = torch.arange(self.D, device=v.device) % 2 == 0  # zeros for the others keep the kernel's width
        first, second = (super(Differential, self).mix_values(q_hat * half, k_hat, v) for half in (even, ~even))
        return first - self.t.type_as(v) * second

    def context_operations(self, T):
        return 2 * super().context_operations(T)


def weights_differential(q, k, h, extras, **_):
    first, second = (causal_softmax(standard_scores(q[:, i::2], k[:, i::2])) for i in (0, 1))
    return first - extras["t"][h, 0, 0] * second


class Windowed(Attention):
    """Each token sees the latest four: a kind that holds T x T tensors, and says so in T_BY_T."""

    def mix_values(self, q_hat, k_hat, v):
        k_hat, v = (z.repeat_interleave(self.H // self.G, dim=1) for z in (k_hat, v))
        T, N = q_hat.size(2), k_hat.size(2)
        near = torch.ones(N, N, dtype=torch.bool).tril().triu(-3)[N - T :]
        return (q_hat @ k_hat.mT).masked_fill(~near, float("-inf")).softmax(dim=-1) @ v


def weights_windowed(q, k, **_):
    e = torch.exp(standard_scores(q, k)).tril().triu(-3)
    return e / e.sum(dim=-1, keepdim=True)


PAGE = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
names = dict(vars(model))
exec(re.search(r"```python\n(class CosineAttention.*?)```", PAGE, re.DOTALL)[1], names)  # as if it stood in model.py
KINDS_OF_OWN = {
    "tempered": (Tempered, weights_tempered),
    "cosine": (names["CosineAttention"], weights_cosine),
    "alibi": (ALiBi, weights_alibi),
    "sink": (Sink, weights_sink),
    "differential": (Differential, weights_differential),
    "windowed": (Windowed, weights_windowed),
}


def latest_two(l):
    """The layers summed by methods that recompute the two latest ones only: step 2 of a method."""
    return range(max(l - 2, 0), l + 1)


METHODS_OF_OWN = {
    name: (dataclasses.replace(like, sources=lambda l: range(max(l - 2, 0), l)), reference.BLOCKS[name])
    for name, like in model.RESIDUALS.items()
    if like
}


@pytest.fixture
def own(monkeypatch):
    for name, (kind, weights) in KINDS_OF_OWN.items():
        monkeypatch.setitem(model.ATTENTIONS, name, kind)
        monkeypatch.setitem(reference.WEIGHTS, name, weights)
    monkeypatch.setattr(reference, "T_BY_T", {"windowed"})
    for name, (method, (layer, weights, _)) in METHODS_OF_OWN.items():
        monkeypatch.setitem(model.RESIDUALS, f"latest {name}", method)
        monkeypatch.setitem(reference.BLOCKS, f"latest {name}", (layer, weights, latest_two))


@pytest.mark.parametrize("residual", ["m4.2", "latest m3.2"])  # which recompute attention only, and the MLP too
@pytest.mark.parametrize("kind", KINDS_OF_OWN)
def test_an_own_kind_keeps_every_promise(own, kind, residual):
    hold(attention=kind, residual=residual)


@pytest.mark.parametrize("name", METHODS_OF_OWN)
@pytest.mark.parametrize("kind, keep_input", [("w2-scalar", True), ("summed-5.5", False)])
def test_an_own_method_keeps_every_promise(own, kind, name, keep_input):
    hold(**KINDS[kind], residual=f"latest {name}", keep_input=keep_input)


@pytest.mark.parametrize("kind", KINDS_OF_OWN)
def test_own_weights_are_seen(own, kind):
    gpt = perturb(GPT(GPTConfig(T, 19, 3, 4, 2, n_embd=32, attention=kind, residual="m3.2")).double())
    idx, qk = torch.randint(19, (1, T), generator=torch.Generator().manual_seed(1)), []
    inputs = []  # of the layers' attention, normed
    for block in gpt.blocks:
        block.attn_norm.register_forward_hook(lambda module, arguments, normed: inputs.append(normed[0].detach()))
    state = {name: value.detach() for name, value in reference.get_state(gpt).items()}
    for l, (weights, normed) in enumerate(zip(look_inside(gpt, idx), inputs, strict=True)):
        expected = torch.stack(reference.attention_weights(gpt.config, state, l, normed, qk))
        torch.testing.assert_close(weights[0], expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", KINDS_OF_OWN)
def test_own_operations_are_counted(own, kind):
    gpt = GPT(GPTConfig(T, 19, 5, 4, 2, n_embd=32, attention=kind, residual="latest m1"))
    assert gpt.flops_per_token() == pytest.approx(3 * counted_flops(gpt, backward=False), rel=1e-9)


def test_an_own_vector_is_not_decayed(own):
    gpt = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=9, attention="tempered"))
    decayed = {id(p) for group in gpt.param_groups(0.1) for p in group["params"] if group["weight_decay"]}
    names = {name for name, p in gpt.named_parameters() if id(p) in decayed}
    assert all(name.endswith(("_proj.weight", "embed.weight", "head.weight")) for name in names) and len(names) == 16


class Leaking(Tempered):
    """Scores that see the mean of all tokens, later ones too."""

    def score_vectors(self, x, rope, earlier):
        return super().score_vectors(x + x.mean(dim=1, keepdim=True), rope, earlier)


class Forgetful(Tempered):
    """A parameter without an initial value."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.t = nn.Parameter(torch.empty(self.H, 1, 1))


@pytest.mark.parametrize("kind, named", [(Leaking, "the future leaks"), (Forgetful, "has no initial value")])
def test_a_mistake_is_found(own, monkeypatch, kind, named):
    monkeypatch.setitem(model.ATTENTIONS, "tempered", kind)
    with pytest.raises(AssertionError, match=named):
        hold(attention="tempered")
