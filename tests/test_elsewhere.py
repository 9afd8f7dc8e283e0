"""model.py in other people's programs: exported by PyTorch, on a GPU, a block alone."""

import re

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.overrides import TorchFunctionMode

from conftest import ROOT
from cover import GRID
from verify import build, close, tokens

DYNAMIC = {"idx": {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=16)}}


@pytest.mark.parametrize("method", [
    dict(n_kv_head=2),
    dict(attention="w2_overlap"),
    dict(attention="w2", residual="m1"),
    dict(attention="summed_qk", residual="m4.2"),
])  # fmt: skip
@torch.no_grad()
def test_an_exported_model_takes_any_length(method):
    model = build(**method, dtype=torch.float32)
    exported = torch.export.export(model, (tokens(model, 2, 8),), dynamic_shapes=DYNAMIC).module()
    for T in (2, 9, 16):
        idx = tokens(model, 3, T)
        close(exported(idx)[0], model(idx)[0], 1e-5, f"{T} tokens")


class Indexing(TorchFunctionMode):
    """Takes parts of tensors on a pretended GPU, which a PyTorch without CUDA does not."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        tensor, index = args
        part = torch.empty_strided(tensor.shape, tensor.stride(), device="meta")[index]
        return tensor.as_strided(part.shape, part.stride(), tensor.storage_offset() + part.storage_offset())


@pytest.mark.parametrize("kind, method", GRID)
@torch.no_grad()
def test_no_tensor_stays_on_the_cpu(kind, method):
    """... of a model on a pretended GPU: that would be an error."""
    for n_kv_head in (4, 2):
        model = build(kind, method, moved=False, n_kv_head=n_kv_head)
        with FakeTensorMode(), Indexing():
            parameters = {name: torch.empty(p.shape, device="cuda") for name, p in model.named_parameters()}
            idx = torch.zeros(2, 16, dtype=torch.long, device="cuda")
            logits, loss = torch.func.functional_call(model, parameters, (idx, idx))
        assert logits.device.type == loss.device.type == "cuda"


def test_the_block_of_the_readme():
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    scope = {}
    exec(re.search(r"```python\n(.*?Block.*?)```", page, re.DOTALL)[1], scope)
    assert scope["out"].shape == scope["x"].shape == (2, 64, 512)
