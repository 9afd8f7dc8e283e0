"""
model.py against an explicit float64 form (reference.py) and against what the formulas imply, over
every kind of attention x every residual method.
"""

import copy
import math
import os
import re
import shutil
import sys
from functools import partial

import pytest
import torch
import torch._dynamo
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

import reference
from config.runtime.devices import pick_attention_kernel, use_plain_attention
from conftest import ROOT
from data.huggingface import from_llama, to_llama
from model import ATTENTIONS, CHOICES, GPT, Attention, Block, ConfigError, GPTConfig, causal_attention, rope_table
from reference import COVER, KINDS, columns, perturb, settings, uncached_greedy

torch.set_num_threads(1)  # tiny tensors: a second thread only costs time


def build(kind="standard", method="standard", dtype=torch.float64, seed=0, moved=True, **changes):
    """Return a tiny model in eval mode, its parameters moved away from their initial values."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**settings(kind, method, **changes))).to(dtype)
    return (perturb(model, seed) if moved else model).eval()


def over(rows):
    """Run a test over rows of COVER, under names made of their settings."""

    def name(row):
        return "-".join(name if value is True else str(value) for name, value in row.items() if value)

    return pytest.mark.parametrize("row", rows, ids=name)


def tokens(model, B, T, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (B, T), generator=rng)


def close(a, b, tolerance=1e-9):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())


# ----------------------------------------------------------------------------------------------
# the explicit reference


@over(COVER)
def test_logits_and_gradients_equal_the_reference(row):
    model = build(**row)
    idx, targets = tokens(model, 2, 5), tokens(model, 2, 5, seed=1)
    targets[0, 2] = targets[1, 4] = -1
    logits, loss = model(idx, targets)
    loss.backward()

    state = reference.get_state(model)
    expected = reference.logits_of(model.config, state, idx)
    expected_loss = reference.loss_of(expected, targets)
    assert logits.shape == (2, 5, model.config.vocab_size) and logits.dtype == torch.float64
    assert (logits - expected).abs().max() < 1e-9
    assert abs(loss.item() - expected_loss.item()) < 1e-9

    # a model that holds the gradients where its weights were, to read them under Llama's names
    grads = copy.deepcopy(model)
    with torch.no_grad():
        for (name, p), g in zip(model.named_parameters(), grads.parameters()):
            assert p.grad is not None, f"{name} gets no gradient"
            g.copy_(p.grad)
    found = reference.get_state(grads)
    assert found.keys() == state.keys()
    expected_grads = torch.autograd.grad(expected_loss, list(state.values()), allow_unused=True)
    for name, expected_grad in zip(state, expected_grads):
        expected_grad = torch.zeros_like(state[name]) if expected_grad is None else expected_grad
        assert found[name].shape == expected_grad.shape
        scale = expected_grad.abs().max().item()
        assert (found[name] - expected_grad).abs().max() <= 1e-8 * scale + 1e-15, name


@hypothesis_settings(max_examples=20, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_any_configuration_equals_the_reference(data):
    draw = lambda *choices: data.draw(st.sampled_from(choices))
    row = {name: value for name, values in columns().items() for name, value in draw(*values).items()}
    groups, kv = draw(1, 2, 3), draw(1, 2)
    shape = dict(
        n_head=groups * kv,
        n_kv_head=kv,
        n_embd=groups * kv * draw(2, 4, 6),
        n_layer=draw(1, 2, 4),
        n_inner=draw(1, 5, None),
    )
    model = build(**{**row, **shape}, seed=draw(0, 1, 2))
    idx = tokens(model, draw(1, 3), draw(1, 2, 5, 16))
    assert (model(idx)[0] - reference.reference_logits(model, idx)).abs().max() < 1e-9


# ----------------------------------------------------------------------------------------------
# causality, and no T x T tensor anywhere


@over(COVER)
def test_the_future_does_not_move_the_past(row):
    model = build(**row, dtype=torch.float32)
    idx = tokens(model, 2, 16)
    with torch.no_grad():
        logits = model(idx)[0]
        for t in (1, 6, 15):
            changed = idx.clone()
            changed[:, t:] = (changed[:, t:] + 1) % model.config.vocab_size
            moved = model(changed)[0]
            assert torch.equal(moved[:, :t], logits[:, :t])
            assert not torch.equal(moved[:, t:], logits[:, t:])


class Shapes(TorchDispatchMode):
    """Collect the operations whose outputs have two axes of length T."""

    def __init__(self, T):
        super().__init__()
        self.T, self.found = T, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor) and list(tensor.shape).count(self.T) >= 2:
                self.found.append((str(func), tuple(tensor.shape)))
        return out


@over(COVER)
def test_activation_checkpointing_changes_nothing(row):
    """... except what is kept for the backward pass; dropout, which they draw twice, included."""
    outcomes = []
    for activation_checkpointing in (False, True):
        model = build(**{**row, "activation_checkpointing": activation_checkpointing}, dropout=0.3).train()
        idx = tokens(model, 2, 9)
        torch.manual_seed(1)
        loss = model(idx, idx)[1]
        loss.backward()
        outcomes.append([loss, torch.get_rng_state(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def kept_for_backward(**changes):
    """Return the bytes that a forward pass keeps, shared storage counted once."""
    config = GPTConfig(block_size=64, vocab_size=20, n_layer=8, n_head=2, n_embd=32, **changes)
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    idx = torch.randint(20, (2, 64))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = GPT(config)(idx, idx)  # noqa: F841, alive until the sum, or storage at the same address would be counted twice
    return sum(kept.values())


@pytest.mark.parametrize(
    "row", [{}, dict(residual="m1"), dict(residual="m4.2"), dict(attention="w2"), dict(attention="summed_qk")]
)
def test_activation_checkpointing_keeps_a_third_of_a_standard_model(row):
    assert kept_for_backward(**row, activation_checkpointing=True) < kept_for_backward() / 3


@over(COVER)
def test_no_tensor_of_T_by_T(row):
    """None is made, not even for a moment, except by kinds that say so."""
    T = 53
    model = build(**row, dtype=torch.float32, block_size=T).train()
    idx = tokens(model, 2, T)
    with Shapes(T) as shapes:
        model(idx, idx)[1].backward()
    assert bool(shapes.found) == (row["attention"] in reference.T_BY_T)


# ----------------------------------------------------------------------------------------------
# generation


@over(COVER)
def test_cached_generation_equals_full_forwards(row):
    """The tokens, and the logits they were taken from, are the same within the context and far past its end."""
    model = build(**row, block_size=6)
    idx = tokens(model, 2, 3)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.reshape(2, -1, 19)[:, -1]))
    with torch.no_grad():
        found = model.generate(idx, 8, temperature=0)
        cached, seen[:] = seen[:], []
        assert torch.equal(found, uncached_greedy(model, idx, 8))
    assert torch.equal(found[:, :3], idx)
    assert len(cached) == len(seen) == 8
    close(torch.stack(cached), torch.stack(seen))


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("prompt", [1, 8, 20])
def test_generation_past_the_context(block_size, prompt):
    for kind, method in (("w2-scalar", "m1"), ("summed-5.5", "m4.2+input")):
        model = build(kind, method, block_size=block_size)
        idx = tokens(model, 2, prompt)
        with torch.no_grad():
            assert torch.equal(model.generate(idx, 11, temperature=0), uncached_greedy(model, idx, 11))


def test_sampling_follows_the_uncached_distribution():
    """Cached samples of the fifth token have the uncached probabilities of it."""
    model = build("w2-diagonal", "m2", vocab_size=7)
    prompt = tokens(model, 1, 3)
    rows = prompt.expand(5000, 3)
    for temperature in (1.0, 0.5):
        rng = torch.Generator().manual_seed(0)
        with torch.no_grad():
            found = model.generate(rows, 2, temperature=temperature, generator=rng)
            for first in found[:, 3].unique():
                some = found[found[:, 3] == first]
                if len(some) < 500:
                    continue
                logits = model(some[:1, :4])[0][0, -1]
                expected = torch.softmax(logits / temperature, dim=-1)
                counted = torch.bincount(some[:, 4], minlength=7) / len(some)
                sigma = (expected * (1 - expected) / len(some)).sqrt()
                assert ((counted - expected).abs() <= 5 * sigma + 1e-12).all()


def test_top_k_top_p_and_temperature():
    model = build("standard", "m1", vocab_size=11)
    idx = tokens(model, 1, 4)
    with torch.no_grad():
        greedy = model.generate(idx, 10, temperature=0)
        assert torch.equal(model.generate(idx, 10, top_k=1), greedy)
        assert torch.equal(model.generate(idx, 10, top_p=1e-6), greedy)
        assert torch.equal(model.generate(idx, 10, temperature=1e-6), greedy)

        probs = torch.softmax(model(idx)[0][0, -1], dim=-1)
        order = probs.argsort(descending=True).tolist()
        rows = idx.expand(3000, 4)
        assert set(model.generate(rows, 1, top_k=3)[:, -1].tolist()) == set(order[:3])
        seen = set(model.generate(rows, 1, top_k=100)[:, -1].tolist())
        assert len(seen) > 3 and seen <= set(range(11))
        for top_p in (0.3, 0.6, 0.8):
            nucleus, total = set(), 0.0
            for token in order:  # the fewest tokens that reach top_p together
                if total >= top_p:
                    break
                nucleus.add(token)
                total += probs[token].item()
            found = set(model.generate(rows, 1, top_p=top_p)[:, -1].tolist())
            assert found == nucleus


def test_a_generator_fixes_the_tokens_and_spares_the_global_stream():
    model = build("w2-scalar", "m2", block_size=6)
    idx = tokens(model, 2, 3)
    before = torch.get_rng_state()
    runs = [model.generate(idx, 12, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_stream_yields_what_generate_appends():
    model = build("summed-5.7", "m4.1", block_size=6)
    idx = tokens(model, 2, 3)
    for options in (dict(temperature=0), dict(temperature=0.8, top_k=5, top_p=0.9)):
        torch.manual_seed(3)
        pieces = list(model.stream(idx, 10, **options))
        assert [p.shape for p in pieces] == [(2, 1)] * 10
        torch.manual_seed(3)
        whole = model.generate(idx, 10, **options)
        assert torch.equal(torch.cat([idx] + pieces, dim=1), whole)
    for token in model.stream(idx, 2):  # gradients are off only inside the stream
        assert torch.is_grad_enabled() and not token.requires_grad


@pytest.mark.parametrize(
    "options, named",
    [
        (dict(temperature=-1.0), "temperature"),
        (dict(top_k=0), "top_k"),
        (dict(top_p=0.0), "top_p"),
        (dict(top_p=1.5), "top_p"),
    ],
)
def test_bad_sampling_options(options, named):
    model = build()
    with pytest.raises(ValueError, match=named):
        model.generate(tokens(model, 1, 2), 3, **options)


# ----------------------------------------------------------------------------------------------
# initial values


def test_initial_values_and_shapes():
    H, KV, d = 4, 2, 8
    for name, k in (("w2-scalar", 1), ("w2-diagonal", d)):
        for block in build(name, moved=False, n_kv_head=KV).blocks:
            assert block.attn.log_tau.shape == (H,)
            close(block.attn.log_tau, torch.full((H,), math.log(2 * math.sqrt(d))).double(), 1e-6)
            assert block.attn.sigma.weight.shape == (H * k + KV * k, H * d)
            assert block.attn.sigma.bias is None
    for scale in ("5.5", "5.6", "5.7"):
        for l, block in enumerate(build(f"summed-{scale}", moved=False).blocks):
            value = math.log(math.sqrt(d)) if scale == "5.7" else 0.0
            close(block.attn.log_a, torch.full((l + 1,), value).double(), 1e-6)
            if scale == "5.6":
                close(block.attn.b, torch.full((l + 1,), 0.5).double())
    for block in build("summed-5.4", moved=False).blocks:
        assert block.attn.a.numel() == block.attn.b.numel() == 1
        assert block.attn.a.item() == 0.5 and block.attn.b.item() == 1
    for method in ("m3.2", "m4.2"):
        for l, block in enumerate(build("standard", method, moved=False).blocks):
            if l >= 1:
                assert torch.equal(block.mix, torch.zeros(l + 1).double())
            else:
                assert getattr(block, "mix", None) is None


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_start_at_the_size_of_what_they_multiply(tied):
    """1/√fan-in; where a branch ends 1/√(2L) of that. An embedding starts at 1, or as the head where they are one."""
    C, inner, L = 128, 512, 3
    model = build(
        "w2-diagonal",
        dtype=torch.float32,
        moved=False,
        n_embd=C,
        n_inner=inner,
        n_layer=L,
        n_kv_head=2,
        vocab_size=1000,
        bias=True,
        tie_weights=tied,
    )
    std = {"embed": C**-0.5 if tied else 1.0, "o_proj": (2 * L * C) ** -0.5, "down_proj": (2 * L * inner) ** -0.5}
    for name, p in model.named_parameters():
        _, module, kind = f".{name}".rsplit(".", 2)
        if p.dim() == 2:
            expected = std.get(module, C**-0.5)
            assert p.std().item() == pytest.approx(expected, rel=0.03) and abs(p.mean()) < 0.03 * expected, name
        elif kind == "bias":
            assert not p.any()
        elif module.endswith("norm"):
            assert (p == 1).all()


def test_inner_width_by_default():
    for n_embd, inner in ((32, 128), (96, 256), (384, 1024), (768, 2048)):
        config = GPTConfig(**settings("standard", "standard", n_embd=n_embd, n_inner=None, n_layer=1))
        assert to_llama(GPT(config))["model.layers.0.mlp.gate_proj.weight"].shape == (inner, n_embd)


# ----------------------------------------------------------------------------------------------
# the operations counted


@pytest.mark.parametrize("residual", CHOICES["residual"])
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_of_the_formulas(kind, residual):
    """Multiply-adds per token: of every matrix, and of T scores and T values mixed in each of a layer's runs."""
    L, C, inner, T, H, G, V = 3, 32, 24, 16, 4, 2, 19
    D = C // H
    model = build(kind, residual, moved=False, n_kv_head=G)
    total = C * V
    for l in range(L):
        spread = {"w2-scalar": 1, "w2-diagonal": D}.get(kind, 0)
        width = (l + 1) * D if kind.startswith("summed") else D + spread + 2 if kind.startswith("w2") else D
        scoring = C * C + C * G * D + C * (H + G) * spread
        attn = C * G * D + C * C + T * H * (width + D)
        mlp = 3 * C * inner
        total += scoring + attn + mlp
        later = L - 1 - l  # layers that run this one again
        branch = model.blocks[-1].summed
        total += later * {None: 0, "attention": attn, "mlp": attn + mlp}[branch]
    assert model.flops_per_token() == 6 * total  # two a multiply-add, and twice that backward


