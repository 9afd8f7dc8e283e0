"""model.py against an explicit float64 form (reference.py) and against what the formulas imply."""

import copy
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference
import verify
from config.runtime import Loss
from cover import COVER, FEW, KINDS, settings
from model import CHOICES, GPT, Block, ConfigError, GPTConfig, KVCache, norm_columns, rope_table
from reference import uncached_greedy
from verify import build, close, tokens


def over(rows):
    """Run a test over rows of COVER, under names made of their settings."""
    names = ["-".join(name if value is True else str(value) for name, value in row.items() if value) for row in rows]
    return pytest.mark.parametrize("row", rows, ids=names)


@over(COVER)
def test_logits_and_gradients_equal_the_reference(row):
    verify.equals_the_reference(row)


# -- causality, and no T x T tensor anywhere -----------------------------------------------------------------


@over(COVER)
def test_the_future_does_not_move_the_past(row):
    verify.future_does_not_move_the_past(row)


class Shapes(TorchDispatchMode):
    """Collects the shapes of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        self.seen |= {tuple(leaf.shape) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)}
        return result


@over(COVER)
def test_no_tensor_of_T_by_T(row):
    """None is made, not even for a moment, except by kinds that say so."""
    T = 53
    model = build(**row, dtype=torch.float32, block_size=T).train()
    idx = tokens(model, 2, T)
    with Shapes() as shapes:
        model(idx, idx)[1].backward()
    found = [shape for shape in shapes.seen if shape.count(T) >= 2]
    assert bool(found) == any(kind.items() <= row.items() for kind in reference.T_BY_T), found


# -- generation ----------------------------------------------------------------------------------------------


@over(COVER)
def test_cached_generation_equals_full_forwards(row):
    verify.cache_changes_nothing(row)


@pytest.mark.parametrize("block_size", [1, 3, 8])
@pytest.mark.parametrize("prompt", [1, 8, 20])
def test_generation_past_the_context(block_size, prompt):
    model = build("w2-scalar", "m1", block_size=block_size)
    idx = tokens(model, 2, prompt)
    with torch.no_grad():
        found = model.generate(idx, 11, temperature=0)
        assert torch.equal(found, uncached_greedy(model, idx, 11))


@torch.no_grad()
def test_a_block_may_run_twice():
    model = build()
    idx = tokens(model, 2, 3)
    model.blocks.extend([*model.blocks])
    assert torch.equal(model.generate(idx, 8, temperature=0), uncached_greedy(model, idx, 8))


def test_a_cache_is_not_read_on_after_a_failed_pass():
    cache, keys = KVCache(8), torch.zeros(2, 4, 1, 8)
    cache.append("keys", keys)  # cache.length stays 0, as when a pass does not reach its end
    with pytest.raises(ValueError, match="1 tokens of .* instead of 0"):
        cache.append("keys", keys)


@torch.no_grad()
def test_generation_ends_when_every_row_has_the_stop_token():
    model = build(vocab_size=5)
    idx = tokens(model, 3, 4)
    whole = model.generate(idx, 60, generator=torch.Generator().manual_seed(1))
    found = model.generate(idx, 60, generator=torch.Generator().manual_seed(1), stop=2)
    ends = [(row == 2).nonzero()[0].item() for row in whole[:, 4:]]
    assert torch.equal(found, whole[:, : 4 + max(ends) + 1])


@pytest.mark.parametrize("size, B, T, message", [
    (5, 3, 1, "3 sequences of 6 tokens do not fit a cache for 3 sequences of 5 tokens"),
    (8, 1, 1, "1 sequences of 6 tokens do not fit a cache for 3 sequences of 8 tokens"),
    (8, 3, 2, "2 queries for 7 keys"),  # after the first pass, tokens come one at a time
])  # fmt: skip
@torch.no_grad()
def test_what_does_not_fit_the_cache_is_an_error(size, B, T, message):
    model, cache = build(), KVCache(size)
    model.features(tokens(model, 3, 5), cache)
    with pytest.raises(ValueError, match=message):
        model.features(tokens(model, B, T), cache)


@pytest.mark.parametrize("temperature, top_k", [(1.0, None), (0.5, None), (1.0, 1), (2.0, 3)])
@torch.no_grad()
def test_sampling_follows_the_distribution(temperature, top_k):
    model, n = build(vocab_size=7), 2000
    prompt = tokens(model, 1, 3)
    drawn = model.generate(prompt.expand(n, 3), 1, temperature, top_k)[:, 3]
    logits = model(prompt)[0][0, -1]
    left_out = logits < logits.topk(top_k or 7).values[-1]
    p = torch.softmax(logits.masked_fill(left_out, -torch.inf) / temperature, dim=-1)
    sigma = (p * (1 - p) / n).sqrt()
    assert ((torch.bincount(drawn, minlength=7) / n - p).abs() <= 5 * sigma).all()


# -- initial values ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("learned, fixed", [
    (("summed-5.4", "m3.2"), ("summed-5.3", "m3.1")),
    (("summed-5.5", "m4.2"), ("summed-5.1", "m4.1")),
    (("summed-5.6", "m1"), ("summed-5.1", "m1")),
    (("summed-5.7", "m1"), ("summed-5.1", "m1")),
])  # fmt: skip
def test_learned_weights_start_at_those_of_a_fixed_method(learned, fixed):
    models = [build(*method, moved=False) for method in (learned, fixed)]
    idx = tokens(models[0], 2, 16)
    close(*(model(idx)[0] for model in models), 1e-6)  # log √d is a float32


@over(FEW)
def test_every_parameter_has_an_initial_value(row):
    torch.use_deterministic_algorithms(True)  # then torch.empty gives nan
    model = build(**row, moved=False)
    torch.use_deterministic_algorithms(False)
    assert all(p.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_start_at_the_size_of_what_they_multiply(tied):
    """1/√fan-in; where a branch ends 1/√(2L) of that. An embedding starts at 1, or as the head where they are one."""
    C, inner, L = 128, 512, 3
    shape = dict(n_embd=C, n_inner=inner, n_layer=L, vocab_size=1000)
    model = build("w2-diagonal", moved=False, **shape, bias=True, tie_weights=tied)
    std = {"embed": C**-0.5 if tied else 1.0, "o_proj": (2 * L * C) ** -0.5, "down_proj": (2 * L * inner) ** -0.5}
    for name, p in model.named_parameters():
        _, module, kind = f".{name}".rsplit(".", 2)
        if p.dim() == 2:
            expected = std.get(module, C**-0.5)
            assert p.std().item() == pytest.approx(expected, rel=0.03) and abs(p.mean()) < 0.03 * expected, name
        else:
            assert (p == (1 if module.endswith("norm") else 0)).all(), name  # a bias, the shift of τ


@pytest.mark.parametrize("residual", ["standard", "m1", "m4.2"])  # one that reruns nothing, both, attention
@pytest.mark.parametrize("kind", KINDS)
def test_operations_are_those_of_the_formulas(kind, residual):
    """Multiply-adds per token: of every matrix, and of T scores and T values mixed in each of a layer's runs."""
    L, C, inner, T, H, G, V = 3, 32, 24, 16, 4, 2, 19
    D = C // H
    model = build(kind, residual, moved=False, n_kv_head=G)
    total = C * V
    for l in range(L):
        spread = {"w2-scalar": 1, "w2-diagonal": D, "w2_overlap": D}.get(kind, 0)
        width = D  # of q̂ and k̂
        if kind.startswith("summed"):
            width = (l + 1) * D
        elif kind.startswith("w2"):
            width = D + (2 if kind == "w2_overlap" else 1 + spread)
        scoring = C * C + C * G * D + C * (H + G) * spread
        attn = C * G * D + C * C + T * H * (width + D)
        mlp = 3 * C * inner
        again = {None: 0, "attention": attn, "mlp": attn + mlp}[model.blocks[-1].summed]
        total += scoring + attn + mlp + (L - 1 - l) * again  # in the later layers
    assert model.flops_per_token() == 6 * total  # two a multiply-add, and twice that backward


