"""Looking inside: what config/runtime/maps.py shows is what the layers compute."""

import sys
from pathlib import Path

import pytest
import torch

import reference
from config.runtime.maps import look_inside
from conftest import ROOT, TINY, refused
from reference import GRID
from test_model import build, close, tokens, variation


def streams(gpt, idx):
    """Each block's input and output, under a hook of this test's own."""
    seen = []
    handles = [
        block.register_forward_hook(lambda module, inputs, output: seen.append((inputs[0], output[0])))
        for block in gpt.blocks
    ]
    with torch.no_grad():
        gpt(idx)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("kind, method", GRID)
def test_weights_and_terms_are_those_of_the_reference(kind, method):
    gpt = build(kind, method, **variation(kind, method))
    idx, config = tokens(gpt, 2, 7), gpt.config
    before = gpt(idx)[0]
    layers = look_inside(gpt, idx)
    state = {name: value.detach() for name, value in reference.get_state(gpt).items()}
    assert torch.equal(gpt(idx)[0], before) and len(layers) == config.n_layer
    close(torch.stack([layer.weights for layer in layers]).sum(-1), torch.ones(3, 2, 4, 7).double())
    assert not any(layer.weights.triu(1).any() for layer in layers)
    for l, (layer, (x, out)) in enumerate(zip(layers, streams(gpt, idx))):
        mixes = gpt.blocks[l].weights() if gpt.blocks[l].summed else [1.0]
        summed = gpt.blocks[l].summed
        for terms, name in ((layer.attention, "attention"), (layer.mlp, "mlp")):
            assert list(sorted(terms)) == (list(range(l + 1)) if summed == name else [l])
        h = x + sum(layer.attention.values())
        if summed == "attention" and not config.keep_input:
            h = h - x
        expected = h + sum(layer.mlp.values())
        if summed == "mlp" and not config.keep_input:
            expected = expected - h
        close(expected, out)  # the terms, and what is kept, add up
        for row in range(2):  # a term is what the explicit form makes of these weights
            for i, term in layer.attention.items():
                w = mixes[i] if summed == "attention" else 1.0
                close(term[row], w * reference.attention_output(config, state, i, layers[i].weights[row], x[row]))
            for i, term in layer.mlp.items():
                attn = reference.attention_output(config, state, i, layers[i].weights[row], x[row])
                w, into = (mixes[i], x[row] + attn) if summed == "mlp" else (1.0, h[row])
                close(term[row], w * reference.mlp_output(config, state, i, into))
        if config.attention == "summed_qk":
            total = layer.scores.sum(dim=2)
            assert layer.scores.shape == (2, 4, l + 1, 7, 7)
            close(torch.stack([torch.stack([*map(reference.causal_softmax, row)]) for row in total]), layer.weights)


def test_the_lines_on_the_page_run():
    page = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    found = {}
    exec(page.partition("## Looking inside")[2].partition("```python\n")[2].partition("```")[0], found)
    assert found["layer"].weights.shape == (1, 2, 16, 16) and list(found["layer"].mlp) == [0, 1, 2]


def test_nothing_stays_behind():
    gpt = build("standard", "m1")
    with pytest.raises(ValueError, match="block_size"):
        look_inside(gpt, tokens(gpt, 1, 17))
    look_inside(gpt, tokens(gpt, 1, 5))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in gpt.modules())


def test_a_picture_from_sample(repo, capsys, monkeypatch):
    repo(f"train.py config/m1_shakespeare.py {TINY}")
    for name, start in (("maps.png", "--start=the dog"), ("maps", "--start=" + "the dog sleeps! " * 5)):
        assert repo(["sample.py", start, f"--maps={name}"]).startswith(f"{name}: attention weights of out/m1_")
        assert Path(name).read_bytes().startswith(b"\x89PNG")
    assert "is there already" in refused(repo, "sample.py --start=dogs --maps=maps.png", capsys)
    assert "two tokens or more" in refused(repo, "sample.py --maps=new.png", capsys)
    assert "matplotlib writes no .tex" in refused(repo, "sample.py --start=dogs --maps=new.tex", capsys)
    assert "nowhere/new.png" in refused(repo, "sample.py --start=dogs --maps=nowhere/new.png", capsys)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(repo, "sample.py --start=dogs --maps=new.png", capsys)
