"""model.py's standard block is Llama's: with the same weights, Hugging Face's LlamaForCausalLM has the same logits."""

import pytest
import torch

from cover import perturb
from model import GPT, GPTConfig

transformers = pytest.importorskip("transformers")

NAMES = {  # Llama's names of modules -> ours
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "model.layers": "blocks",
    "input_layernorm": "attn_norm",
    "self_attn": "attn",
    "post_attention_layernorm": "mlp_norm",
}


@pytest.mark.parametrize("shape", [
    {},
    dict(n_kv_head=1),
    dict(tie_weights=True),
    dict(n_kv_head=2, bias=True, rope_theta=123.0, norm_eps=1e-3),
], ids=str)  # fmt: skip
@torch.no_grad()
def test_logits_are_those_of_a_llama(shape):
    config = GPTConfig(block_size=24, vocab_size=37, n_layer=3, n_head=4, n_embd=32, n_inner=48, **shape)
    llama = perturb(transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=37,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=config.kv_heads,
        rope_parameters=dict(rope_type="default", rope_theta=config.rope_theta),
        rms_norm_eps=config.norm_eps,
        attention_bias=config.bias,
        mlp_bias=config.bias,
        tie_word_embeddings=config.tie_weights,
    ))).eval()  # fmt: skip
    weights = {}
    for name, tensor in llama.state_dict().items():
        for theirs, ours in NAMES.items():
            name = name.replace(theirs, ours)
        weights[name] = tensor
    model = GPT(config).eval()
    model.load_state_dict(weights)  # which have the same names and shapes
    idx = torch.randint(37, (2, 24), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(idx)[0], llama(idx).logits, rtol=1e-4, atol=1e-4)
