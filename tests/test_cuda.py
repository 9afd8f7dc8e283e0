"""The GPU's kernels against the CPU's; skipped where there is no GPU."""

import pytest
import torch

from config.runtime.devices import compile_blocks
from cover import GRID, KINDS, perturb, settings
from model import GPT, GPTConfig

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
    """Return the same model on the CPU and on the GPU, and tokens for both."""
    torch.compiler.reset()  # or the variants of earlier tests would count towards its limit
    shape = dict(block_size=128, n_embd=128, n_head=2, n_inner=128)
    config = GPTConfig(**settings(kind, method, **{**shape, **changes}))
    on_cpu, on_gpu = perturb(GPT(config)), perturb(GPT(config)).cuda()
    idx = torch.randint(config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(1))
    return on_cpu, on_gpu, idx


def assert_near(on_cpu, on_gpu, idx, precision=torch.bfloat16):
    expected = losses_and_gradients(on_cpu, idx, torch.float32)
    found = losses_and_gradients(on_gpu, idx.cuda(), precision)
    if precision == torch.float32:
        assert max(map(relative, found, expected)) < 1e-3
        return
    assert found[0].shape == expected[0].shape and relative(found[0], expected[0]) < 0.05
    gradients, expected_gradients = (torch.cat([g.flatten() for g in each[1:]]) for each in (found, expected))
    assert gradients.isfinite().all() and relative(gradients, expected_gradients) < 0.1


precisions = pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])


@precisions
@pytest.mark.parametrize("kind, method", GRID)
def test_losses_and_gradients_are_the_cpu_s(kind, method, precision):
    assert_near(*pair(kind, method), precision)


@pytest.mark.parametrize("kind, method, precision", [
    *((kind, "standard", torch.float32) for kind in KINDS),
    ("standard", "m1", torch.float32),
    ("w2-scalar", "m4.2", torch.float32),
    ("w2-scalar", "standard", torch.bfloat16),  # bfloat16 is what train.py runs by default
    ("w2-diagonal", "m3.2", torch.bfloat16),
    ("summed-5.1", "standard", torch.bfloat16),
    ("standard", "m1", torch.bfloat16),
])  # fmt: skip
def test_compiled(kind, method, precision):
    on_cpu, on_gpu, idx = pair(kind, method)
    compile_blocks(on_gpu)
    assert_near(on_cpu, on_gpu, idx, precision)


@precisions
@pytest.mark.parametrize("kind", KINDS)
def test_grouped_heads(kind, precision):
    assert_near(*pair(kind, "m2", n_head=4, n_kv_head=2), precision)


def test_wide_scores():
    """Summed over 12 layers of head width 64 they are up to 768 wide, too wide for flash attention."""
    on_cpu, on_gpu, idx = pair("summed-5.2", "standard", n_layer=12)
    assert_near(on_cpu, on_gpu, idx, torch.float32)
    assert_near(on_cpu, on_gpu, idx)
    compile_blocks(on_gpu)
    assert_near(on_cpu, on_gpu, idx)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tie_weights", [False, True])
def test_gpt2_s_vocabulary(tie_weights, compiled):
    """Its size is odd, and a GPU's head is padded."""
    on_cpu, on_gpu, idx = pair("standard", "standard", vocab_size=50257, n_layer=1, tie_weights=tie_weights)
    if compiled:
        compile_blocks(on_gpu)
    assert_near(on_cpu, on_gpu, idx)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind, method", [("standard", "standard"), ("w2-scalar", "m1"), ("summed-5.1", "m4.2")])
def test_dropout_trains_and_is_causal(kind, method, compiled):
    _, model, idx = pair(kind, method, dropout=0.2)
    idx = idx.cuda()
    changed = torch.cat((idx[:, :64], (idx[:, 64:] + 1) % model.config.vocab_size), dim=1)
    if compiled:
        compile_blocks(model)

    def logits(idx):
        torch.manual_seed(3)  # so that the same is dropped
        with torch.autocast("cuda", torch.bfloat16):
            return model(idx, idx)[0]

    before, after = logits(idx).detach(), logits(changed).detach()
    assert torch.allclose(before[:, :64], after[:, :64], rtol=0.02, atol=0.02)
    assert not torch.allclose(before[:, 64:], after[:, 64:], rtol=0.02, atol=0.02)
    assert not torch.equal(before, model.eval()(idx)[0].to(before.dtype))
    found = losses_and_gradients(model.train(), idx, torch.bfloat16)
    assert all(value.isfinite().all() for value in found)


@pytest.mark.parametrize("kind, method", GRID)
def test_a_generated_text_is_the_cpu_s(kind, method):
    on_cpu, on_gpu, idx = pair(kind, method, block_size=24)
    expected = on_cpu.double().generate(idx[:, :5], 40, temperature=0)
    assert torch.equal(on_gpu.double().generate(idx[:, :5].cuda(), 40, temperature=0).cpu(), expected)
