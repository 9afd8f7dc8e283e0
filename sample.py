"""
Writes text with a trained model: `python sample.py` takes the newest run.

Every setting below can be given as --name=value, and --help lists them. The checkpoint is all
that is needed; the data folder may be gone.
"""

import math
import os
import pickletools
import shutil
import sys
import zipfile
from pathlib import Path

import torch

from config import check_range, pick_device, quiet_pipe, read_settings, user_errors
from data import HFTokenizer, first_tokens, read_text, tokenizer_from_state
from model import GPT, GPTConfig

# -----------------------------------------------------------------------------
out_dir = ""  # folder of the run; empty: the newest one in out/
checkpoint = "best"  # best: lowest validation loss, latest: last saved
start = ""  # text to continue, or FILE:path to read it from a file; empty: a new line
num_samples = 3  # texts to write
max_new_tokens = 500  # tokens in each
temperature = 0.8  # 1.0: as the model learned, lower: safer, 0: always the likeliest token
top_k = 0  # draw from the k likeliest tokens only; 0: from all
top_p = 1.0  # draw from the fewest tokens whose probabilities sum to p
seed = 1337  # same seed, same text
device = "auto"  # auto, cpu, cuda, cuda:1, mps
export = ""  # a new folder to write the model to, as a Llama that transformers reads; then nothing is sampled
# -----------------------------------------------------------------------------

CHECKPOINT_VERSION = 4
CHECKPOINT_TYPES = {"collections OrderedDict", "torch._utils _rebuild_tensor_v2", "torch FloatStorage"}
CHECKPOINT_PARTS = {
    **dict.fromkeys(("config", "settings", "data", "tokenizer", "model", "scaler"), dict),
    **dict(step=int, bad_steps=int, val_loss=float, optimizers=list, machine=str),
}


def newest_run():
    """The folder in out/ whose checkpoint was saved last; ValueError if there is none."""
    saved = [*Path("out").glob("*/ckpt.pt"), *Path("out").glob("*/best.pt")]
    if not saved:
        raise ValueError("out/ holds no run to sample from: train one first, python train.py config/m1_shakespeare.py")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


def find_checkpoint(folder):
    """best.pt or ckpt.pt of a run; the latter too if the run was stopped before it was first evaluated."""
    best, latest = folder / "best.pt", folder / "ckpt.pt"
    return best if checkpoint == "best" and best.exists() else latest


def load_checkpoint(path):
    """What train.py saved to `path`, on the CPU; ValueError if it is not whole.

    The file may come from a stranger: no code in it is run, and it takes no more memory than its size. So it must
    be made of what ours are made of, plain values and tensors, and nothing in it be compressed.
    """
    try:
        with zipfile.ZipFile(path) as parts:
            entries = parts.infolist()
            size = sum(entry.file_size for entry in entries)
            if min(entry.header_offset for entry in entries) > 0 or size > path.stat().st_size:
                raise ValueError("a zip file at the end of something else, or compressed")
            (pickle,) = (entry for entry in entries if entry.filename.lower().endswith(".pkl"))
            opcodes = pickletools.genops(parts.read(pickle))
            types = {value for opcode, value, _ in opcodes if "GLOBAL" in opcode.name}
        if not types <= CHECKPOINT_TYPES:
            raise ValueError("made of other things")
        saved = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise ValueError(f"{path}: no such checkpoint") from None
    except PermissionError:
        raise ValueError(f"{path}: you may not read it") from None
    except Exception:  # damaged bytes make torch.load fail in all sorts of ways
        raise ValueError(f"{path}: damaged, or not a checkpoint of train.py") from None
    version = saved.get("version") if isinstance(saved, dict) else None
    if type(version) is not int or version != CHECKPOINT_VERSION:
        raise ValueError(f"{path}: a checkpoint of version {version!r}; this program reads {CHECKPOINT_VERSION}")
    for part, kind in CHECKPOINT_PARTS.items():
        if not isinstance(saved.get(part), kind):
            raise ValueError(f"{path}: damaged: its {part!r} is missing or not a {kind.__name__}")
    for part, least in {"step": 1, "bad_steps": 0, "val_loss": -math.inf}.items():
        if not saved[part] >= least:  # nan is not
            raise ValueError(f"{path}: damaged: its {part!r} is {saved[part]}")
    for fact, kind in {"source": str, "warning": str, "sha256": dict}.items():
        if not isinstance(saved["data"].get(fact), kind):
            raise ValueError(f"{path}: damaged: its data lacks {fact!r}")
    return saved


