"""speed.py: what it measures is right, and each section runs, in small. Depth costs no compiling."""

import json
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from config.runtime.devices import use_plain_attention
from conftest import ROOT
from cover import perturb, settings
from model import GPT, GPTConfig

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import speed


@pytest.fixture(autouse=True)
def restored():
    yield
    use_plain_attention(False)


@pytest.fixture
def small(monkeypatch, tmp_path):
    """A function that runs speed.py with a tiny model. It returns the tables by section."""
    tiny = {"n_layer": 2, "n_head": 1, "n_embd": 16, "vocab_size": 65}
    monkeypatch.setattr(speed, "SHAPE", tiny)
    monkeypatch.setattr(speed, "SECONDS", 0)
    monkeypatch.setattr(speed, "NEW", 16)

    def run(*arguments):
        speed.main([*arguments, "--device=cpu", f"--out={tmp_path}/speed.json"])
        return json.loads((tmp_path / "speed.json").read_text())["tables"]

    return run


def test_every_section_in_small(small):
    tables, names = small(), [words.split(":")[0] for words in speed.VARIANTS]
    assert [row[""] for row in tables["training"]] == names
    assert [row[""] for row in tables["generating"]] == ["standard", *names]
    assert all(row["tokens/s"] > 0 for row in tables["generating"])


def test_a_variant_is_written_as_for_compare(small, monkeypatch):
    monkeypatch.setattr(speed.GPT, "flops_per_token", lambda self: 3 if self.config.keep_input else 2)
    (row,) = small("kept: config/m1_shakespeare.py --keep_input")["training"]
    assert row[""] == "kept" and row["operations"] == 1.5
    assert row["float32: time / operations"] == pytest.approx(row["float32: time"] / 1.5)


def test_steps_alternate_and_ratios_are_of_one_turn(monkeypatch):
    """The machine is three times as slow for some turns. The second model always takes twice as long as the first."""

    class Model:
        def __init__(self, seconds):
            self.seconds = iter(seconds)

        def timed_step(self):
            order.append(self)
            return next(self.seconds)

    monkeypatch.setattr(speed, "SECONDS", 0)
    order = []
    pair = Model([9, 9, 1, 3, 3, 3, 1]), Model([9, 9, 2, 6, 6, 6, 2])
    assert speed.alternate(*pair) == 2
    assert order == [*pair] * 7


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
        model.compile_blocks()
        torch.testing.assert_close(model(idx, idx)[1], expected)
        counts.append(counter.frame_count)
    assert counts[0] == counts[1] <= 8
