"""Models of Hugging Face: a Llama, from a folder or the hub -> GPT; a GPT of any kind, and its tokenizer -> a folder.

Needs transformers, which is imported at first use.
"""

import copy
import inspect
import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import torch

from config.runtime.checks import SHAPE, of_model
from config.runtime.errors import UserError
from config.runtime.run import check_tokens, load_weights
from data.tokenizer import END, BPETokenizer, CharTokenizer, HFTokenizer, hf_tokenizer, import_transformers, reason
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


def begin_from_llama(settings, data) -> GPT:
    """Return a Llama (hf:NAME) with the settings' attention and residual. Put its shape into the settings."""
    name = settings["init_from"].removeprefix("hf:")
    check_tokens(data, hf_tokenizer(name).state(), name, settings["init_from"])
    method = {field: value for field, value in of_model(settings).items() if field not in SHAPE}
    model = from_pretrained(name, **method)
    settings |= {field: getattr(model.config, field) for field in SHAPE}
    return model


def save_pretrained(model, folder, tokenizer=None):
    """Write a new folder that transformers reads: a Llama if possible, else the weights and the model's code.

    The tokenizer is included. The folder is written completely or not at all.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise UserError(f"{folder} already exists: name a new folder")
    import_transformers()
    from safetensors import SafetensorError

    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        theirs = to_transformers(tokenizer) if tokenizer else None
        ends = {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id")}
        llama = as_llama(model, ends)
        if llama:
            llama.save_pretrained(unfinished)
        else:
            write_with_code(model, unfinished, ends)
        if theirs:
            theirs.save_pretrained(unfinished)
        unfinished.rename(folder)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder}: could not be written: {reason(error)}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


@torch.no_grad()
def as_llama(model, ends):
    """Return the Llama that computes what `model` does, with `ends` as its first and last token, or None.

    Names of parameters and the logits of a whole context decide it: model.py may have been edited.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config, tensors = model.config, to_llama(model)
    if len(tensors) < len(model.state_dict()):  # a Llama has no place for the rest
        return None
    given = {theirs: getattr(config, ours) for ours, theirs in LLAMA_CONFIG.items()}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    llama = LlamaForCausalLM(LlamaConfig(**given, **ends, mlp_bias=config.bias, rope_parameters=rope))
    llama.load_state_dict(tensors)
    rng = torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (1, min(config.block_size, 2048)), generator=rng)
    ours = copy.deepcopy(model).to("cpu", torch.float32).eval()(idx)[0]
    difference = (llama.eval()(idx).logits - ours).abs().max()
    return llama.to(model.head.weight.dtype) if difference < 1e-4 * ours.abs().max() else None


def write_with_code(model, folder, ends):
    """Write the weights of a model of any kind, the file that defines it, and modeling_gpt.py, which wraps it."""
    from safetensors.torch import save_file
    from transformers import GenerationConfig

    weights = model.state_dict()
    lost = sorted(name for name, _ in model.named_buffers() if name not in weights)
    if lost:  # transformers gives it arbitrary values
        raise UserError(f"the buffer {lost[0]} is not saved with the weights: register it as persistent")
    folder.mkdir(parents=True)
    shutil.copy(inspect.getfile(type(model)), folder / "model.py")
    shutil.copy(Path(__file__).with_name("modeling_gpt.py"), folder)
    code = {"AutoConfig": "GPTVariantConfig", "AutoModelForCausalLM": "GPTVariantForCausalLM"}
    config = {
        "model_type": "gpt_variant",
        "architectures": [code["AutoModelForCausalLM"]],
        "auto_map": {auto: f"modeling_gpt.{name}" for auto, name in code.items()},
        "dtype": str(model.head.weight.dtype).removeprefix("torch."),
        **asdict(model.config),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    GenerationConfig(**ends).save_pretrained(folder)
    tensors = {f"gpt.{name}": tensor.contiguous() for name, tensor in weights.items()}
    if model.config.tie_weights:
        del tensors["gpt.head.weight"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def to_transformers(tokenizer):
    """Return any of our tokenizers as one of transformers that gives the same tokens and the same text.

    The token that separates documents becomes its BOS token and, if it is <|endoftext|>, also its EOS token.
    """
    options = {"clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, HFTokenizer):
        theirs = tokenizer.tokenizer
    else:
        theirs = {CharTokenizer: of_characters, BPETokenizer: of_byte_pairs}[type(tokenizer)](tokenizer)
        options["split_special_tokens"] = True  # text that looks like one stays plain text, as it does here
    if tokenizer.document_start:
        options["bos_token"] = theirs.id_to_token(tokenizer.document_start[0])
        if options["bos_token"] == END:
            options["eos_token"] = END
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=theirs, **options)


def of_characters(tokenizer):
    """Return a tokenizer with a word for each character, and an error for any other."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    theirs = Tokenizer(models.WordLevel({character: i for i, character in enumerate(tokenizer.chars)}))
    theirs.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    theirs.decoder = decoders.Fuse()
    return theirs


def of_byte_pairs(tokenizer):
    """Return a tokenizer of the same ranks, split pattern and special tokens, by the converter for tiktoken's files."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # Python and Rust know \x80, \u2e80 and \U0010ffff; Rust and Oniguruma, which splits there, know \x{10ffff}
    pattern = re.sub(r"\\(?:x(\w{2})|u(\w{4})|U(\w{8}))", r"\\x{\1\2\3}", tokenizer.pattern)
    special = sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.get)
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda path: tokenizer.ranks  # there is no file
    return converter.converted()
