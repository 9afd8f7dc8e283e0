"""speed.py: what it measures is right, and it runs, in small. Depth costs no compiling."""

import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from config.runtime.devices import compile_blocks
from conftest import ROOT
from cover import perturb, settings
from model import GPT, GPTConfig

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import speed


@pytest.fixture
def small(monkeypatch, capsys):
    """A function that runs speed.py with a tiny model. It returns the rows of its table."""
    monkeypatch.setattr(speed, "SHAPE", {"block_size": 64, "n_layer": 2, "n_head": 1, "n_embd": 16, "vocab_size": 65})
    monkeypatch.setattr(speed, "SECONDS", 0)

    def run(*arguments):
        speed.main([*arguments, "--device=cpu"])
        rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
        return [row.strip("| ").split(" | ") for row in rows[2:]]

    return run


def test_all_variants_in_small(small):
    rows = small()
    assert [row[0] for row in rows] == speed.VARIANTS and all(float(cell) > 0 for row in rows for cell in row[1:])


@pytest.mark.parametrize("kind, method", [("standard", "m4.1"), ("w2-scalar", "m3.2"), ("summed-5.5", "m1")])
def test_depth_compiles_nothing_anew(monkeypatch, kind, method):
    """Layers and their recomputation share what is compiled, though summed scores grow wider, and 1/m smaller."""
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=counter))
    counts = []
    for n_layer in (3, 5):
        torch.compiler.reset()
        counter.clear()
        model = perturb(GPT(GPTConfig(**settings(kind, method, n_layer=n_layer))))
        idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
        expected = model(idx, idx)[1]
        compile_blocks(model)
        torch.testing.assert_close(model(idx, idx)[1], expected)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] <= 8
