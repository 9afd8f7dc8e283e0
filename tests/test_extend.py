"""
Every entry of model.py's tables, and what somebody adds to them by the steps of tests/EXTENDING.md, keeps all that is
promised of a kind of attention, a residual method, a connection and a setting: here at four layers, with grouped heads.
"""

import dataclasses
import re
import shutil
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from einops import rearrange

import model
import reference
from conftest import ROOT, TINY, load
from model import GPT, Attention, GPTConfig
from reference import causal_softmax, columns, covering, each, perturb, standard_scores, uncached_greedy
from test_model import Shapes, counted_flops, over, rounding_error

T = 13


def hold(**choice):
    """Every promise, for one configuration."""
    shape = dict(block_size=T, vocab_size=19, n_layer=4, n_head=4, n_kv_head=2, n_embd=32, n_inner=24)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)  # under which what torch.empty gives is not a number
    gpt = GPT(GPTConfig(**{**shape, **choice}))
    torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in gpt.parameters()), "a parameter has no initial value"
    gpt = perturb(gpt.double()).eval()
    idx = torch.randint(19, (2, T), generator=torch.Generator().manual_seed(1))
    changed = torch.cat((idx[:, :6], (idx[:, 6:] + 1) % 19), dim=1)
    assert gpt.flops_per_token() == pytest.approx(3 * counted_flops(gpt, backward=False), rel=1e-9), "wrongly counted"

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


@over(each(columns()))  # tests/test_model.py has every pair of values
def test_every_entry_keeps_every_promise(row):
    hold(**row)


def test_every_entry_has_a_float64_form():
    assert set(model.ATTENTIONS) == set(reference.WEIGHTS)
    assert set(model.RESIDUALS) == set(reference.BLOCKS)
    assert set(model.CONNECTIONS) == set(reference.READS)


def test_every_field_is_varied():
    """... also one of somebody's own: a bool is found, and a number that no test varies is named."""

    @dataclasses.dataclass
    class Own(GPTConfig):
        peek: bool = False

    @dataclasses.dataclass
    class OwnNumber(GPTConfig):
        window: int = 0

    assert {"peek", "connection", "value_residual", "n_kv_head"} < columns(Own).keys()
    for rows in (each(columns(Own)), covering(columns(Own))):
        assert {row["peek"] for row in rows} == {False, True}
    with pytest.raises(ValueError, match="window is varied by no test"):
        columns(OwnNumber)


def test_every_two_values_meet():
    found = columns()
    pairs = [(a, b) for x in found for y in found if x < y for a in found[x] for b in found[y]]
    missed = [(a, b) for a, b in pairs if not any({**a, **b}.items() <= row.items() for row in reference.COVER)]
    assert len(pairs) > 500 and not missed


# -- the examples of tests/EXTENDING.md ----------------------------------------------------------------------

PAGE = (ROOT / "tests" / "EXTENDING.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r'```python\n# (\S+), below "(.*?)"\n(.*?)```', PAGE, re.DOTALL)


def apply(examples, folder):
    """Put each example below the line that it names: the only one that begins so."""
    for file, line, code in examples:
        lines = (folder / file).read_text(encoding="utf-8").splitlines(keepends=True)
        (place,) = [i for i, text in enumerate(lines) if text.startswith(line)]
        (folder / file).write_text("".join([*lines[: place + 1], code, *lines[place + 1 :]]), encoding="utf-8")


def python(folder, *command):
    done = subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_the_examples_keep_every_promise_and_train(repo):
    shutil.copytree(ROOT / "tests", repo.folder / "tests", ignore=shutil.ignore_patterns("__pycache__", "results"))
    apply(EXAMPLES, repo.folder)
    code, shown = python(repo.folder, "-m", "pytest", "-n0", "-rA", "tests/test_extend.py", "-k", "entry or field")
    assert code == 0, shown
    tried = [line for line in shown.splitlines() if line.startswith("PASSED") and "keeps_every_promise" in line]
    for name in ("tempered", "gated-channel", "gated-head", "latest2", "skip", "embed_norm"):
        assert any(f"-{name}" in line or f"[{name}" in line for line in tried), name
    own = "--attention=gated --gate=head --residual=latest2 --connection=skip --embed_norm --value_residual"
    code, shown = python(repo.folder, "train.py", *TINY.split(), *own.split(), "--out_dir=own")
    assert code == 0, shown
    assert load("own/ckpt.pt")["config"].items() >= dict(gate="head", residual="latest2", embed_norm=True).items()


# -- kinds with more of their own ----------------------------------------------------------------------------


class Tempered(Attention):
    """softmax(exp(t_h) q kᵀ/√d_k) V, with a learned t per head."""

    def __init__(self, config, layer):
        super().__init__(config, layer)
        self.t = nn.Parameter(torch.zeros(self.H, 1, 1))

    def score_vectors(self, x, rope, earlier):
        q, k, _ = super().score_vectors(x, rope, earlier)
        return q * self.t.exp().type_as(q), k, None


def weights_tempered(q, k, h, extras, **_):
    return causal_softmax(torch.exp(extras["t"][h, 0, 0]) * standard_scores(q, k))


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

    def operations(self, T, recomputed=False):
        return super().operations((T + 1) ** 2 / T, recomputed)


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

    def operations(self, T, recomputed=False):
        return super().operations(2 * T, recomputed)


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


KINDS_OF_OWN = {
    "tempered": (Tempered, weights_tempered),
    "alibi": (ALiBi, weights_alibi),
    "sink": (Sink, weights_sink),
    "differential": (Differential, weights_differential),
    "windowed": (Windowed, weights_windowed),
}


@pytest.fixture
def own(monkeypatch):
    for name, (kind, weights) in KINDS_OF_OWN.items():
        monkeypatch.setitem(model.ATTENTIONS, name, kind)
        monkeypatch.setitem(reference.WEIGHTS, name, weights)
    monkeypatch.setattr(reference, "T_BY_T", {"windowed"})
    layer, weights, _ = reference.BLOCKS["m3.2"]
    latest = dataclasses.replace(model.RESIDUALS["m3.2"], sources=lambda l: range(max(l - 2, 0), l))
    monkeypatch.setitem(model.RESIDUALS, "latest m3.2", latest)
    monkeypatch.setitem(reference.BLOCKS, "latest m3.2", (layer, weights, lambda l: range(max(l - 2, 0), l + 1)))


@pytest.mark.parametrize("residual", ["m4.2", "latest m3.2"])  # which recompute attention only, and the MLP too
@pytest.mark.parametrize("kind", KINDS_OF_OWN)
def test_an_own_kind_keeps_every_promise(own, kind, residual):
    hold(attention=kind, residual=residual, connection="attnres", value_residual=True)


class Summed(Attention):
    """softmax(q (k_0 + ... + k_l)ᵀ/√d_k) V: what it keeps for later layers is a tensor."""

    reads_earlier = True

    def score_vectors(self, x, rope, earlier):
        q, k = self.project(x, rope)
        k = k + earlier[-1].qk if earlier else k
        return q * self.D**-0.5, k, k


def test_what_a_kind_keeps_may_be_a_tensor(monkeypatch):
    monkeypatch.setitem(model.ATTENTIONS, "summed", Summed)
    gpt = perturb(GPT(GPTConfig(T, 19, 3, 4, 2, n_embd=32, attention="summed", residual="m1")).double())
    idx = torch.randint(19, (2, 5), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gpt.generate(idx, 8, temperature=0), uncached_greedy(gpt, idx, 8))


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
