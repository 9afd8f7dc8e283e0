"""The GPU's kernels against the CPU's; skipped where there is no GPU."""

import sys

import pytest
import torch

from conftest import ROOT
from model import GPT, GPTConfig
from reference import GRID, KINDS, perturb, settings

sys.path.insert(0, str(ROOT / "tests" / "bench"))

from measure import Trainer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


def losses_and_gradients(model, idx, precision):
    device = idx.device.type
    with torch.autocast(device, precision, enabled=precision != torch.float32):
        logits, loss = model(idx, idx.roll(1, dims=1))
    loss.backward()
    found = [logits.detach().float().cpu(), *(p.grad.float().cpu() for p in model.parameters())]
    model.zero_grad()
    return found


def relative(a, b):
    return ((a - b).norm() / (b.norm() + 1e-6)).item()


def pair(kind, method, **changes):
    """The same model on the CPU and on the GPU, and tokens for both."""
    shape = dict(block_size=128, n_embd=128, n_head=2, n_inner=128)
    config = GPTConfig(**settings(kind, method, **{**shape, **changes}))
    on_cpu, on_gpu = perturb(GPT(config)), perturb(GPT(config)).cuda()
    idx = torch.randint(config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(1))
    return on_cpu, on_gpu, idx


@pytest.mark.parametrize("kind, method", GRID)
def test_float32_equals_the_cpu(kind, method):
    on_cpu, on_gpu, idx = pair(kind, method)
    expected = losses_and_gradients(on_cpu, idx, torch.float32)
    found = losses_and_gradients(on_gpu, idx.cuda(), torch.float32)
    assert max(map(relative, found, expected)) < 1e-3


@pytest.mark.parametrize("kind, method", GRID)
def test_bfloat16_is_near(kind, method):
    on_cpu, on_gpu, idx = pair(kind, method)
    (expected, *_), (found, *gradients) = (
        losses_and_gradients(model, x, precision)
        for model, x, precision in ((on_cpu, idx, torch.float32), (on_gpu, idx.cuda(), torch.bfloat16))
    )
    assert relative(found, expected) < 0.05
    assert all(gradient.isfinite().all() for gradient in gradients)


COMPILED = [(kind, "standard") for kind in KINDS] + [("standard", "m1"), ("w2-scalar", "m4.2")]


@pytest.mark.parametrize("kind, method", COMPILED)
def test_compiled_equals_eager(kind, method):
    _, model, idx = pair(kind, method)
    expected = losses_and_gradients(model, idx.cuda(), torch.float32)
    model.compile_blocks()
    found = losses_and_gradients(model, idx.cuda(), torch.float32)
    assert max(map(relative, found, expected)) < 1e-3


@pytest.mark.parametrize("kind, method", GRID)
def test_a_generated_text_is_the_cpu_s(kind, method):
    on_cpu, on_gpu, idx = pair(kind, method, block_size=24)
    expected = on_cpu.double().generate(idx[:, :5], 40, temperature=0)
    assert torch.equal(on_gpu.double().generate(idx[:, :5].cuda(), 40, temperature=0).cpu(), expected)


def test_the_memory_of_a_model_is_its_own():
    """Whatever else is on the GPU, and whichever GPU it is."""

    def trainer():
        model = GPT(GPTConfig(**settings("standard", "standard", block_size=64, n_embd=128))).to(device)
        made = Trainer(model, 4, torch.float32)
        made.timed_step()
        return made

    device = torch.device("cuda", torch.cuda.device_count() - 1)
    one = trainer()
    alone, others = one.memory(), [trainer() for _ in range(3)]
    assert alone > 4 * sum(p.nbytes for p in one.model.parameters())  # with gradients, and two moments of AdamW's
    assert one.memory() == others[-1].memory() == alone