def test_operations_follow_the_context_and_draw_no_random_number():
    model = build("w2-scalar", "m1")
    before, state = model.flops_per_token(), torch.get_rng_state()
    model.crop_block_size(8)
    assert model.flops_per_token() == build("w2-scalar", "m1", block_size=8).flops_per_token() < before
    assert torch.equal(torch.get_rng_state(), state)


# ----------------------------------------------------------------------------------------------
# what each kind of device gets

half, single = torch.bfloat16, torch.float32


class Called(torch.Tensor):
    """A tensor of a CPU that passes for another device's, and so does what is computed from it."""


@pytest.mark.parametrize("device, dtype, T, S, plain, expected", [  # v is 64 wide; 6 heads of q, 2 of k̂ and v
    ("cpu", single, 128, 67, False, (67, 2)),
    ("cpu", half, 128, 67, True, (64, 2)),
    ("cpu", single, 1, 67, False, (64, 2)),             # a token that is generated
    ("cpu", single, 128, 16, False, (64, 2)),           # nothing is cut off where scores are narrower

    ("cuda", half, 128, 72, False, (72, 2)),            # flash, cuDNN
    ("cuda", torch.float16, 128, 256, False, (256, 2)),
    ("cuda", half, 128, 320, False, (64, 6)),           # memory-efficient
    ("cuda", single, 128, 72, False, (64, 6)),
    ("mps", single, 1, 72, False, (72, 2)),             # wrong where v is narrower, at any T
])  # fmt: skip
def test_the_layout_of_attention(device, dtype, T, S, plain, expected, monkeypatch):
    """How wide v is padded, and to how many heads k̂ and v are repeated."""
    seen = {}

    def attend(q, k, v, **options):
        assert k.size(1) == v.size(1) and options["enable_gqa"] == (k.size(1) != 6) and options["is_causal"] == (T > 1)
        seen["layout"] = v.size(3), v.size(1)
        return v.new_zeros(1, 6, T, v.size(3))

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(Called, "device", torch.device(device), raising=False)
    use_plain_attention(plain)
    q, k, v = (torch.zeros(1, heads, T, width, dtype=dtype) for heads, width in ((6, S), (2, S), (2, 64)))
    y = causal_attention(q, k, v.as_subclass(Called))
    use_plain_attention(False)
    assert seen["layout"] == expected and y.shape == (1, 6, T, 64)


