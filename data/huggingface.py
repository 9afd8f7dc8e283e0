"""Llama models of Hugging Face and their tokenizers, in and out: a folder or a name on the hub -> GPT -> a folder.

Needs transformers, which is imported at first use.
"""

import os
import re
import shutil
from pathlib import Path

import torch

from data.console import UserError
from data.tokenizer import BPETokenizer, CharTokenizer, HFTokenizer
from model import GPT, GPTConfig

# parts of names here that a Hugging Face Llama checkpoint calls otherwise
LLAMA_NAMES = {
    "embed": "model.embed_tokens",
    "blocks": "model.layers",
    "attn_norm": "input_layernorm",
    "attn": "self_attn",
    "mlp_norm": "post_attention_layernorm",
    "norm": "model.norm",
    "head": "lm_head",
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


# -- tensors -------------------------------------------------------------------------------------------------


def llama_names(model):
    """Return {name in a Hugging Face Llama checkpoint: name here} of all that a Llama has: projections, norms, tables."""
    names = [name for name in model.state_dict() if name.split(".")[-2].endswith(("_proj", "norm", "embed", "head"))]
    return {".".join(LLAMA_NAMES.get(part, part) for part in name.split(".")): name for name in names}


def to_llama(model):
    """Return the tensors of a Hugging Face Llama checkpoint, copied.

    What Llama lacks (σ, τ, a, b and the mixing logits) is left out, so only standard attention and residuals compute
    the same there.
    """
    tensors = model.state_dict()
    return {llama: tensors[name].clone() for llama, name in llama_names(model).items()}


def from_llama(state_dict, config) -> GPT:
    """Return a model with the tensors of a Hugging Face Llama checkpoint, under any attention and residual.

    What Llama lacks has its initial value. Raises UserError for a tensor that is missing, unknown or of another shape
    than the config's. With tied weights `lm_head.weight` may be missing.
    """
    model, given = GPT(config), dict(state_dict)
    if config.tie_weights:
        embed = given.get("model.embed_tokens.weight")
        if not torch.equal(given.setdefault("lm_head.weight", embed), embed):
            raise UserError("lm_head.weight differs from model.embed_tokens.weight: set tie_weights = False")
    names, tensors = llama_names(model), model.state_dict()
    differing = sorted(names.keys() ^ given.keys())
    if differing:
        name = differing[0]
        raise UserError(f"the Llama checkpoint {'lacks' if name in names else 'has'} {name}, unlike this config")
    for llama, name in names.items():
        if given[llama].shape != tensors[name].shape:
            shapes = f"{tuple(given[llama].shape)}, the config needs {tuple(tensors[name].shape)}"
            raise UserError(f"{llama} has shape {shapes}")
        tensors[name].copy_(given[llama])
    return model


# -- folders and the hub -------------------------------------------------------------------------------------


def import_transformers():
    try:
        import transformers
    except ImportError:
        raise UserError("models of Hugging Face need transformers: pip install 'transformers>=5.17'") from None
    return transformers


def from_pretrained(name_or_path, **override) -> GPT:
    """Reads a Llama from a folder or the Hugging Face hub.

    `override` may set any field of the config that keeps the tensors' shapes, such as dropout, attention or residual.
    Raises UserError for a model that is not a plain Llama.
    """
    transformers = import_transformers()

    def read(kind, **options):
        try:
            return kind.from_pretrained(name_or_path, **options)
        except Exception as error:  # of transformers, safetensors and the hub, each with types of its own
            raise UserError(f"{name_or_path}: not a model that transformers can read: {reason(error)}") from error

    theirs = read(transformers.AutoConfig)
    if theirs.model_type != "llama":
        raise UserError(f"{name_or_path} is a {theirs.model_type!r} model; only 'llama' ones can be read")
    rope = theirs.rope_parameters
    plain = {
        "rope_type": (rope["rope_type"], "default"),
        "head_dim": (theirs.head_dim, theirs.hidden_size // theirs.num_attention_heads),
        "hidden_act": (theirs.hidden_act, "silu"),
        "mlp_bias": (theirs.mlp_bias, theirs.attention_bias),
    }
    for field, (value, needed) in plain.items():
        if value != needed:
            raise UserError(f"{name_or_path} has {field} = {value!r}; only {needed!r} can be represented here")
    fields = {ours: getattr(theirs, name) for ours, name in LLAMA_CONFIG.items()}
    config = GPTConfig(**{**fields, "rope_theta": float(rope["rope_theta"]), **override})
    llama, found = read(transformers.LlamaForCausalLM, output_loading_info=True)
    for problem in ("missing", "unexpected", "mismatched"):  # for which transformers takes random numbers
        names = sorted(map(str, found[f"{problem}_keys"]))
        if names:
            raise UserError(f"{name_or_path}: its weights are not those of its config: {names[0]} is {problem}")
    return from_llama(llama.state_dict(), config)


def save_pretrained(model, folder, tokenizer=None):
    """Writes a new folder that transformers, and `from_pretrained`, read as a Llama, and any of our tokenizers with it.

    Whole or not at all. Raises UserError for a folder that is there, for an attention or a residual that a Llama does
    not have, and where the files cannot be written.
    """
    folder = Path(folder)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise UserError(f"{folder} is there already: name a new folder")
    for field in ("attention", "residual"):
        if getattr(model.config, field) != "standard":
            instead = "to share it copy model.py and the checkpoint, as README.md shows"
            raise UserError(f"{field} = {getattr(model.config, field)!r} is nothing that a Llama has: {instead}")
    transformers = import_transformers()
    fields = {name: getattr(model.config, ours) for ours, name in LLAMA_CONFIG.items()}
    rope = {"rope_type": "default", "rope_theta": model.config.rope_theta}
    ends = {"bos_token_id": None, "eos_token_id": None}  # what they are is for the tokenizer to know
    config = transformers.LlamaConfig(**fields, **ends, mlp_bias=model.config.bias, rope_parameters=rope)
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    try:
        transformers.LlamaForCausalLM(config).save_pretrained(unfinished, state_dict=to_llama(model))
        if tokenizer:
            to_transformers(tokenizer).save_pretrained(unfinished)
        unfinished.rename(folder)
    except Exception as error:  # safetensors has types of its own
        raise UserError(f"{folder}: could not be written: {reason(error)}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def to_transformers(tokenizer):
    """Any of our tokenizers as one of transformers that gives the same tokens and the same text."""
    options = {"clean_up_tokenization_spaces": False}
    if isinstance(tokenizer, HFTokenizer):
        theirs = tokenizer.tokenizer
        if tokenizer.prompt_start:
            options["bos_token"] = theirs.id_to_token(tokenizer.prompt_start[0])
    else:
        theirs = {CharTokenizer: of_characters, BPETokenizer: of_byte_pairs}[type(tokenizer)](tokenizer)
        options["split_special_tokens"] = True  # what looks like one is the plain text it is, as it is here
    return import_transformers().PreTrainedTokenizerFast(tokenizer_object=theirs, **options)


def of_characters(tokenizer):
    """A word for each character, and an error for any other."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    theirs = Tokenizer(models.WordLevel({character: i for i, character in enumerate(tokenizer.chars)}))
    theirs.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    theirs.decoder = decoders.Fuse()
    return theirs


def of_byte_pairs(tokenizer):
    """The same ranks, split pattern and special tokens, by the converter for tiktoken's files."""
    from transformers.convert_slow_tokenizer import TikTokenConverter

    # Python and Rust know \x80, \u2e80 and \U0010ffff; Rust and Oniguruma, which splits there, know \x{10ffff}
    pattern = re.sub(r"\\(?:x(\w{2})|u(\w{4})|U(\w{8}))", r"\\x{\1\2\3}", tokenizer.pattern)
    special = sorted(tokenizer.special_tokens, key=tokenizer.special_tokens.get)
    converter = TikTokenConverter(pattern=pattern, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda path: tokenizer.ranks  # there is no file
    return converter.converted()


def reason(error):
    """What an error says, in one short line."""
    return " ".join(str(error).split())[:200]
