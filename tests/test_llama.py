"""model.py's GPT and Hugging Face's LlamaForCausalLM are one model: weights pass both ways, and the logits agree."""

import os
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GPT2Config, LlamaConfig, LlamaForCausalLM

from cover import FEW, perturb
from data.huggingface import from_llama, from_pretrained, save_pretrained, to_llama
from data.tokenizer import hf_tokenizer
from model import GPTConfig
from reference import reference_logits
from test_model import over

V, T = 37, 24
IDX = torch.randint(V, (2, T), generator=torch.Generator().manual_seed(0))

# what a Llama may vary
SHAPES = {
    "plain": {},
    "one key head": dict(n_kv_head=1),
    "tied": dict(tie_weights=True),
    "biased": dict(bias=True, n_kv_head=2),
    "all": dict(n_kv_head=2, tie_weights=True, bias=True, rope_theta=123.0, norm_eps=1e-3),
}


def ours(**changes):
    shape = dict(block_size=T, vocab_size=V, n_layer=3, n_head=4, n_embd=32, n_inner=48)
    return GPTConfig(**shape, **changes)


def theirs(**changes):
    """Return a random Llama of the same configuration, its biases and norms not left at 0 and 1."""
    c = ours(**changes)
    config = LlamaConfig(
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
    return perturb(LlamaForCausalLM(config)).eval()


def same(a, b):
    assert (a - b).abs().max() < 1e-4


@over(FEW)
@torch.no_grad()
def test_every_method_takes_llama_weights(row):
    config = ours(**{**row, "n_kv_head": 2, "bias": True, "tie_weights": False})
    weights = theirs(n_kv_head=2, bias=True).state_dict()
    back = to_llama(from_llama(weights, config))
    assert back.keys() == weights.keys()
    assert all(torch.equal(back[name], weights[name]) for name in weights)


@pytest.mark.parametrize("changes, named", [
    ({"lm_head.weight": torch.zeros(V, 33)}, "head.weight.*33"),
    ({"lm_head.weight": torch.zeros(())}, "head.weight"),  # it would broadcast
    ({"model.layers.3.self_attn.q_proj.weight": torch.zeros(32, 32)}, "model.layers.3.self_attn.q_proj.weight"),
])  # fmt: skip
def test_tensors_that_do_not_fit_are_named(changes, named):
    with pytest.raises(ValueError, match=named):
        from_llama(theirs().state_dict() | changes, ours())
    with pytest.raises(ValueError, match="norm.weight"):
        from_llama({}, ours())


@pytest.mark.parametrize("shape", SHAPES)
@torch.no_grad()
def test_folders_are_read_and_written(shape, tmp_path):
    llama = theirs(**SHAPES[shape])
    llama.save_pretrained(tmp_path / "theirs")
    model = from_pretrained(str(tmp_path / "theirs")).eval()
    assert model.config == ours(**SHAPES[shape])
    same(model(IDX)[0], llama(IDX).logits)
    same(reference_logits(model, IDX), llama(IDX).logits)  # an implementation of others, for what all other tests use
    save_pretrained(model, tmp_path / "ours")
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours").eval()
    same(again(IDX).logits, llama(IDX).logits)


def test_from_pretrained_overrides(tmp_path):
    theirs().save_pretrained(tmp_path)
    overrides = dict(dropout=0.25, residual="m1", attention="w2", sigma="diagonal", block_size=8)
    assert from_pretrained(str(tmp_path), **overrides).config == GPTConfig(**{**vars(ours()), **overrides})


@pytest.mark.parametrize("config, named", [
    (GPT2Config(), "gpt2"),
    (LlamaConfig(rope_parameters=dict(rope_type="linear", factor=2.0, rope_theta=10000.0)), "linear"),
    (LlamaConfig(head_dim=16), "head_dim"),
    (LlamaConfig(attention_bias=True), "bias"),
    (LlamaConfig(hidden_act="gelu"), "hidden_act = 'gelu'; only 'silu'"),
])  # fmt: skip
def test_from_pretrained_refuses_what_it_cannot_represent(tmp_path, config, named):
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=named):
        from_pretrained(str(tmp_path))


# -- a published Llama, in the folder LLAMA_DIR; `.ci/run newest` makes such a folder ------------------------

TEXT = """Before we proceed any further, hear me speak. You are all resolved rather to die than to famish? First, you
know Caius Marcius is chief enemy to the people. Let us kill him, and we'll have corn at our own price."""


@pytest.mark.skipif(not os.environ.get("LLAMA_DIR"), reason="LLAMA_DIR names no folder of a published Llama")
@torch.no_grad()
def test_a_published_llama_reads_and_writes_as_theirs():
    folder = str(Path(os.environ["LLAMA_DIR"]).resolve())
    model, llama = from_pretrained(folder).eval(), LlamaForCausalLM.from_pretrained(folder).eval()
    tokens = hf_tokenizer(folder).encode(TEXT)
    assert tokens == AutoTokenizer.from_pretrained(folder).encode(TEXT)
    idx = torch.tensor([tokens])
    expected = llama(idx, labels=idx)
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    largest = expected.logits.abs().max().item()
    torch.testing.assert_close(logits, expected.logits[:, :-1], rtol=1e-4, atol=1e-5 * largest)
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=0)
    assert loss < 6  # it has learned English
    written = llama.generate(idx, do_sample=False, min_new_tokens=40, max_new_tokens=40)
    assert torch.equal(model.generate(idx, 40, temperature=0), written)