# ----------------------------------------------------------------------------------------------
# compiling


@pytest.fixture
def compile_with(monkeypatch):
    """Return a function that makes torch.compile use a backend, one that generates no C++."""
    compile = torch.compile
    torch.compiler.reset()
    yield lambda backend: monkeypatch.setattr(torch, "compile", partial(compile, backend=backend))
    torch.compiler.reset()


def test_a_loss_of_one_s_own_on_the_logits(compile_with):
    """... has its gradients, alone or beside the model's loss, compiled or not."""
    compile_with("aot_eager")
    gradients = []
    for compiled in (False, True):
        model = build("standard", "m1")
        idx = tokens(model, 2, 12)
        if compiled:
            model.compile_blocks()
        for targets in (None, idx):
            logits, loss = model(idx, targets)
            own = logits.logsumexp(dim=-1).square().mean()
            total = own if targets is None else own + loss
            gradients.append(torch.autograd.grad(total, [model.head.weight, *model.blocks.parameters()]))
    for eager, compiled in zip(gradients[:2], gradients[2:]):
        assert eager[0].abs().max() > 0
        for found, expected in zip(compiled, eager):
            close(found, expected)


def test_training_and_evaluating_recompile_within_the_limit(compile_with):
    """That holds for summed scores as wide as ten layers, and for Method 3.1's ten weights 1/m."""
    compile_with("eager")
    model = build("summed-5.1", "m3.1", torch.float32, n_layer=10, dropout=0.1)
    idx = tokens(model, 2, 12)
    model.compile_blocks()
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for training in (True, False, True):
            with torch.set_grad_enabled(training):
                loss = model.train(training)(idx, idx)[1]
            if training:
                loss.backward()


