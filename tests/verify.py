"""
A quick check of model.py, without pytest: python tests/verify.py

One line per check; the exit code is 1 if one fails. `python tests/verify.py Causality` makes that check alone. Every
attention kind with every residual method, and random other settings, is tested for causality, against reference.py, and
against generation without a cache. With settings, as in '{"attention": "w2"}', only they are tested.
"""

import json
import os
import sys
from dataclasses import fields

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch

import reference
from cover import COVER, KINDS, TINY, perturb, settings
from model import GPT, Block, GPTConfig, apply_rope, rope_table
from reference import uncached_greedy

B, T, HIDDEN, HEADS, INNER = 2, 64, 512, 8, 2048


def build(kind="standard", method="standard", dtype=torch.float64, seed=0, moved=True, **changes):
    """Return a tiny model in eval mode, its parameters moved away from their initial values."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**settings(kind, method, **changes))).to(dtype)
    return (perturb(model, seed) if moved else model).eval()


def tokens(model, B, T, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(model.config.vocab_size, (B, T), generator=rng)


def close(found, expected, tolerance=1e-9, what="it"):
    assert found.shape == expected.shape, f"{what} has the shape {tuple(found.shape)}"
    error = (found - expected).abs().max().item()
    scale = max(1.0, expected.abs().max().item())
    assert error <= tolerance * scale, f"{what} is off by {error:.2g}"


def of_one_layer(forward):
    """Return a check of the output of forward(block, x, rope), for random hidden states x (B, T, HIDDEN)."""

    def check():
        for kind in KINDS:
            config = GPTConfig(T, 16, n_layer=1, n_head=HEADS, n_embd=HIDDEN, n_inner=INNER, **KINDS[kind])
            x = torch.randn(B, T, HIDDEN)
            out = forward(Block(config, layer=0), x, rope_table(0, T, config.head_dim, config.rope_theta, x))
            assert out.shape == x.shape and out.isfinite().all(), f"{kind}: {tuple(out.shape)}, or not finite"

    return check


def rope_shapes():
    """Check that cos and sin are (T, D), and that apply_rope equals the explicit form."""
    D = HIDDEN // HEADS
    x = torch.randn(B, HEADS, T, D, dtype=torch.float64)
    cos, sin = rope_table(0, T, D, 10000.0, x)
    assert cos.shape == sin.shape == (T, D), f"cos and sin are {tuple(cos.shape)}, not {(T, D)}"
    close(apply_rope(x, (cos, sin))[1, 3], reference.rope(x[1, 3], 10000.0), what="a rotated head")


def attention(block, x, rope):
    q, k, v = block.attn.project(x, rope)
    return block.attn(*block.attn.score_vectors(q, k, x, ()), v)


def equals_the_reference(row):
    """Logits, loss and gradients are those of the explicit form."""
    model = build(**row)
    idx, targets = tokens(model, 2, 5), tokens(model, 2, 5, seed=1)
    targets[0, 2] = targets[1, 4] = -1
    logits, loss = model(idx, targets)
    loss.backward()

    state = reference.get_state(model)
    expected = reference.logits_of(model.config, state, idx)
    expected_loss = reference.loss_of(expected, targets)
    close(logits, expected, what="an output (if you edited model.py, put the formula into tests/reference.py)")
    close(loss, expected_loss, what="the loss")

    gradients = torch.autograd.grad(expected_loss, list(state.values()), materialize_grads=True)
    for (name, p), expected in zip(model.named_parameters(), gradients, strict=True):
        assert p.grad is not None, f"{name} gets no gradient"
        scale = expected.abs().max().item()
        assert (p.grad - expected).abs().max() <= 1e-8 * scale + 1e-15, f"the gradient of {name} is off"


@torch.no_grad()
def future_does_not_move_the_past(row):
    model = build(**row, dtype=torch.float32)
    T = model.config.block_size
    idx = tokens(model, 2, T)
    logits = model(idx)[0]
    for t in {1, T // 3, T - 1} - {0, T}:
        changed = idx.clone()
        changed[:, t:] = (changed[:, t:] + 1) % model.config.vocab_size
        moved = model(changed)[0]
        assert torch.equal(moved[:, :t], logits[:, :t]), f"logits before position {t} moved with later tokens"
        assert not torch.equal(moved[:, t:], logits[:, t:]), f"logits from position {t} on did not move"


@torch.no_grad()
def cache_changes_nothing(row):
    """The tokens, and the logits they were taken from, are the same within the context and far past its end."""
    model = build(**row | {"block_size": 6, "dropout": 0.5})  # which drops nothing in eval mode
    idx = tokens(model, 2, 3)
    seen = []
    model.head.register_forward_hook(lambda module, inputs, logits: seen.append(logits.reshape(2, -1, 19)[:, -1]))
    found = model.generate(idx, 8, temperature=0)
    cached, seen[:] = seen[:], []
    expected = uncached_greedy(model, idx, 8)
    assert torch.equal(found, expected), "the cache changes what is generated; see the rule in tests/EXTENDING.md"
    close(torch.stack(cached), torch.stack(seen), what="a logit")


def in_every_row(check):
    def check_all():
        for row in COVER:
            try:
                check(row)
            except AssertionError as error:
                raise AssertionError(f"{row}: {error}") from error

    return check_all


CHECKS = [
    ("RoPE Shapes", rope_shapes),
    ("Attention Forward", of_one_layer(attention)),
    ("Block Forward", of_one_layer(lambda block, x, rope: block(x, rope)[0])),
    ("Gradients", in_every_row(equals_the_reference)),
    ("Causality", in_every_row(future_does_not_move_the_past)),
    ("Cache = No Cache", in_every_row(cache_changes_nothing)),
]


def main(arguments):
    torch.set_num_threads(1)  # tiny tensors: a second thread only costs time
    torch.manual_seed(0)
    failed = 0
    known = [name for name, _ in CHECKS]
    names = [word for word in arguments if not word.startswith("{")]
    if given := [json.loads(word) for word in arguments if word not in names]:
        small = TINY.keys() - {"block_size", "n_layer"} | {"n_kv_head"}  # not the given ones
        varied = {field.name for field in fields(GPTConfig)} - small
        COVER[:] = [{name: value for name, value in row.items() if name in varied} for row in given]
    for name in names:
        if name not in known:
            print(f"{name}: no such check; choose from {', '.join(known)}")
            return 2
    print("Running Verification Tests...")
    for number, (name, check) in enumerate(CHECKS, start=1):
        if names and name not in names:
            continue
        print(f"Test {number}: {name}... ", end="", flush=True)
        try:
            check()
            print("PASSED")
        except Exception as error:
            failed += 1
            print(f"FAILED ({type(error).__name__}: {error})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
