"""
model.py's GPT and Hugging Face's LlamaForCausalLM are one model: weights pass both ways, and the
logits agree; data/huggingface.py reads and writes its folders. Needs transformers; nothing is downloaded.
"""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported

import pytest
import torch

pytest.importorskip("transformers")
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from data.huggingface import from_llama, from_pretrained, save_pretrained, to_llama
from model import GPT, GPTConfig
from reference import columns, each, perturb, reference_logits
from test_model import over

torch.set_num_threads(1)

V, T, LAYERS = 37, 24, 3

# what a Llama may vary
SHAPES = {
    "plain": {},
    "one key head": dict(n_kv_head=1),
    "tied": dict(tie_weights=True),
    "biased": dict(bias=True, n_kv_head=2),
    "all": dict(n_kv_head=2, tie_weights=True, bias=True, rope_theta=123.0, norm_eps=1e-3),
}


def ours(**changes):
    """Our configuration."""
    return GPTConfig(
        **{**dict(block_size=T, vocab_size=V, n_layer=LAYERS, n_head=4, n_kv_head=4, n_embd=32, n_inner=48), **changes}
    )


def theirs(seed=0, **changes):
    """A random Llama of the same configuration, its biases and norms not left at 0 and 1."""
    c = ours(**changes)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=V,
            hidden_size=c.n_embd,
            intermediate_size=c.n_inner,
            num_hidden_layers=c.n_layer,
            num_attention_heads=c.n_head,
            num_key_value_heads=c.n_kv_head,
            max_position_embeddings=T,
            rope_parameters=dict(rope_type="default", rope_theta=c.rope_theta),
            rms_norm_eps=c.norm_eps,
            attention_bias=c.bias,
            mlp_bias=c.bias,
            tie_word_embeddings=c.tie_weights,
        )
    )
    return perturb(model, seed).eval()


def tokens(seed=0):
    return torch.randint(V, (2, T), generator=torch.Generator().manual_seed(seed))


def same(a, b, tolerance=1e-4):
    assert a.shape == b.shape and a.dtype == b.dtype == torch.float32
    assert (a - b).abs().max() < tolerance


@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_llama(shape):
    """The explicit float64 form, which every other test leans on, against an implementation of others."""
    model = perturb(GPT(ours(**SHAPES[shape])))
    llama = theirs(seed=1, **SHAPES[shape])
    llama.load_state_dict(to_llama(model), strict=False)
    with torch.no_grad():
        assert (reference_logits(model, tokens()) - llama(tokens()).logits).abs().max() < 1e-4


@over(each(columns()))
def test_every_method_takes_llama_weights(row):
    config = ours(**{**row, "n_kv_head": 2, "bias": True, "tie_weights": False})
    weights = theirs(n_kv_head=2, bias=True).state_dict()
    model = from_llama(weights, config).eval()
    back = to_llama(model)
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)
    idx = tokens()[:, :3]
    with torch.no_grad():
        found = model(idx)[0]
    assert torch.isfinite(found).all()
    assert (found - reference_logits(model, idx)).abs().max() < 1e-3


@pytest.mark.parametrize("name, here", [
    ("model.layers.2.self_attn.k_proj.bias", "blocks.2.attn.k_proj.bias"),
    ("model.norm.weight", "norm.weight"),
    ("lm_head.weight", "head.weight"),
])  # fmt: skip
def test_missing_and_misshapen_tensors_are_named(name, here):
    weights = theirs(bias=True).state_dict()
    with pytest.raises(ValueError, match=here):
        from_llama({k: v for k, v in weights.items() if k != name}, ours(bias=True))
    wrong = {**weights, name: torch.zeros(*weights[name].shape[:-1], weights[name].shape[-1] + 1)}
    with pytest.raises(ValueError, match=f"(?s)(?=.*{here})(?=.*{weights[name].shape[-1] + 1})"):
        from_llama(wrong, ours(bias=True))
    with pytest.raises(ValueError, match=here):  # a scalar would broadcast
        from_llama({**weights, name: torch.zeros(())}, ours(bias=True))


@pytest.mark.parametrize(
    "name",
    ["model.layers.3.self_attn.q_proj.weight", "model.layers.0.self_attn.q_norm.weight", "transformer.wte.weight"],
)
def test_extra_tensors_are_named(name):
    with pytest.raises(ValueError, match=name):
        from_llama({**theirs().state_dict(), name: torch.zeros(32)}, ours())


# ----------------------------------------------------------------------------------------------
# folders


@pytest.mark.parametrize("shape", SHAPES)
def test_from_pretrained_reads_a_folder(shape, tmp_path):
    llama = theirs(**SHAPES[shape])
    llama.save_pretrained(tmp_path)
    model = from_pretrained(str(tmp_path)).eval()
    expected = ours(**SHAPES[shape])
    for field in (
        "block_size",
        "vocab_size",
        "n_layer",
        "n_head",
        "n_embd",
        "n_inner",
        "bias",
        "rope_theta",
        "norm_eps",
        "tie_weights",
    ):
        assert getattr(model.config, field) == getattr(expected, field), field
    assert model.config.attention == model.config.residual == "standard" and model.config.dropout == 0
    with torch.no_grad():
        same(model(tokens())[0], llama(tokens()).logits)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_saved_model_reads_back(shape, tmp_path):
    model = perturb(GPT(ours(**SHAPES[shape]))).eval()
    save_pretrained(model, tmp_path / "saved")
    again = from_pretrained(tmp_path / "saved")
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters()))
    with torch.no_grad():
        same(model(tokens())[0], LlamaForCausalLM.from_pretrained(tmp_path / "saved").eval()(tokens()).logits)


def test_from_pretrained_overrides(tmp_path):
    llama = theirs()
    llama.save_pretrained(tmp_path)
    overrides = dict(dropout=0.25, residual="m1", attention="w2", sigma="diagonal", block_size=8)
    model = from_pretrained(str(tmp_path), **overrides).eval()
    for field, value in overrides.items():
        assert getattr(model.config, field) == value
    with torch.no_grad():
        idx = tokens()[:, :8]
        assert (model(idx)[0] - reference_logits(model, idx)).abs().max() < 1e-3
        assert (model(idx)[0] - llama(idx).logits).abs().max() > 1e-2


def test_from_pretrained_names_a_model_that_is_no_llama(tmp_path):
    GPT2LMHeadModel(GPT2Config(vocab_size=V, n_positions=T, n_embd=16, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="gpt2"):
        from_pretrained(str(tmp_path))


@pytest.mark.parametrize("changes, named", [
    (dict(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0)), "linear"),
    (dict(head_dim=16), "head_dim"),
    (dict(attention_bias=True), "bias"),
    (dict(hidden_act="gelu"), "hidden_act = 'gelu'; only 'silu'"),
])  # fmt: skip
def test_from_pretrained_refuses_a_llama_it_cannot_represent(tmp_path, changes, named):
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=T,
        **changes,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named):
        from_pretrained(str(tmp_path))