# ----------------------------------------------------------------------------------------------
# precision


def attention_error(kind, seed, key_scale=1, compiled=False):
    """
    Return the relative error of bfloat16 autocast against float64 in the output of one attention of head
    width 64 over 128 positions, in which everything but scores and their softmax is exact in
    bfloat16: normed inputs are +1 and -1, W_V, W_O and the head are identities, there is no MLP, and
    the residual stream is so small beside the attention's output that the logits are that output,
    normed. The projections to scores are random, in weights that bfloat16 holds: of unit variance, but
    that keys are `key_scale` times as long. If `compiled`, the score vectors are.
    """
    C = 128
    model = build(
        kind,
        dtype=torch.float32,
        moved=False,
        n_layer=1,
        n_head=2,
        n_embd=C,
        vocab_size=C,
        n_inner=8,
        block_size=128,
        norm_eps=1e-15,
    )
    rng = torch.Generator().manual_seed(seed)

    def draw(value):
        return (torch.randn(value.shape, generator=rng) / value.shape[-1] ** 0.5).bfloat16().float()

    weights = {
        name: torch.ones_like(value) if value.dim() == 1 else draw(value) for name, value in to_llama(model).items()
    }
    for name in ("model.layers.0.self_attn.v_proj.weight", "model.layers.0.self_attn.o_proj.weight", "lm_head.weight"):
        weights[name] = torch.eye(C)
    weights["model.embed_tokens.weight"] = 2.0**-20 * torch.randn(C, C, generator=rng).sign()
    weights["model.layers.0.mlp.down_proj.weight"].zero_()
    keys = weights["model.layers.0.self_attn.k_proj.weight"]
    keys.copy_((key_scale * keys).bfloat16())
    model = from_llama(weights, model.config).eval()
    if KINDS[kind]["attention"] == "w2":
        attn = model.blocks[0].attn
        with torch.no_grad():
            attn.sigma.weight.copy_(draw(attn.sigma.weight))
            attn.tau_shift.add_(2 * torch.randn(2, generator=rng))
    idx = torch.randint(C, (2, 128), generator=rng)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(idx)[0]
        if compiled:
            attn = model.blocks[0].attn
            attn.score_vectors = torch.compile(attn.score_vectors)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = model(idx)[0].double()
    return ((rough - exact).norm() / exact.norm()).item()


