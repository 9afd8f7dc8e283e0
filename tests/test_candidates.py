"""What may be faster on a GPU computes what model.py computes. (CUDA graphs: test_cuda.py.)"""

import sys

import pytest
import torch

from conftest import ROOT
from model import GPT, GPTConfig
from reference import KINDS, perturb, settings

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import candidates


def make(kind, method="standard", **changes):
    return perturb(GPT(GPTConfig(**settings(kind, method, **changes)))).double()


def tokens(T=12):
    return torch.randint(19, (2, T), generator=torch.Generator().manual_seed(0))


def logits_and_gradients(model):
    idx = tokens()
    logits, loss = model(idx, idx)
    return [logits, *torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)]


def assert_same(model, other):
    torch.testing.assert_close(logits_and_gradients(other), logits_and_gradients(model), rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", ["standard", "m1", "m4.2"])
@pytest.mark.parametrize("kind", KINDS)
def test_plain_products(monkeypatch, kind, method):
    monkeypatch.setattr(candidates, "ROWS", 5)  # two blocks of queries, and a shorter one
    model = make(kind, method, n_kv_head=2)
    expected, text = logits_and_gradients(model), model.generate(tokens(3), 6, temperature=0)
    with candidates.by_products():
        torch.testing.assert_close(logits_and_gradients(model), expected, rtol=1e-8, atol=1e-10)
        assert torch.equal(model.generate(tokens(3), 6, temperature=0), text)


@pytest.mark.parametrize("qk_scale", ["5.1", "5.2", "5.3", "5.4"])
def test_accumulated_scores(qk_scale):
    model, other = (make(f"summed-{qk_scale}", n_kv_head=2) for _ in range(2))
    assert_same(model, candidates.remake(other, candidates.AccumulatedQKAttention))


@pytest.mark.parametrize("bias", [False, True])
def test_joined_products(bias):
    model, other = (make("standard", n_kv_head=2, bias=bias) for _ in range(2))
    assert_same(model, candidates.remake(other, candidates.JoinedAttention, candidates.JoinedMLP))


def test_blocks_compiled_whole(monkeypatch):
    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="aot_eager", **options))
    model, other = (make("summed-5.2", n_layer=3) for _ in range(2))
    assert_same(model, candidates.compile_whole_blocks(other))


def test_dropout_of_plain_products(monkeypatch):
    torch.manual_seed(0)
    q, k, v = torch.zeros(1, 1, 64, 4), torch.zeros(1, 1, 64, 4), torch.ones(1, 1, 64, 400)
    dropped = candidates.attend_by_products(q, k, v, dropout=0.5)
    assert dropped.std() > 0.05 and dropped[0, 0, 32:].mean().item() == pytest.approx(1, abs=0.1)
