"""test_model.py's promises on a GPU, and its logits and gradients next to a CPU's; skipped where there is no GPU."""

from functools import partial

import pytest
import torch

import test_model
from conftest import load
from cover import COVER, FEW, perturb
from cover import TINY as SHAPE
from model import GPT, GPTConfig
from test_model import over

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

PROMISES = [
    test_model.test_logits_and_gradients_equal_the_reference,
    test_model.test_the_future_does_not_move_the_past,
    test_model.test_no_tensor_of_T_by_T,
    test_model.test_cached_generation_equals_full_forwards,
    test_model.test_bfloat16_is_causal_and_near_the_reference,
]
single, half = torch.float32, torch.bfloat16
LARGE = [
    dict(attention="summed_qk", qk_scale="5.2", n_layer=12),  # scores too wide for flash attention
    *(dict(vocab_size=50257, n_layer=1, tie_weights=tied) for tied in (False, True)),  # odd: a GPU's head is padded
]


@pytest.fixture
def on_gpu(monkeypatch):
    """Let whatever does not name a device be on the GPU."""
    monkeypatch.setattr(torch, "Generator", partial(torch.Generator, "cuda"))
    with torch.device("cuda"):
        yield


@pytest.mark.parametrize("promise", PROMISES)
@over(COVER)
def test_every_promise_is_kept(on_gpu, promise, row):
    promise(row)


@pytest.mark.parametrize("kind", ["standard", "w2-scalar", "w2_overlap", "summed-5.5"])
def test_what_dropout_drops(on_gpu, kind):
    test_model.test_what_dropout_drops(kind, torch.float32, 1e-5, "m1", 2)


def pair(row, compiled):
    """Return the same model on the CPU and on the GPU, and tokens for both."""
    torch.compiler.reset()  # or the variants of earlier tests would count towards its limit
    config = GPTConfig(**SHAPE | dict(block_size=128, n_embd=128, n_inner=128) | row)
    on_cpu, on_gpu = perturb(GPT(config)), perturb(GPT(config)).cuda()
    if compiled:
        on_gpu.compile()
    return on_cpu, on_gpu, torch.randint(config.vocab_size, (2, 128), generator=torch.Generator().manual_seed(1))


def logits_and_gradients(model, idx, precision):
    with torch.autocast(idx.device.type, precision, enabled=precision != single):
        logits, loss = model(idx, idx.roll(1, dims=1))
    loss.backward()
    return logits.detach().float().cpu(), torch.cat([p.grad.float().cpu().flatten() for p in model.parameters()])


# compiling takes long: fewer rows, in the type that train.py chooses
CASES = [(row, False, precision) for row in COVER + LARGE for precision in (single, half)]
CASES += [(row, True, half) for row in FEW + LARGE]


@pytest.mark.parametrize("row, compiled, precision", CASES)
def test_logits_and_gradients_are_near_the_cpu_s(row, compiled, precision):
    on_cpu, on_gpu, idx = pair(row, compiled)
    expected = logits_and_gradients(on_cpu, idx, single)
    found = logits_and_gradients(on_gpu, idx.cuda(), precision)
    for one, other, tolerance in zip(found, expected, (1e-3, 1e-3) if precision == single else (0.1, 0.2)):
        assert (one - other).norm() < tolerance * other.norm()


@pytest.mark.parametrize("options", ["--residual=m1", "--attention=w2 --residual=m2 --dropout=0.2", "--dtype=float16"])
@pytest.mark.parametrize("accumulated", [1, 2, 4])
def test_a_run_with_graphs_equals_one_without(repo, accumulated, options):
    """... and evaluates between steps."""
    options += f" --max_iters=20 --eval_interval=5 --log_interval=1 --gradient_accumulation_steps={accumulated}"
    printed = repo(f"train.py {options} --out_dir=out/graphs")
    repo(f"train.py {options} --out_dir=out/eager --graphs=false")
    eager, graphs = (load(f"out/{name}/ckpt.pt")["model"] for name in ("eager", "graphs"))
    assert "no CUDA graphs" not in printed
    for name, weight in eager.items():
        torch.testing.assert_close(graphs[name], weight, rtol=1e-2, atol=1e-3, msg=name)
