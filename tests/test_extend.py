"""
Every entry of model.py's tables, and what somebody adds to them by the steps of tests/README.md, keeps all that is
promised of a kind of attention and of a residual method: here at five layers, with grouped heads.
"""

import pytest
import torch
import torch.nn as nn

import model
import reference
from model import GPT, Attention, GPTConfig, Residual
from reference import KINDS, perturb, uncached_greedy
from test_model import Shapes

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
    assert not shapes.found, "a T x T tensor"
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        rough, moved = gpt(idx)[0], gpt(changed)[0]
    assert torch.equal(rough[:, :6], moved[:, :6]), "the future leaks in bfloat16"
    assert (rough.double() - logits).norm() < 0.3 * logits.norm(), "bfloat16 is far off"


@pytest.mark.parametrize("residual", model.RESIDUALS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_entry_keeps_every_promise(kind, residual):
    hold(**KINDS[kind], residual=residual)


@pytest.mark.parametrize("residual", [name for name in model.RESIDUALS if name != "standard"])
def test_every_method_does_with_its_input_kept(residual):
    hold(residual=residual, keep_input=True)


def test_every_entry_has_a_float64_form():
    assert set(model.ATTENTIONS) == set(reference.SCORES)
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


def scores_tempered(q, k, h, extras, **_):  # step 2
    return torch.exp(extras["t"][h, 0, 0]) * reference.standard_scores(q, k)


def latest_two(l, x, attn, mlp, w, keep_input):
    """x' = Σ_{i = l-1, l} mlp_i(x + attn_i(x))  [+ h]: step 2 of a method."""
    h = x + attn(l, x)
    out = h if keep_input else torch.zeros_like(h)
    return out + mlp(l - 1, x + attn(l - 1, x)) + mlp(l, h)


@pytest.fixture
def own(monkeypatch):
    monkeypatch.setitem(model.ATTENTIONS, "tempered", Tempered)
    monkeypatch.setitem(reference.SCORES, "tempered", scores_tempered)
    monkeypatch.setitem(model.RESIDUALS, "latest", Residual("mlp", sources=lambda l: range(max(l - 1, 0), l)))
    monkeypatch.setitem(reference.BLOCKS, "latest", (latest_two, reference.one))


@pytest.mark.parametrize("residual", ["latest", *model.RESIDUALS])
def test_an_own_kind_keeps_every_promise(own, residual):
    hold(attention="tempered", residual=residual)


@pytest.mark.parametrize("kind", KINDS)
def test_an_own_method_keeps_every_promise(own, kind):
    hold(**KINDS[kind], residual="latest")
    hold(**KINDS[kind], residual="latest", keep_input=True)


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
