"""
A quick check of model.py, without pytest: python tests/verify.py

One line per check; the exit code is 1 if one fails. Every kind of attention x every residual method,
and every two settings of any kind, are held to causality, to the explicit float64 form of reference.py,
and to their own cache.
"""

import math
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


def expect(good, reason):
    if not good:
        raise AssertionError(reason)


def expect_close(found, expected, what, tolerance=1e-9):
    expect(found.shape == expected.shape, f"{what}: shape {tuple(found.shape)}, not {tuple(expected.shape)}")
    error = (found - expected).abs().max().item()
    expect(error <= tolerance, f"{what}: off by {error:.2g}")


def one_layer(kind):
    """Return the block of a one-layer model, and random hidden states (B, T, HIDDEN)."""
    config = GPTConfig(block_size=T, vocab_size=16, n_layer=1, n_head=HEADS, n_embd=HIDDEN, n_inner=INNER,
                       **KINDS[kind])
    return GPT(config).eval().blocks[0], torch.randn(B, T, HIDDEN)


def vectors(block, x):
    """Return (normed x, q̂, k̂, v) of a first layer, as the model makes them."""
    return block.vectors(x, rope_table(0, T, HIDDEN // HEADS, 10000.0, x), (), None)[:4]


def rope_shapes():
    """cos, sin (T, D); a rotation keeps shapes and lengths, and is that of the explicit form."""
    D = HIDDEN // HEADS
    x = torch.randn(B, HEADS, T, D, dtype=torch.float64)
    cos, sin = rope_table(0, T, D, 10000.0, x)
    expect(cos.shape == sin.shape == (T, D), f"cos and sin are {tuple(cos.shape)}, not {(T, D)}")
    turned = apply_rope(x, (cos, sin))
    expect(turned.shape == x.shape, f"{tuple(turned.shape)}, not {tuple(x.shape)}")
    expect_close(turned.norm(dim=-1), x.norm(dim=-1), "lengths")
    expect_close(turned[1, 3], reference.rope(x[1, 3], 10000.0), "rotated vectors")


def attention_forward():
    for kind in KINDS:
        block, x = one_layer(kind)
        out = block.attn(*vectors(block, x))
        expect(out.shape == x.shape and out.isfinite().all(), f"{kind}: {tuple(out.shape)}, or not finite")


def block_forward():
    for kind in KINDS:
        block, x = one_layer(kind)
        out, _ = block(x, rope_table(0, T, HIDDEN // HEADS, 10000.0, x))
        expect(out.shape == x.shape and out.isfinite().all(), f"{kind}: {tuple(out.shape)}, or not finite")


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
            expect(p.grad is not None and p.grad.isfinite().all() and (idle or p.grad.abs().max() > 0),
                   f"{row}: {name} has no gradient, or zeros, or no finite one")


def causality():
    """Changing the tokens from t on leaves the logits before t as they are, to the bit."""
    for row in COVER:
        model = tiny(torch.float32, **row)
        idx = tokens(model, 12)
        for t in (1, 7, 11):
            changed = torch.cat([idx[:, :t], (idx[:, t:] + 1) % model.config.vocab_size], dim=1)
            expect(torch.equal(model(changed)[0][:, :t], model(idx)[0][:, :t]),
                   f"{row}: logits before position {t} moved")


def w2_scores():
    """
    The scores q̂·k̂ are −(D_μ² + D_σ²)/(τ + ε), up to a constant per query, which softmax cancels:
    compared after the mean over the keys is taken off.
    """
    for kind in ("w2-scalar", "w2-diagonal"):
        model = tiny(**KINDS[kind], n_kv_head=2)
        config, block = model.config, model.blocks[0]
        d = config.n_embd // config.n_head
        x = torch.randn(1, 9, config.n_embd, dtype=torch.float64)
        normed = block.attn_norm(x)
        rope = rope_table(0, 9, d, config.rope_theta, x)
        mu_q, mu_k = block.attn.project(normed, rope)
        q, k, _ = block.attn.score_vectors(normed, rope, ())
        spread = torch.log1p(torch.exp(normed[0] @ block.attn.sigma.weight.T))
        n = 1 if config.sigma == "scalar" else d
        for head in range(config.n_head):
            kv = head // (config.n_head // config.n_kv_head)
            expected = reference.w2_scores(
                mu_q[0, head], mu_k[0, kv], spread[:, head * n:(head + 1) * n],
                spread[:, (config.n_head + kv) * n:(config.n_head + kv + 1) * n], block.attn.log_tau[head])
            found = q[0, head] @ k[0, kv].T
            expect_close(found - found.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True), kind)


def equals_reference():
    for row in COVER:
        model = tiny(**row)
        idx = tokens(model, 5)
        expect_close(model(idx)[0], reference_logits(model, idx), str(row))


def cache():
    """Greedy generation equals full forwards, within the context and past its end."""
    for row in COVER:
        model = tiny(**row, block_size=6)
        idx = tokens(model, 2)
        expect(torch.equal(model.generate(idx, 8, temperature=0), uncached_greedy(model, idx, 8)),
               f"{row}: other tokens than without the cache")


def first_loss():
    """A new model guesses about evenly, with logits of unit variance: its loss is near ln V + 1/2."""
    for row in COVER:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**TINY, **row)).eval()
        idx = tokens(model, 16)
        loss = model(idx, idx.roll(1, dims=1))[1].item()
        guess = math.log(19) + 0.5
        expect(abs(loss - guess) < 0.5, f"{row}: {loss:.2f}, not about {guess:.2f}")


CHECKS = [("RoPE Shapes", rope_shapes), ("Attention Forward", attention_forward), ("Block Forward", block_forward),
          ("Gradients", gradients), ("Causality", causality), ("W2 Scores vs. Explicit Distances", w2_scores),
          ("Cache = No Cache", cache), ("Logits vs. Explicit float64 Form", equals_reference),
          ("First Loss", first_loss)]


def main():
    torch.set_num_threads(1)        # tiny tensors: a second thread only costs time
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