def mean_error(kind, **options):
    return sum(attention_error(kind, seed, **options) for seed in range(4)) / 4


@pytest.fixture(params=["fused", "plain"])
def kernel(request):
    """Select each of PyTorch's attention kernels for CPUs that train.py chooses from."""
    use_plain_attention(request.param == "plain")
    yield request.param
    use_plain_attention(False)


@torch.no_grad()
def rounding_error(model, idx):
    """How far the exact logits of idx move when the parameters alone are rounded to bfloat16.

    Autocast rounds those and what is computed: at most 3.6 times as much, over all kinds, methods and four seeds.
    """
    exact, rounded = copy.deepcopy(model).double(), copy.deepcopy(model).bfloat16().double()
    return (rounded(idx)[0] - exact(idx)[0]).norm()


@over(COVER)
def test_bfloat16_is_causal_and_near_the_reference(row):
    model = build(**row, dtype=torch.float32)
    idx = tokens(model, 2, 8)
    changed = torch.cat((idx[:, :5], (idx[:, 5:] + 1) % 19), dim=1)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits, others = model(idx)[0], model(changed)[0]
    assert torch.equal(logits[:, :5], others[:, :5])
    expected = reference.reference_logits(model, idx[:1])
    assert (logits[:1].double() - expected).norm() < 5 * rounding_error(model, idx[:1])


