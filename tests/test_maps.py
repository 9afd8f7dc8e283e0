"""The picture of attention weights, and that it shows what the layers compute with."""

import sys
from pathlib import Path

import pytest
import torch

import reference
from conftest import ROOT, TINY, error_of
from cover import KINDS, perturb
from cover import TINY as SHAPE
from model import GPT, GPTConfig
from test_model import close, tokens

sys.path.insert(0, str(ROOT / "tests" / "bench"))  # as Python does for a program there

from plot import attention_weights


@pytest.mark.parametrize("residual", ["standard", "m1", "m4.2"])
@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_those_that_the_layers_use(kind, residual):
    """The explicit form makes each layer's attention, on its own input, of these weights."""
    gpt = perturb(GPT(GPTConfig(**SHAPE, **KINDS[kind], n_kv_head=2, bias=True, residual=residual)).double()).eval()
    idx, inputs, outputs = tokens(gpt, 2, 7), [], []
    with torch.no_grad():
        logits = gpt(idx)[0]
        hooks = [block.register_forward_pre_hook(lambda block, args: inputs.append(args[0])) for block in gpt.blocks]
        hooks += [block.attn.register_forward_hook(lambda *args: outputs.append(args)) for block in gpt.blocks]
        weights = attention_weights(gpt, idx)
        for hook in hooks:
            hook.remove()
        assert torch.equal(gpt(idx)[0], logits)
    assert not torch.stack(weights).triu(1).any()
    state = {name: value.detach() for name, value in reference.get_state(gpt).items()}
    for l, block in enumerate(gpt.blocks):
        output = next(output for attn, _, output in outputs if attn is block.attn)  # later ones are recomputed
        for row in range(2):
            close(output[row], reference.attention_output(gpt.config, state, l, weights[l][row], inputs[l][row]))


def test_a_picture_of_a_run(repo, capsys):
    repo(f"train.py config/m1_shakespeare.py {TINY}")
    plot = [str(ROOT / "tests" / "bench" / "plot.py"), "out/m1_shakespeare"]
    shown = repo([*plot, "--maps=the dog sleeps! the dog", "--out=maps.png"])  # longer than the context
    assert shown == "figure: maps.png\n" and Path("maps.png").read_bytes().startswith(b"\x89PNG")
    assert "nowhere/new.png" in error_of(repo, [*plot, "--maps=dogs", "--out=nowhere/new.png"], capsys)