@pytest.mark.parametrize("kind, method", [("w2-scalar", "m3.2+input"), ("w2_overlap", "m2"), ("summed-5.4", "m4.2")])
def test_a_compiled_loss_and_its_gradients_are_as_without(monkeypatch, kind, method):
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager_decomp_partition"))  # no C++
    torch.compiler.reset()
    model, outcomes = build(kind, method, n_layer=2), []
    idx = tokens(model, 2, 12)
    for compile in (True, False):
        loss = Loss(model, compile)(idx, idx)
        outcomes.append((loss, *torch.autograd.grad(loss, list(model.parameters()))))
    for found, expected in zip(*outcomes, strict=True):
        close(found, expected)


# -- precision -----------------------------------------------------------------------------------------------


@torch.no_grad()
def attention_error(kind, D, seed, T):
    """Return the relative error of an attention's output in bfloat16, against float64.

    All but scores and their softmax is exact in bfloat16: inputs are +1 and -1, W_V and W_O are identities.
    """
    torch.manual_seed(seed)
    C = 2 * D
    config = GPTConfig(n_head=2, n_embd=C, **KINDS[kind])
    attn = Block(config, layer=0).attn
    for p in attn.parameters():
        p.copy_(torch.randn(p.shape).mul(C**-0.5 if p.dim() == 2 else 2).bfloat16())
    for proj in (attn.v_proj, attn.o_proj):
        proj.weight.copy_(torch.eye(C))

    def output(attn, x):
        q, k, v = attn.project(x, rope_table(0, T, config.head_dim, config.rope_theta, x))
        return attn(*attn.score_vectors(q, k, x, ()), v).double()

    x = torch.randn(2, T, C).sign()
    exact = output(copy.deepcopy(attn).double(), x.double())
    with torch.autocast("cpu", torch.bfloat16):
        rough = output(attn, x)
    return ((rough - exact).norm() / exact.norm()).item()


