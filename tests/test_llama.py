"""model.py's standard block is Llama's: with the weights of a LlamaForCausalLM, it has its logits and gradients."""

import pytest
import torch
import torch.nn.functional as F
import transformers

from cover import perturb
from model import GPT, GPTConfig

NAMES = {  # Llama's names of modules -> ours
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
    "model.layers": "blocks",
    "input_layernorm": "attn_norm",
    "self_attn": "attn",
    "post_attention_layernorm": "mlp_norm",
}


def our_name(name):
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


@pytest.mark.parametrize("shape", [
    {},
    dict(n_kv_head=1),
    dict(tie_weights=True),
    dict(n_kv_head=2, bias=True, rope_theta=123.0, norm_eps=1e-3),
], ids=str)  # fmt: skip
def test_logits_and_gradients_are_those_of_a_llama(shape):
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
    )))  # fmt: skip
    model = GPT(config)
    model.load_state_dict({our_name(name): tensor for name, tensor in llama.state_dict().items()})

    idx = torch.randint(37, (2, 25), generator=torch.Generator().manual_seed(0))
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    expected = llama(idx[:, :-1]).logits
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    loss.backward()
    F.cross_entropy(expected.flatten(0, 1), idx[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    theirs = {our_name(name): parameter.grad for name, parameter in llama.named_parameters()}
    torch.testing.assert_close(gradients, theirs, rtol=1e-3, atol=1e-5)
