"""A GPT of any kind, and its tokenizer -> a folder that transformers reads."""

import copy
import inspect
import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from config.runtime.errors import UserError, file_errors
from data.huggingface.llama import LLAMA_CONFIG, to_llama
from data.tokenizer import END, BPETokenizer, CharTokenizer, HFTokenizer, import_transformers


@file_errors()
def save_pretrained(model, folder, tokenizer=None):
    """Write a new folder that transformers reads: a Llama if possible, else the weights and the model's code.

    The tokenizer is included. The folder is written completely or not at all.
    """
    folder = Path(folder).absolute()
    if folder.exists():
        raise UserError(f"{folder} already exists: name a new folder")
    transformers = import_transformers()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder.parent) as temporary:
        unfinished = Path(temporary, folder.name)
        theirs = to_transformers(tokenizer) if tokenizer else None
        ends = {name: getattr(theirs, name, None) for name in ("bos_token_id", "eos_token_id")}
        llama = as_llama(model, ends)
        if llama:
            llama.save_pretrained(unfinished)
        else:
            write_with_code(model, unfinished)
        if theirs:
            theirs.save_pretrained(unfinished)
            ends["suppress_tokens"] = list(range(tokenizer.vocab_size, model.config.vocab_size)) or None  # spare rows
        transformers.GenerationConfig(**ends).save_pretrained(unfinished)
        unfinished.rename(folder)


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
    try:
        llama.load_state_dict(tensors)
    except RuntimeError:  # its matrices have other shapes
        return None
    rng = torch.Generator().manual_seed(0)
    idx = torch.randint(config.vocab_size, (1, min(config.block_size, 2048)), generator=rng)
    ours = copy.deepcopy(model).to("cpu", torch.float32).eval()(idx)[0]
    difference = (llama.eval()(idx).logits - ours).abs().max()
    return llama.to(model.head.weight.dtype) if difference < 1e-4 * ours.abs().max() else None


def write_with_code(model, folder):
    """Write the weights of a model of any kind, the file that defines it, and modeling_gpt.py, which wraps it."""
    from safetensors.torch import save_file

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