@over(COVER)
@torch.no_grad()
def test_bfloat16_is_causal_and_near_the_reference(row):
    model = build(**row, dtype=torch.float32)
    idx = tokens(model, 2, 8)
    changed = torch.cat((idx[:, :5], (idx[:, 5:] + 1) % 19), dim=1)
    with torch.autocast(idx.device.type, torch.bfloat16):
        logits, others = model(idx)[0], model(changed)[0]
    assert torch.equal(logits[:, :5], others[:, :5])
    # What rounding the parameters alone changes. Autocast also rounds what is computed: at most 3.6 times as much, over
    # all kinds, methods and four seeds.
    exact, rounded = copy.deepcopy(model).double()(idx)[0], copy.deepcopy(model).bfloat16().double()(idx)[0]
    assert (logits - reference.reference_logits(model, idx)).norm() < 5 * (rounded - exact).norm()


# σ reaches 3. Scores are larger than q·k/√D, and so are their errors: up to twice at D = 128.
# Those of the overlap, μ·μ/(σ + σ), are the largest.
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize("kind, times, T", [
    *((kind, 2.5, T) for kind in ("w2-scalar", "w2-diagonal") for T in (128, 640)),  # plain products; the fused kernel
    ("w2_overlap", 3, 128),
])  # fmt: skip
def test_w2_in_bfloat16_is_nearly_as_exact_as_standard_attention(kind, times, T, D):
    error, standard = (sum(attention_error(name, D, seed, T) for seed in range(4)) for name in (kind, "standard"))
    assert 0 < error < times * standard and standard < 0.04


def test_w2_in_float16_keeps_large_keys():
    """Beyond a root mean square of 32, ‖k‖² itself would be infinite."""
    close(64 * norm_columns(torch.full((1, 64), 250.0).half()).double().sum(), torch.tensor(64 * 250.0**2), 2**-12)


def test_rope_turns_a_bfloat16_model_by_exact_angles():
    tables = [rope_table(1000, 1024, 8, 1e4, torch.empty(0, dtype=dtype)) for dtype in (torch.bfloat16, torch.float64)]
    for table, exact in zip(*tables):
        close(table.double(), exact, 2e-4)  # float32 has four digits after the point of 1000


@pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler")
@torch.no_grad()
def test_w2_in_bfloat16_keeps_the_remainder_of_its_bias_compiled():
    """A compiler that dropped a cast to bfloat16 and back would make the remainder's column of k̂ 0."""
    attn = build("w2-scalar", dtype=torch.float32).blocks[0].attn
    score_vectors = torch.compile(attn.score_vectors)
    x = torch.randn(2, 16, 32)
    q, k = torch.randn(2, 2, 4, 16, 8).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        _, k_hat = score_vectors(q, k, x, ())
    assert k_hat.dtype == torch.bfloat16
    vectors, norm = k_hat.double().split((8 + 1, 2), dim=-1)  # μ and σ; the two columns
    close(64 * norm.sum(dim=-1), vectors.square().sum(dim=-1), 2**-15)


@over(COVER[::6])
def test_autocast_trains(row):
    """The residual stream stays in float32, where a method replaces the residual or mixes several too."""
    model = build(**row, dtype=torch.float32).train()
    streams = []
    for block in model.blocks:
        block.register_forward_hook(lambda module, inputs, output: streams.append(output[0].dtype))
    idx = tokens(model, 2, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(idx, idx)[1]
    loss.backward()
    assert loss.dtype == torch.float32 and streams == [torch.float32] * 3
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


# -- the interface -------------------------------------------------------------------------------------------


def test_nanogpt_calls():
    """Do what nanoGPT's train.py and sample.py do with its model.py."""
    args = dict(n_layer=2, n_head=2, n_embd=32, block_size=16, bias=False, vocab_size=50, dropout=0.0)
    model = GPT(GPTConfig(**args))
    assert model.get_num_params() == sum(p.numel() for p in model.parameters())
    mfu = model.estimate_mfu(8, 0.1)
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    idx = torch.randint(50, (2, 16))
    _, loss = model(idx, idx)
    loss.backward()
    optimizer.step()
    checkpoint = {"model": model.state_dict(), "model_args": args}
    model = GPT(GPTConfig(**checkpoint["model_args"]))
    model.load_state_dict(checkpoint["model"])
    assert model.estimate_mfu(8, 0.1) == mfu > 0
    model.crop_block_size(8)
    assert model.estimate_mfu(8, 0.1) < mfu / 2
    assert model.generate(idx[:, :1], 20, temperature=0.8, top_k=200).shape == (2, 21)
    GPTConfig()  # every field has a default there


def test_no_token_is_drawn_beyond_the_vocabulary():
    """A model may have more rows than its tokenizer has tokens, to fill a multiple of 64."""
    model = build(vocab_size=64)
    idx = tokens(model, 50, 3) % 60
    for options in (dict(temperature=5.0), dict(temperature=0), dict(top_k=64)):
        assert model.generate(idx, 10, vocab_size=5, **options)[:, 3:].max() < 5


def test_every_parameter_is_updated_once():
    """Also an edit's: one matrix for queries and keys, one for the head and the embedding, and tensors of any shape."""
    model = build(tie_weights=True)
    for block in model.blocks:
        block.attn.k_proj.weight = block.attn.q_proj.weight
        block.attn.slopes = torch.nn.Parameter(torch.ones(4, 1, 1))
        block.attn.table = torch.nn.Parameter(torch.ones(5, 3))
    optimizer = model.configure_optimizers(0.1, 1e-3, (0.9, 0.95), "cpu")
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    assert len(updated) == len(set(updated)) and set(updated) == set(model.parameters())
    assert {p.dim() for p in optimizer.param_groups[0]["params"]} == {2, 3}  # as in nanoGPT, all of these decay


@pytest.mark.parametrize("field, value", [
    ("n_head", 5), ("n_head", 32), ("n_kv_head", 3), ("n_embd", 30), ("n_layer", -1), ("block_size", 0),
    ("n_layer", 1.5), ("n_embd", None), ("n_inner", 2.5), ("dropout", "0.1"), ("rope_theta", None),
    ("rope_theta", -3), ("norm_eps", -1), ("dropout", 5), ("qk_scale", 5.1), *((name, "other") for name in CHOICES),
])  # fmt: skip
def test_bad_settings_are_named(field, value):
    with pytest.raises(ConfigError) as error:
        GPTConfig(**settings("standard", "standard", **{field: value}))
    assert all(str(word) in str(error.value) for word in (field, value, *CHOICES.get(field, ())))


def test_widths_that_follow_from_others_follow_them():
    config = replace(GPTConfig(n_embd=768, n_head=12), n_embd=384, n_head=6)
    assert (config.mlp_width, config.kv_heads) == (1024, 6) and config == GPTConfig(n_embd=384, n_head=6)


@pytest.mark.parametrize("call, message", [
    (lambda model, idx: model(idx), "the context has 17 tokens; it must be 1 to block_size = 16"),
    (lambda model, idx: model(idx[:, :8], idx[:, :9]), r"targets are \(1, 9\); they must be \(1, 8\), as idx is"),
    (lambda model, idx: model.generate(idx, 1, temperature=-1), "temperature = -1 is invalid: it must be at least 0"),
    (lambda model, idx: model.crop_block_size(32), "block_size = 32 is invalid: it must be 1 to 16"),
    (lambda model, idx: build(residual="m1").blocks[1](model.embed(idx), None), "layer 1 needs .* it got 0 of them"),
])  # fmt: skip
def test_what_a_model_cannot_do_is_an_error(call, message):
    with pytest.raises(ValueError, match=message):
        call(build(), torch.zeros(1, 17, dtype=torch.long))


def test_tied_weights_stay_one_matrix():
    """... after loading with assign=True, which gives each name a tensor of its own."""
    model = build(tie_weights=True, dtype=torch.float32)
    loaded = GPT(model.config)
    loaded.load_state_dict(copy.deepcopy(model).state_dict(), assign=True)
    assert loaded.embed.weight is loaded.head.weight and torch.equal(loaded.head.weight, model.head.weight)


@pytest.mark.parametrize("kind", ["standard", "w2-scalar", "w2_overlap", "summed-5.5"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("method, n_layer", [("standard", 1), ("m1", 2)])  # under m1, the second layer's rerun counts
def test_what_dropout_drops(kind, dtype, tolerance, method, n_layer):
    """A share p of the attention weights and of both branches' outputs drops; what stays is divided by 1 - p."""
    p, seen = 0.3, {}
    model = build(kind, method, dtype=dtype, n_layer=n_layer, dropout=p).train()
    attn, mlp = model.blocks[0].attn, model.blocks[0].mlp
    for module in (attn, attn.v_proj, attn.o_proj, mlp, mlp.down_proj):
        module.register_forward_hook(lambda module, inputs, output: seen.update({module: (inputs[0], output)}))
    model(tokens(model, 500, 4))
    # the first token has one weight, 1, so that a head mixes to its value there
    mixed, values = seen[attn.o_proj][0][:, 0], seen[attn.v_proj][1][:, 0]
    pairs = (mixed, values), (seen[attn][1], seen[attn.o_proj][1]), (seen[mlp][1], seen[mlp.down_proj][1])
    for after, before in pairs:
        gone = after == 0
        close(after[~gone], before[~gone] / (1 - p), tolerance)
        assert gone.float().mean().item() == pytest.approx(p, abs=0.05)


@pytest.mark.parametrize("residual", ["m2", "m4.2"])
@pytest.mark.parametrize("kind", ["standard", "w2-scalar", "w2_overlap"])
def test_queries_and_keys_start_alike_without_an_identity_path(kind, residual):
    for keep_input in (False, True):
        for block in build(kind, residual, moved=False, n_kv_head=2, keep_input=keep_input).blocks[1:]:
            for queries, keys in (("q_proj", "k_proj"), ("sigma_q", "sigma_k")):
                if hasattr(block.attn, queries):
                    heads = getattr(block.attn, keys).weight.unflatten(0, (2, -1)).repeat_interleave(2, dim=0)
                    alike = torch.equal(getattr(block.attn, queries).weight, heads.flatten(0, 1))
                    assert alike != keep_input
