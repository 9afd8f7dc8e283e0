"""speed.py: what it measures is right, and each section runs, in small. Depth costs no compiling."""

import json
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from config.runtime.common import UserError, use_plain_attention
from conftest import ROOT
from model import GPT, GPTConfig
from reference import perturb, settings

sys.path.insert(0, str(ROOT / "tests" / "bench"))

import speed


@pytest.fixture(autouse=True)
def restored():
    yield
    use_plain_attention(False)


def test_every_section_in_small(tmp_path):
    speed.main(["--quick", "--device=cpu", f"--out={tmp_path}/speed.json"])
    tables = json.loads((tmp_path / "speed.json").read_text())["tables"]
    assert [row[""] for row in tables["training"]] == list(speed.VARIANTS)
    assert len(tables["generating"]) == 6 and all(row["tokens/s"] > 0 for row in tables["generating"])


def test_a_variant_is_written_as_for_compare(tmp_path, monkeypatch):
    monkeypatch.setattr(speed.GPT, "flops_per_token", lambda self: 3 if self.config.residual == "m1" else 2)
    words = "kept: config/m1_shakespeare.py --keep_input", "--sections=training"
    assert speed.read_variant(words[0]) == ("kept", {"residual": "m1", "keep_input": True})
    speed.main([*words, "--quick", "--device=cpu", f"--out={tmp_path}/speed.json"])
    (row,) = json.loads((tmp_path / "speed.json").read_text())["tables"]["training"]
    assert row[""] == "kept" and row["operations"] == 1.5
    assert row["float32: time / operations"] == pytest.approx(row["float32: time"] / 1.5)


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(UserError, match="tempo"):
        speed.main(["--sections=training,tempo", f"--out={tmp_path}/speed.json"])
    assert not list(tmp_path.iterdir())


def test_steps_alternate_and_ratios_are_of_one_turn(monkeypatch):
    """The machine is three times as slow for some turns. The second model always takes twice as long as the first."""

    class Model:
        def __init__(self, seconds):
            self.seconds = iter(seconds)

        def timed_step(self):
            order.append(self)
            return next(self.seconds)

    order = []
    pair = Model([9, 9, 1, 3, 3, 3, 1]), Model([9, 9, 2, 6, 6, 6, 2])
    assert speed.alternate(pair, seconds=0, turns=5) == [1, 2]
    assert order == [*pair] * 7


def test_the_peak_of_memory_is_of_what_is_there_at_once():
    def function():
        torch.empty(2_000_000)  # 8 MB, which are freed
        return [torch.empty(1_500_000) for _ in range(2)]

    assert speed.peak_bytes(function, torch.device("cpu")) == pytest.approx(12e6, rel=0.01)


def test_the_memory_of_a_step():
    """Parameters, AdamW's two moments and gradients; and activations, which grow with the batch."""

    def memory(B):
        trainer = speed.Trainer(GPT(GPTConfig(**settings("standard", "standard", n_embd=128))), B, torch.float32)
        trainer.step()
        return trainer.memory(), sum(p.nbytes for p in trainer.model.parameters())

    (one, parameters), (two, _), (four, _) = memory(8), memory(16), memory(32)
    assert one > 4 * parameters and four - two == pytest.approx(2 * (two - one), rel=0.2)


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