def check_tensors(given, wanted):
    """ValueError unless the tensors `given` are as the ones `wanted`, by the same names, and all numbers are finite."""
    if given.keys() != wanted.keys():
        raise ValueError(f"{min(given.keys() ^ wanted.keys(), key=str)!r} is missing or unknown")
    for name, like in wanted.items():
        tensor = given[name]
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{name} is not a tensor")
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise ValueError(f"{name} is {tuple(tensor.shape)} of {tensor.dtype}, not {tuple(like.shape)} of {like.dtype}")
        # a view that repeats a few numbers would be small on disk and huge in memory
        if tensor.layout != torch.strided or not tensor.is_contiguous() or not tensor.isfinite().all():
            raise ValueError(f"{name} has numbers that are not finite, or not all that its shape needs")


def restore_model(saved, path):
    """The model of a checkpoint, with its weights; ValueError if they do not fit its config."""
    try:
        config = GPTConfig(**saved["config"])
        if config.n_layer > len(saved["model"]):
            raise ValueError(f"too few weights for n_layer = {config.n_layer}")
        with torch.device("meta"):  # takes no memory, whatever the config asks for
            wanted = GPT(config).state_dict()
        check_tensors(saved["model"], wanted)
    except (RuntimeError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{path}: damaged: the weights do not fit the config saved with them: {reason}") from None
    model = GPT(config)
    model.load_state_dict(saved["model"])
    return model


def restore_tokenizer(saved, path):
    """The tokenizer of a checkpoint; ValueError if it is damaged or not the model's."""
    try:
        tokenizer = tokenizer_from_state(saved["tokenizer"])
    except ValueError as error:
        raise ValueError(f"{path}: damaged: {error}") from None
    spare = saved["config"]["vocab_size"] - tokenizer.vocab_size  # which Hugging Face's models may have
    if spare < 0 or spare > 0 and not isinstance(tokenizer, HFTokenizer):
        raise ValueError(f"{path}: damaged: its tokenizer has {tokenizer.vocab_size} tokens, its model does not")
    return tokenizer


def read_start(start, tokenizer):
    """The text to continue, and its tokens."""
    if start.startswith("FILE:"):
        start = read_text(start.removeprefix("FILE:"))
    return start, tokenizer.encode(start) or first_tokens(tokenizer)


def write_text(model, tokenizer, tokens, max_new_tokens, generator, **how):
    """Prints the continuation of `tokens` as it is made. `how`: temperature, top_k, top_p of GPT.stream."""
    idx = torch.tensor([tokens], device=model.embed.weight.device)
    drawn = (token.item() for token in model.stream(idx, max_new_tokens, generator=generator, **how))
    for text in tokenizer.decode_stream(drawn, tokens):
        print(text, end="", flush=True)
    print()


def export_llama(model, tokenizer, folder):
    """Writes a folder that transformers reads, whole or not at all; ValueError if it is there or the model no Llama."""
    if folder.exists():
        raise ValueError(f"export = {folder} is there already: name a new folder")
    unfinished = folder.with_name(f"{folder.name}.{os.getpid()}.tmp")
    kind = "without its tokenizer, which is none of Hugging Face's and stays in the checkpoint"
    try:
        model.save_pretrained(unfinished)
        if isinstance(tokenizer, HFTokenizer):
            tokenizer.save_pretrained(unfinished)
            kind = "with its tokenizer"
        unfinished.rename(folder)
    except (ImportError, OSError, ValueError):
        raise
    except Exception as error:  # safetensors has types of its own
        raise ValueError(f"{folder}: could not be written: {error}") from None
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"{folder}: a Llama of {model.get_num_params():,} parameters, {kind}")


def main():
    with user_errors():
        if checkpoint not in ("best", "latest"):
            raise ValueError(f"checkpoint = {checkpoint!r} does not work: it must be best or latest")
        check_range(globals(), "num_samples max_new_tokens", 1, 2**63)
        check_range(globals(), "top_k seed", 0, 2**63)
        path = find_checkpoint(Path(out_dir) if out_dir else newest_run())
        on = pick_device(device)
        saved = load_checkpoint(path)
        model = restore_model(saved, path).to(on).eval()
        tokenizer = restore_tokenizer(saved, path)
        if export:
            return export_llama(model, tokenizer, Path(export))
        text, tokens = read_start(start, tokenizer)

        sys.stdout.reconfigure(encoding="utf-8", errors="backslashreplace")
        quiet_pipe()
        loss = saved["val_loss"]
        loss = f"last validation loss {loss:.4f}" if math.isfinite(loss) else "not evaluated yet"
        print(f"{path}: step {saved['step']}, {loss}, {saved['data']['source']}")
        if saved["data"]["warning"]:
            print(f"NOTE: {saved['data']['warning']}")
        generator = torch.Generator(on).manual_seed(seed)
        how = dict(temperature=temperature, top_k=top_k or None, top_p=top_p)
        for _ in range(num_samples):
            print("-" * 80)
            print(text, end="")
            write_text(model, tokenizer, tokens, max_new_tokens, generator, **how)


if __name__ == "__main__":
    globals().update(read_settings(__file__))
    main()
