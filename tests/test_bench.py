"""The benchmarks: what they compare is the same thing, and each runs, in small."""

import json
import runpy
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from config.runtime.common import UserError, report_error, use_plain_attention
from conftest import ROOT
from model import GPT, GPTConfig
from reference import GRID, perturb, settings

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import measure
import naive


@pytest.mark.parametrize("kind, method", GRID)
def test_the_explicit_form_computes_the_same(kind, method):
    model = perturb(GPT(GPTConfig(**settings(kind, method, n_kv_head=2)))).double()
    idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(naive.loss(model, idx, idx), model(idx, idx)[1], rtol=1e-9, atol=1e-9)


@pytest.fixture
def speed(tmp_path, monkeypatch):
    """Return a function that runs speed.py, here, with arguments."""
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["speed.py", "--device=cpu", *arguments, f"--out={tmp_path}/speed.json"])
        runpy.run_path(str(ROOT / "tests" / "bench" / "speed.py"), run_name="__main__")

    yield run
    use_plain_attention(False)


def test_speed_in_small(speed, tmp_path):
    sections = "naive,kinds,summed,methods,replays,generate,growth"
    speed("--quick", "--naive", f"--only={sections}")
    figures = json.loads((tmp_path / "speed.json").read_text())
    assert figures["quick"] and {row["section"] for row in figures["rows"]} == set(sections.split(","))
    assert all(row["value"] > 0 for row in figures["rows"] if row["section"] != "growth")


def test_everything_of_a_gpu_in_small(speed, tmp_path, monkeypatch):
    """Method 1 finds too little memory."""

    def memory(self):
        if self.model.config.residual == "m1":
            raise torch.OutOfMemoryError
        return 1

    monkeypatch.setattr(measure.Trainer, "memory", memory)
    speed("--quick", "--everything", "--only=124m,kernels,wide,joined")
    lines = (tmp_path / "speed.md").read_text().splitlines()
    assert "torch" in lines[0] and "commit" in lines[0]
    assert "| 124m | Method 1: out of memory |  |  |  |  |" in lines
    for start in ("kernels | scores 128 wide, plain products", "wide | summed QK by products / standard", "joined | both"):
        assert any(line.startswith(f"| {start}") for line in lines), start


@pytest.mark.parametrize("argument, named", [("--only=step,tempo", "tempo"), ("--nanogpt=nowhere", "nowhere")])
def test_what_cannot_be_measured_is_refused(speed, tmp_path, argument, named):
    with pytest.raises(UserError, match=named):
        speed(argument)
    assert sys.excepthook is report_error and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind, method",
    [("standard", "m4.1"), ("w2-scalar", "m3.2"), ("summed-5.5", "m1")],
)
def test_depth_compiles_nothing_anew(monkeypatch, kind, method):
    """All layers, and what they recompute, share what is compiled, though summed scores grow wider, and 1/m smaller."""
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function: compile(function, backend=counter))
    counts = []
    for n_layer in (3, 5):
        torch.compiler.reset()
        counter.clear()
        model = perturb(GPT(GPTConfig(**settings(kind, method, n_layer=n_layer))))
        idx = torch.randint(19, (2, 12), generator=torch.Generator().manual_seed(0))
        expected = model(idx, idx)[1]
        model.compile_blocks()
        torch.testing.assert_close(model(idx, idx)[1], expected)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] <= 8
