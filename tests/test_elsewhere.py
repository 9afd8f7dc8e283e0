"""model.py in other people's programs: lengths that vary, the meta device, state dicts, a block by itself."""

import re

import pytest
import torch
from torch.export import Dim

from conftest import ROOT
from cover import COVER, perturb
from model import GPT, Block, GPTConfig
from test_model import over
from verify import build, close, tokens

torch.set_num_threads(1)

METHODS = [
    dict(n_kv_head=2),
    dict(attention="w2", residual="m1"),
    dict(attention="w2", w2_score="overlap"),
    dict(attention="summed_qk", residual="m4.2"),
]
methods = pytest.mark.parametrize("method", METHODS, ids=lambda method: "-".join(map(str, method.values())))
LENGTHS = (5, 9, 14)


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, idx):
        return self.model(idx)[0]


def tiny(method):
    return build(**method, dtype=torch.float32)


def holds_at_all_lengths(found, model):
    for T in LENGTHS:
        idx = tokens(model, 3, T)
        close(torch.as_tensor(found(idx)), model(idx)[0], 1e-5, f"{T} tokens")


# -- lengths that vary ---------------------------------------------------------------------------------------


@methods
@torch.no_grad()
def test_a_compiled_model_takes_any_length(method):
    model, compilations = tiny(method), []

    def backend(graph, inputs):
        compilations.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(Logits(model), fullgraph=True, backend=backend)
    holds_at_all_lengths(compiled, model)
    assert len(compilations) <= 2  # for the first length, and for all others


@methods
@torch.no_grad()
def test_an_exported_model_takes_any_length(method):
    model = tiny(method)
    dynamic = ({0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=16)},)
    exported = torch.export.export(Logits(model), (tokens(model, 2, 8),), dynamic_shapes=dynamic)
    holds_at_all_lengths(exported.module(), model)


@methods
@torch.no_grad()
@pytest.mark.filterwarnings("ignore")  # of Python numbers, which are the config's
def test_a_traced_model_takes_any_length(method):
    model = tiny(method)
    holds_at_all_lengths(torch.jit.trace(Logits(model), tokens(model, 2, 8)), model)


@methods
@torch.no_grad()
def test_onnx_takes_any_length(method, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = tiny(method)
    dynamic = {"idx": {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=16)}}
    file = tmp_path / "model.onnx"
    torch.onnx.export(Logits(model), (tokens(model, 2, 8),), file, dynamo=True, dynamic_shapes=dynamic)
    session = onnxruntime.InferenceSession(file)
    holds_at_all_lengths(lambda idx: session.run(None, {session.get_inputs()[0].name: idx.numpy()})[0], model)


# -- initial values ------------------------------------------------------------------------------------------


@over(COVER)
def test_a_model_from_the_meta_device_starts_as_a_new_one(row):
    """Its parameters have the same means and sizes; random ones are drawn from another stream."""
    new = build(**row, dtype=torch.float32, moved=False)
    with torch.device("meta"):
        model = GPT(new.config)
    assert model(torch.zeros(2, 8, dtype=torch.long, device="meta"))[0].shape == (2, 8, 19)
    torch.use_deterministic_algorithms(True)  # under which to_empty gives nan
    model = model.to_empty(device="cpu")
    torch.use_deterministic_algorithms(False)
    if model.config.tie_weights:
        model.head.weight = model.embed.weight  # as after any to_empty
    model.init_weights()
    for (name, p), expected in zip(model.named_parameters(), new.parameters(), strict=True):
        if p.dim() < 2:
            assert torch.equal(p, expected), name
        else:
            assert p.std() == pytest.approx(expected.std(), rel=0.3), name
    assert model(tokens(model, 2, 8))[0].isfinite().all()


@pytest.mark.parametrize("method", [dict(), dict(residual="m2"), dict(attention="w2", sigma="diagonal", bias=True)])
def test_a_block_alone_starts_as_in_a_model(method):
    config = GPTConfig(block_size=8, vocab_size=32, n_layer=3, n_head=4, n_embd=256, **method)
    for layer in range(2):
        alone, inside = Block(config, layer), GPT(config).blocks[layer]
        for (name, p), expected in zip(alone.named_parameters(), inside.parameters(), strict=True):
            sizes = (p.abs().mean().item(), expected.abs().mean().item())
            assert sizes[0] == pytest.approx(sizes[1], rel=0.05), name


def test_the_block_of_the_readme(capsys):
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = re.search(r"```python\n(.*?Block.*?)```", page, re.DOTALL).group(1)
    scope = {}
    exec(snippet, scope)
    assert scope["out"].shape == scope["x"].shape == (2, 64, 512)


# -- state dicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change", [dict(residual="m1"), dict(residual="m1", keep_input=True), dict(qk_scale="5.2")])
def test_weights_are_refused_under_another_method(change, tmp_path):
    trained = perturb(GPT(GPTConfig(16, 19, 2, 2, n_embd=32, **{"attention": "summed_qk"} | change)))
    torch.save(trained.state_dict(), tmp_path / "weights.pt")
    state = torch.load(tmp_path / "weights.pt", weights_only=True)
    model = GPT(GPTConfig(16, 19, 2, 2, n_embd=32, attention="summed_qk"))
    field, value = list(change.items())[-1]
    with pytest.raises(RuntimeError, match=f"trained with {field} = {value!r}"):
        model.load_state_dict(state)
    torch.nn.Sequential(GPT(trained.config)).load_state_dict(torch.nn.Sequential(trained).state_dict())
    model.load_state_dict(dict(state))  # a plain dict says nothing, and a user may mean it
