"""A Llama of Hugging Face, from a folder, the hub or a state dict -> GPT, of any attention and residual."""

from config.runtime.checkpoints import check_tokens
from config.runtime.errors import UserError
from config.runtime.models import SHAPE, load_weights
from data.tokenizer import hf_tokenizer, import_transformers, reason
from model import GPT, GPTConfig

# our module names -> Llama's, for the whole model and for each layer
LLAMA_MODEL = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
LLAMA_LAYER = {
    "attn_norm": "input_layernorm",
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.o_proj": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate_proj": "mlp.gate_proj",
    "mlp.up_proj": "mlp.up_proj",
    "mlp.down_proj": "mlp.down_proj",
}
# the fields of a Hugging Face LlamaConfig, by those of GPTConfig
LLAMA_CONFIG = {
    "block_size": "max_position_embeddings",
    "vocab_size": "vocab_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_kv_head": "num_key_value_heads",
    "n_embd": "hidden_size",
    "n_inner": "intermediate_size",
    "bias": "attention_bias",
    "norm_eps": "rms_norm_eps",
    "tie_weights": "tie_word_embeddings",
}


def llama_names(model):
    """Return {name in a Hugging Face Llama checkpoint: name here} of all that a Llama has, and nothing else."""
    modules = {theirs: ours for ours, theirs in LLAMA_MODEL.items()}
    for l in range(model.config.n_layer):
        modules |= {f"model.layers.{l}.{theirs}": f"blocks.{l}.{ours}" for ours, theirs in LLAMA_LAYER.items()}
    names = {f"{llama}.{kind}": f"{ours}.{kind}" for llama, ours in modules.items() for kind in ("weight", "bias")}
    here = model.state_dict()
    return {llama: ours for llama, ours in names.items() if ours in here}


def to_llama(model):
    """Return the tensors of a Hugging Face Llama checkpoint, copied. What Llama lacks is left out."""
    tensors = model.state_dict()
    return {llama: tensors[name].clone() for llama, name in llama_names(model).items()}


def from_llama(state_dict, config) -> GPT:
    """Return a model with the tensors of a Hugging Face Llama checkpoint, under any method.

    What Llama lacks has its initial value. With tied weights `lm_head.weight` may be missing.
    """
    model = GPT(config)
    ours, names = model.state_dict(), llama_names(model)
    weights = {names.get(name, name): tensor for name, tensor in state_dict.items()}
    weights |= {name: ours[name] for name in ours.keys() - names.values()}
    if config.tie_weights:
        weights.setdefault("head.weight", weights.get("embed.weight"))
    load_weights(model, weights, "the Llama checkpoint")
    return model


def from_pretrained(name_or_path, **override) -> GPT:
    """Return the Llama of a folder or of the Hugging Face hub.

    `override` may set any field of the config that keeps the tensors' shapes, such as dropout, attention or residual.
    """
    transformers = import_transformers()

    def read(load):
        try:
            return load(name_or_path)
        except Exception as error:  # transformers, safetensors and the hub raise many types
            raise UserError(f"{name_or_path}: not a model that transformers can read: {reason(error)}") from error

    kind = read(transformers.PreTrainedConfig.get_config_dict)[0].get("model_type")
    if kind != "llama":
        raise UserError(f"{name_or_path} is a {kind!r} model; only 'llama' is supported")
    theirs = read(transformers.LlamaConfig.from_pretrained)
    rope = theirs.rope_parameters
    plain = {
        "rope_type": (rope["rope_type"], "default"),
        "head_dim": (theirs.head_dim, theirs.hidden_size // theirs.num_attention_heads),
        "hidden_act": (theirs.hidden_act, "silu"),
        "mlp_bias": (theirs.mlp_bias, theirs.attention_bias),
    }
    for field, (value, needed) in plain.items():
        if value != needed:
            raise UserError(f"{name_or_path} has {field} = {value!r}; only {needed!r} is supported")
    fields = {ours: getattr(theirs, name) for ours, name in LLAMA_CONFIG.items()}
    config = GPTConfig(**{**fields, "rope_theta": float(rope["rope_theta"]), **override})
    return from_llama(read(transformers.LlamaForCausalLM.from_pretrained).state_dict(), config)


def load_llama(name, data) -> dict:
    """Return the Llama that hf:NAME names in the form of a checkpoint: it has a shape, but no method.

    Its tokens must be those of the data.
    """
    path = name.removeprefix("hf:")
    check_tokens(data, hf_tokenizer(path).state(), path, name)  # before the weights are downloaded
    model = from_pretrained(path)
    config = {field: getattr(model.config, field) for field in (*SHAPE, "vocab_size")}
    return {"path": path, "config": config, "model": model.state_dict()}