def test_the_kernel_for_attention_is_the_faster_one(kernel):
    def chosen(dtype, block_size, **kind):
        model = GPT(GPTConfig(**settings("standard", "standard", block_size=block_size, **kind)))
        pick_attention_kernel(model, torch.device("cpu"), dtype)
        return "fused" if torch.backends.cuda.flash_sdp_enabled() else "plain"

    assert chosen(torch.bfloat16, 512) == "plain"
    assert chosen(torch.bfloat16, 1024) == "fused"
    assert chosen(torch.bfloat16, 1024, attention="w2", sigma="diagonal") == "fused"
    assert chosen(torch.bfloat16, 1024, attention="summed_qk", n_layer=4) == "plain"
    assert chosen(torch.bfloat16, 2048, attention="summed_qk", n_layer=4) == "fused"
    assert chosen(torch.float32, 64) == "fused"


@pytest.mark.parametrize("kind", ["w2-scalar", "w2-diagonal"])
def test_w2_in_bfloat16_is_as_exact_as_standard_attention(kind, kernel):
    error = mean_error("standard")
    assert 0 < error < 0.01
    assert mean_error(kind) < 1.5 * error


CXX = shutil.which(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))


def test_rope_turns_a_bfloat16_model_by_exact_angles():
    tables = [rope_table(1000, 1024, 8, 1e4, torch.empty(0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    for table, exact in zip(*tables):
        close(table.double(), exact, 2e-4)  # float32 has four digits after the point of 1000


@pytest.mark.skipif(not CXX, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", ["w2-scalar", "w2-diagonal"])
def test_w2_in_bfloat16_is_as_exact_compiled(kind, monkeypatch):
    """
    A compiler that drops a cast to bfloat16 and back makes the bias's remainder, the last column of k̂, 0.
    With keys five times as long that would be 4 times standard attention's error. It is about twice that
    anyway, since the rounding of W_K x, which comes before, weighs more in ‖k‖² than in q·k.
    """
    columns, forward = [], Attention.forward

    def watched(self, x, q, k, *rest):
        columns.append(k[..., -1])
        return forward(self, x, q, k, *rest)

    monkeypatch.setattr(Attention, "forward", watched)
    for key_scale, times in ((1, 1.5), (5, 3)):
        error = mean_error(kind, key_scale=key_scale, compiled=True)
        assert error < times * mean_error("standard", key_scale=key_scale)
        remainders = [column for column in columns if column.dtype == torch.bfloat16][:4]  # then come the standard's
        assert all(column.count_nonzero() > column.numel() / 2 for column in remainders)
        columns.clear()


@over([{**row, "activation_checkpointing": False} for row in COVER[::6]])
def test_autocast_trains(row):
    """The residual stream stays in float32, where a method replaces the residual or mixes several too."""
    model = build(**row, dtype=torch.float32).train()
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: streams.append((inputs[0] + output[0]).dtype))
    idx = tokens(model, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(idx, idx)[1]
    loss.backward()
    assert loss.dtype == torch.float32 and streams == [torch.float32] * 3
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# ----------------------------------------------------------------------------------------------
# the interface


def test_nanogpt_calls():
    """Do what nanoGPT's train.py and sample.py do with its model.py."""
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=False, vocab_size=None, dropout=0.0)
    args["vocab_size"] = 50
    model = GPT(GPTConfig(**args))
    n = model.get_num_params()
    assert isinstance(n, int) and 0 < n <= sum(p.numel() for p in model.parameters())
    mfu = model.estimate_mfu(8, 0.1)
    assert isinstance(mfu, float) and (math.isnan(mfu) or mfu > 0)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    for group in optimizer.param_groups:
        group["lr"] = 1e-4
    idx = torch.randint(50, (2, 16))
    _, loss = model(idx, idx)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "model_args": args}
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    model.crop_block_size(8)
    assert model.config.block_size == 8
    model.eval()
    assert model.generate(idx[:, :1], 20, temperature=0.8, top_k=200).shape == (2, 21)
    with pytest.raises(ValueError, match="block_size"):
        model(idx)
    GPTConfig()  # every field has a default there


@pytest.mark.parametrize(
    "field, value",
    [
        ("n_head", 5),
        ("n_head", 32),
        ("n_kv_head", 3),
        ("n_embd", 30),
        ("qk_scale", 5.1),
        *((field, "other") for field in CHOICES),
    ],
)
def test_bad_settings_are_named(field, value):
    with pytest.raises(ConfigError) as error:
        GPTConfig(**settings("standard", "standard", **{field: value}))
    assert all(str(word) in str(error.value) for word in (field, value, *CHOICES.get(field, ())))


def test_a_block_alone():
    x = torch.zeros(1, 4, 32)
    for row in (dict(residual="m1"), dict(attention="summed_qk")):
        config = GPTConfig(**settings("standard", "standard", **row))
        rope = rope_table(0, 4, config.head_dim, config.rope_theta, x)
        out, kept = Block(config, layer=0)(x, rope)
        assert out.shape == Block(config, layer=1)(x, rope, (kept,))[0].shape == x.shape
        with pytest.raises(AssertionError, match="this layer needs what every earlier layer has kept"):
            Block(config, layer=1)(x, rope)


def test_every_kind_is_a_choice():
    assert tuple(ATTENTIONS) == CHOICES["attention"]


def test_bad_inputs():
    model = build()
    with pytest.raises(ValueError, match="(?s)(?=.*17)(?=.*block_size)(?=.*16)"):
        model(tokens(model, 1, 17))
    with pytest.raises(ValueError, match=r"targets have shape \(1, 4\), idx has \(1, 3\)"):
        model(tokens(model, 1, 3), tokens(model, 1, 4))
    with pytest.raises(ValueError, match="the context has 0 tokens"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="block_size = 17 .* 1 to 16"):
        model.crop_block_size(17)


@pytest.mark.parametrize("kind", ["standard", "w2-scalar", "summed-5.5"])
def test_what_dropout_drops(kind):
    """A share p of the attention weights and of both branches' outputs drops; what stays is divided by 1 - p."""
    p = 0.3
    model = build(kind, dtype=torch.float32, n_layer=1, dropout=p).train()
    block, outputs, inputs = model.blocks[0], {}, {}
    for name in ("attn.v_proj", "attn.o_proj", "attn", "mlp.down_proj", "mlp"):

        def keep(module, arguments, output, name=name):
            inputs[name], outputs[name] = arguments[0], output

        block.get_submodule(name).register_forward_hook(keep)
    model(tokens(model, 500, 4))
    # the first token has one weight, 1, so that a head mixes to its value there
    mixed, value = inputs["attn.o_proj"][:, 0], outputs["attn.v_proj"][:, 0]
    dropped = [(mixed, value), (outputs["attn"], outputs["attn.o_proj"]), (outputs["mlp"], outputs["mlp.down_proj"])]
    for after, before in dropped:
        gone = after == 0
        close(after[~gone], before[~gone] / (1 - p), 1e-5)
        assert gone.float().mean().item() == pytest.approx(p, abs=0.05)


# ----------------------------------------------------------------------------------------------
# one file, with torch and einops only


def test_model_py_imports_torch_and_einops_alone():
    imported = re.findall(r"^\s*(?:import|from) +(\w+)", (ROOT / "model.py").read_text(encoding="utf-8"), re.MULTILINE)
    assert set(imported) - set(sys.stdlib_module_names) == {"torch", "einops"}


@pytest.mark.parametrize("method", ["m2", "m4.1", "m4.2"])
@pytest.mark.parametrize("kind", ["standard", "w2-scalar"])
def test_deep_models_without_an_identity_path_tell_tokens_apart_at_first(kind, method):
    """Attention that averages over the past would make all positions of a deep model look alike."""
    torch.manual_seed(0)
    model = build(kind, method, torch.float32, moved=False, n_layer=12, n_embd=128, n_head=4, block_size=64)
    x = torch.nn.functional.normalize(model.features(tokens(model, 2, 64)), dim=-1)
    likeness = (x @ x.mT).mean()
    assert likeness < 0.97  # 0.98 to 1.00 with independent queries and keys
