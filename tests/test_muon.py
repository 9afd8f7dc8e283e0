"""Muon is torch.optim.Muon, in float32 where bfloat16 is slow: held to PyTorch's and to the explicit form."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim import Muon

import trainer
from config.runtime.muon import Float32Muon, make_muon
from conftest import TINY, Outputs

CPU, RATE, DECAY = torch.device("cpu"), 0.01, 0.5
SHAPES = [(8, 8), (24, 8), (8, 24)]


def matrices_and_gradients(steps=4):
    """Return matrices, and for each step their gradients, the same at each call."""
    rng = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]
    return matrices, [[torch.randn(shape, generator=rng) for shape in SHAPES] for _ in range(steps)]


def updated(optimizer, matrices, gradients):
    """Return the matrices after a step for each list of gradients."""
    for step in gradients:
        for p, gradient in zip(matrices, step):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in matrices]


def assert_near(found, expected):
    """The rounding to bfloat16 is a fiftieth of the way from the start at most."""
    starts, _ = matrices_and_gradients()
    for p, q, start in zip(found, expected, starts):
        distance = (p - q).norm()
        way = (q - start).norm()
        assert distance < 0.02 * way


@pytest.fixture
def fast_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True}, raising=False)


def test_muon_is_pytorchs_where_bfloat16_is_fast(fast_bfloat16):
    optimizer = make_muon(matrices_and_gradients()[0], RATE, DECAY, CPU)
    assert type(optimizer) is Muon
    assert optimizer.defaults["adjust_lr_fn"] == "match_rms_adamw"


def test_muon_is_the_explicit_one(slow_bfloat16):
    matrices, gradients = matrices_and_gradients()
    found = updated(make_muon(matrices, RATE, DECAY, CPU), matrices, gradients)

    blocks = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES)
    for linear, p in zip(blocks, matrices_and_gradients()[0]):
        linear.weight = p
    model = nn.Module()
    model.blocks = blocks
    explicit = trainer.Optimizer(SimpleNamespace(optimizer="muon", weight_decay=DECAY), model)
    for step in gradients:
        explicit.step(step, RATE)
    for p, linear in zip(found, blocks):
        torch.testing.assert_close(p, linear.weight.detach(), rtol=1e-5, atol=1e-5)


def test_float32_muon_is_pytorchs_but_for_rounding():
    results = []
    for kind in (Muon, Float32Muon):
        matrices, gradients = matrices_and_gradients()
        optimizer = kind(matrices, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
        results.append((updated(optimizer, matrices, gradients), optimizer.state_dict()))
    (expected, their_state), (found, state) = results
    assert_near(found, expected)
    assert state["param_groups"] == their_state["param_groups"]
    torch.testing.assert_close(state["state"], their_state["state"], rtol=0, atol=0)


def test_a_run_with_muon_may_move_to_a_machine_with_slow_bfloat16(slow_bfloat16):
    """Its first two steps are PyTorch's."""
    matrices, gradients = matrices_and_gradients()
    stayed = updated(make_muon(matrices, RATE, DECAY, CPU), matrices, gradients)

    matrices, gradients = matrices_and_gradients()
    theirs = Muon(matrices, RATE, DECAY, adjust_lr_fn="match_rms_adamw")
    updated(theirs, matrices, gradients[:2])
    ours = make_muon(matrices, RATE, DECAY, CPU)
    ours.load_state_dict(theirs.state_dict())
    moved = updated(ours, matrices, gradients[2:])
    assert_near(moved, stayed)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_computes_in_bfloat16_where_it_is_slow(repo, slow_bfloat16, optimizer):
    with Outputs() as seen:
        repo(f"train.py {TINY} --optimizer={optimizer} --residual=m1 --attention=w2")
        repo("sample.py --num_samples=1 --max_new_tokens=20")
    assert torch.float32 in seen.types
    assert torch.bfloat16 not in seen.types
