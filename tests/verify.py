"""
A quick check of model.py, without pytest: python tests/verify.py

One line per check; the exit code is 1 if one fails. Every attention kind with every residual method,
and every pair of settings, is tested for causality, against the explicit float64 form of reference.py,
and against generation without a cache.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import torch

import reference
from model import GPT, GPTConfig, apply_rope, rope_table
from reference import COVER, KINDS, TINY, perturb, reference_logits, uncached_greedy

B, T, HIDDEN, HEADS, INNER = 2, 64, 512, 8, 2048


def tiny(dtype=torch.float64, **row):
    config = GPTConfig(**{**TINY, **row})
    return perturb(GPT(config).to(dtype)).eval()


def tokens(model, T):
    return torch.randint(model.config.vocab_size, (B, T), generator=torch.Generator().manual_seed(0))


def one_layer(kind):
    """Return the block of a one-layer model, random hidden states (B, T, HIDDEN), and cos and sin."""
    config = GPTConfig(
        block_size=T, vocab_size=16, n_layer=1, n_head=HEADS, n_embd=HIDDEN, n_inner=INNER, **KINDS[kind]
    )
    x = torch.randn(B, T, HIDDEN)
    return GPT(config).eval().blocks[0], x, rope_table(0, T, HIDDEN // HEADS, 10000.0, x)


def rope_shapes():
    """Check that cos and sin are (T, D), and that apply_rope keeps shapes and equals the explicit form."""
    D = HIDDEN // HEADS
    x = torch.randn(B, HEADS, T, D, dtype=torch.float64)
    cos, sin = rope_table(0, T, D, 10000.0, x)
    assert cos.shape == sin.shape == (T, D), f"cos and sin are {tuple(cos.shape)}, not {(T, D)}"
    turned = apply_rope(x, (cos, sin))
    assert turned.shape == x.shape, f"{tuple(turned.shape)}, not {tuple(x.shape)}"
    assert (turned[1, 3] - reference.rope(x[1, 3], 10000.0)).abs().max() < 1e-9, "not the explicit form's rotation"


def attention_forward():
    for kind in KINDS:
        block, x, rope = one_layer(kind)
        normed = block.attn_norm(x)
        q, k, v = block.attn.project(normed, rope)
        out = block.attn(normed, *block.attn.score_vectors(q, k, normed, ()), v)
        assert out.shape == x.shape and out.isfinite().all(), f"{kind}: {tuple(out.shape)}, or not finite"


def block_forward():
    for kind in KINDS:
        block, x, rope = one_layer(kind)
        out, _ = block(x, rope)
        assert out.shape == x.shape and out.isfinite().all(), f"{kind}: {tuple(out.shape)}, or not finite"


def gradients():
    """
    Every parameter gets a finite gradient that is not zero, except the b of 5.4 in the first layer,
    where m^b = 1^b.
    """
    for row in COVER:
        model = tiny(**row)
        idx = tokens(model, 7)
        model(idx, idx.roll(1, dims=1))[1].backward()
        for name, p in model.named_parameters():
            idle = row.get("qk_scale") == "5.4" and name == "blocks.0.attn.b"
            good = p.grad is not None and p.grad.isfinite().all() and (idle or p.grad.abs().max() > 0)
            assert good, f"{row}: {name} has a missing, zero or non-finite gradient"


def causality():
    """Changing the tokens from t on leaves the logits before t as they are, to the bit."""
    for row in COVER:
        model = tiny(torch.float32, **row)
        idx = tokens(model, 12)
        for t in (1, 7, 11):
            changed = torch.cat([idx[:, :t], (idx[:, t:] + 1) % model.config.vocab_size], dim=1)
            moved = not torch.equal(model(changed)[0][:, :t], model(idx)[0][:, :t])
            assert not moved, f"{row}: logits before position {t} moved with the tokens from there on"


def equals_reference():
    for row in COVER:
        model = tiny(**row)
        idx = tokens(model, 5)
        error = (model(idx)[0] - reference_logits(model, idx)).abs().max().item()
        assert error < 1e-9, f"{row}: off by {error:.2g}; the formula of an edit belongs into tests/reference.py"


def cache():
    """Greedy generation equals full forwards, within the context and past its end."""
    for row in COVER:
        model = tiny(**row, block_size=6)
        idx = tokens(model, 2)
        same = torch.equal(model.generate(idx, 8, temperature=0), uncached_greedy(model, idx, 8))
        assert same, f"{row}: other tokens than without the cache; only mix_values may read other tokens"


CHECKS = [
    ("RoPE Shapes", rope_shapes),
    ("Attention Forward", attention_forward),
    ("Block Forward", block_forward),
    ("Gradients", gradients),
    ("Causality", causality),
    ("Cache = No Cache", cache),
    ("Logits vs. Explicit float64 Form", equals_reference),
]


def main():
    torch.set_num_threads(1)  # tiny tensors: a second thread only costs time
    torch.manual_seed(0)
    failed = 0
    print("Running Verification Tests...")
    for number, (name, check) in enumerate(CHECKS, start=1):
        print(f"Test {number}: {name}... ", end="", flush=True)
        try:
            # only the check of gradients needs any
            with torch.set_grad_enabled(check is gradients):
                check()
            print("PASSED")
        except Exception as error:
            failed += 1
            print(f"FAILED ({type(error).__name__}: {error})")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
