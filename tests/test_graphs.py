"""CUDA graphs, on a CPU: a stand-in leaves gradients where a graph does, in memory that its next replay overwrites."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from config import runtime
from conftest import TINY, load, log_of
from verify import build, tokens


class Replay(torch.autograd.Function):
    """The loss of a batch, whose backward pass returns the static gradients themselves."""

    @staticmethod
    def forward(ctx, loss_of, static, x, y, *parameters):
        with torch.enable_grad():
            loss = loss_of(x, y)
            ctx.gradients, ctx.static = torch.autograd.grad(loss, parameters), static
        return loss.detach()

    @staticmethod
    def backward(ctx, upstream):
        for memory, gradient in zip(ctx.static, ctx.gradients):
            memory.copy_(gradient * upstream)
        return None, None, None, None, *(memory.detach() for memory in ctx.static)  # as make_graphed_callables does


def stand_in(loss_of, sample, allow_unused_input):
    parameters = list(loss_of.parameters())
    static = [torch.zeros_like(p) for p in parameters]
    return lambda x, y: Replay.apply(loss_of, static, x, y, *parameters)


def graphs_on_a_cpu():
    """Let train.py, in the current folder, make graphs of steps on a CPU, too."""
    before, condition, after = Path("train.py").read_text().partition("elif graphs and cuda:")
    assert condition
    Path("train.py").write_text(f"{before}elif graphs:{after}")


@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_a_run_with_graphs_equals_one_without(repo, monkeypatch, accumulated):
    options = f"{TINY} --dropout=0.1 --dtype=float32 --gradient_accumulation_steps={accumulated}"
    repo(f"train.py config/m1_shakespeare.py {options} --out_dir=out/eager")
    graphs_on_a_cpu()
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", stand_in)
    assert "no CUDA graphs" not in repo(f"train.py config/m1_shakespeare.py {options} --out_dir=out/graphs")
    eager, graphs = (load(f"out/{name}/ckpt.pt")["model"] for name in ("eager", "graphs"))
    for name, weight in eager.items():
        torch.testing.assert_close(graphs[name], weight, msg=name)


def test_a_frozen_parameter_stays_as_it_is(monkeypatch):
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda loss_of, sample, allow_unused_input: loss_of)
    model = build(dtype=torch.float32)
    model.embed.weight.requires_grad_(False)
    idx = tokens(model, 2, 8)
    runtime.capture(runtime.Loss(model, compile=False), idx, idx)
    assert model.embed.weight.grad is None and model.head.weight.grad is not None


def test_a_model_that_cannot_be_captured_trains_without_graphs(repo, monkeypatch):
    graphs_on_a_cpu()
    error = RuntimeError("operation not permitted when stream is capturing")
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", Mock(side_effect=error))
    printed = repo(f"train.py {TINY} --out_dir=out/run")
    assert "NOTE    no CUDA graphs, since this model cannot be captured: operation not permitted" in printed
    assert log_of("out/run", "end")
