"""Muon is an AdamW that updates its first group in another way: held to the explicit form and to PyTorch's."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import trainer
from config.runtime.muon import MuonAdamW
from conftest import TINY, Outputs

RATE, DECAY = 0.01, 0.5
SHAPES = [(8, 8), (24, 8), (8, 24)]


def matrices_and_gradients(steps=4):
    """Return matrices, and for each step their gradients, the same at each call."""
    rng = torch.Generator().manual_seed(0)
    matrices = [nn.Parameter(torch.randn(shape, generator=rng)) for shape in SHAPES]
    return matrices, [[torch.randn(shape, generator=rng) for shape in SHAPES] for _ in range(steps)]


def updated(kind, **options):
    """Return the matrices after a step for each list of gradients."""
    matrices, gradients = matrices_and_gradients()
    optimizer = kind(matrices, RATE, weight_decay=DECAY, **options)
    for step in gradients:
        for p, gradient in zip(matrices, step):
            p.grad = gradient.clone()
        optimizer.step()
    return [p.detach() for p in matrices]


def test_muon_is_the_explicit_one():
    blocks = nn.ModuleList(nn.Linear(columns, rows, bias=False) for rows, columns in SHAPES)
    matrices, gradients = matrices_and_gradients()
    for linear, p in zip(blocks, matrices):
        linear.weight = p
    model = nn.Module()
    model.blocks = blocks
    explicit = trainer.Optimizer(SimpleNamespace(optimizer="muon", weight_decay=DECAY), model)
    for step in gradients:
        explicit.step(step, RATE)
    for p, linear in zip(updated(MuonAdamW), blocks):
        torch.testing.assert_close(p, linear.weight.detach(), rtol=1e-5, atol=1e-5)


def test_muon_is_pytorchs_but_for_its_bfloat16():
    """The rounding is a fiftieth of the way from the start at most."""
    theirs = updated(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    for p, q, start in zip(updated(MuonAdamW), theirs, matrices_and_gradients()[0]):
        assert (p - q).norm() < 0.02 * (q - start).norm()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_nothing_computes_in_bfloat16_where_it_is_slow(repo, slow_bfloat16, optimizer):
    with Outputs() as seen:
        repo(f"train.py {TINY} --optimizer={optimizer} --residual=m1 --attention=w2")
        repo("sample.py --num_samples=1 --max_new_tokens=20")
    assert torch.float32 in seen.types
    assert torch.bfloat16 not in seen.types
