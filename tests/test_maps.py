"""The picture of attention weights, and that it shows what the layers compute with."""

import sys
from pathlib import Path

import pytest
import torch

import reference
from config.runtime.maps import look_inside
from conftest import TINY, refused
from cover import KINDS, perturb
from cover import TINY as SHAPE
from model import GPT, GPTConfig
from test_extend import KINDS_OF_OWN, own  # noqa: F401, a fixture
from test_model import close, tokens


@pytest.mark.parametrize("residual", ["standard", "m1", "m4.2"])
@pytest.mark.parametrize("kind", [*KINDS.values(), *({"attention": kind} for kind in KINDS_OF_OWN)], ids=str)
def test_weights_are_those_that_the_layers_use(own, kind, residual):  # noqa: F811, the fixture
    """The explicit form makes each layer's attention, on its own input, of these weights."""
    gpt = perturb(GPT(GPTConfig(**SHAPE, **kind, n_kv_head=2, bias=True, residual=residual)).double()).eval()
    idx, inputs, outputs = tokens(gpt, 2, 7), [], []
    with torch.no_grad():
        logits = gpt(idx)[0]
        hooks = [block.register_forward_pre_hook(lambda block, args: inputs.append(args[0])) for block in gpt.blocks]
        hooks += [block.attn.register_forward_hook(lambda *args: outputs.append(args)) for block in gpt.blocks]
        weights = look_inside(gpt, idx)
        for hook in hooks:
            hook.remove()
        assert torch.equal(gpt(idx)[0], logits)
    assert not any(module._forward_hooks for module in gpt.modules())
    assert not torch.stack(weights).triu(1).any()
    state = {name: value.detach() for name, value in reference.get_state(gpt).items()}
    for l, block in enumerate(gpt.blocks):
        output = next(output for attn, _, output in outputs if attn is block.attn)  # later ones are recomputed
        for row in range(2):
            close(output[row], reference.attention_output(gpt.config, state, l, weights[l][row], inputs[l][row]))


def test_a_picture_from_sample(repo, capsys, monkeypatch):
    repo(f"train.py config/m1_shakespeare.py {TINY}")
    shown = repo(["sample.py", "--start=the dog sleeps! the dog", "--maps=maps.png"])  # longer than the context
    assert shown.startswith("maps.png: attention weights of out/m1_")
    assert Path("maps.png").read_bytes().startswith(b"\x89PNG")
    for name, words in {
        "maps.png": "already exists",
        "new.pgf": "new.pgf: must be a .png, .pdf or .svg file",
        "nowhere/new.png": "nowhere/new.png",
    }.items():
        assert words in refused(repo, f"sample.py --start=dogs --maps={name}", capsys)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert "pip install matplotlib" in refused(repo, "sample.py --start=dogs --maps=new.png", capsys)


def test_a_model_that_fails_keeps_no_hook(monkeypatch):
    gpt = GPT(GPTConfig(**SHAPE))
    monkeypatch.setattr(GPT, "features", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        look_inside(gpt, tokens(gpt, 1, 7))
    assert not any(module._forward_hooks for module in gpt.modules())
