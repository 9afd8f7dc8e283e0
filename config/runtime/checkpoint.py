"""Checkpoints: a run's whole state in a file that is there whole or not at all; and how a run begins, or goes on."""

import shlex
from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

from config.runtime.checks import SHAPE, starts_from_a_model
from config.runtime.common import resource_errors
from config.runtime.distributed import dist_max
from data.console import UserError, file_errors, print0
from data.files import atomic_write, load_whole
from data.huggingface import from_pretrained
from data.tokenizer import hf_tokenizer
from model import GPT, GPTConfig

VERSION = 6  # of the layout of a checkpoint

# what a resumed run may change; a change of anything else would make it another run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "eval_only", "max_iters", "device", "compile", "parallel"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "eval_tokens", "log_interval", "tensorboard", "wandb"}


# -- writing -------------------------------------------------------------------------------------------------


@resource_errors()
def save_checkpoint(path, model, optimizers, scaler, **facts) -> bool:
    """Write the state of the training, and `facts`, which are plain values. Return whether there was room for it.

    All processes call it, and the first writes what they gather, on the CPU. On a full disk what was there stays whole.
    """
    # a second to import, which sample.py need not wait for
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    begun = any(optimizer.state for optimizer in optimizers)  # with float16 the first steps may all have been skipped
    learned = get_optimizer_state_dict(model, optimizers, options=options) if begun else {}
    state = {"version": VERSION, **facts, "model": weights, "optimizer": learned, "scaler": scaler.state_dict()}
    error = None
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            with atomic_write(path) as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as raised:
            error = raised if isinstance(raised, OSError) else raised.__context__  # PyTorch wraps what `file` raises
            if not isinstance(error, OSError):
                raise
            print0(f"NOT SAVED: {path} at step {facts['iter_num']}: {error.strerror}; training goes on")
    return not dist_max(error is not None)


# -- reading -------------------------------------------------------------------------------------------------


@file_errors()
def find_checkpoint(folder, prefer="latest"):
    """Return ckpt.pt (the latest) or best.pt of a run's folder, or the other one if that is missing, or None."""
    names = {"latest": ("ckpt.pt", "best.pt"), "best": ("best.pt", "ckpt.pt")}[prefer]
    return next((folder / name for name in names if (folder / name).exists()), None)


def newest_run():
    """Return the folder in out/ whose checkpoint was saved last."""
    out = Path("out")
    saved = [*out.glob("*/ckpt.pt"), *out.glob("*/best.pt")]
    if not saved:
        cure = "train one first, python train.py config/m1_shakespeare.py, or name one by --out_dir=FOLDER"
        raise UserError(f"{out.absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


def load_checkpoint(path) -> dict:
    """Return what `save_checkpoint` wrote, on the CPU, if it is whole. No code in it is run."""
    try:
        checkpoint = load_whole(path)
    except OSError as error:
        raise UserError(f"{path.absolute()}: {error.strerror}") from None
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        other = path.with_name("best.pt" if path.name == "ckpt.pt" else "ckpt.pt")
        cure = f"; once it is moved away {other} takes its place" if other.exists() else ""
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py{cure}")
    if checkpoint["version"] != VERSION:
        raise UserError(f"{path}: a checkpoint of version {checkpoint['version']!r}; this program reads {VERSION}")
    return checkpoint


@resource_errors()
def build_model(checkpoint) -> GPT:
    """Return the model of a checkpoint, with its weights."""
    model = GPT(GPTConfig(**checkpoint["config"]))
    model.load_state_dict(checkpoint["model"])
    return model


# -- how a run begins ----------------------------------------------------------------------------------------


def check_folder(out, settings):
    """Raise a UserError if a new run would replace another, or if there is nothing to evaluate."""
    if settings["eval_only"]:
        if settings["init_from"] == "scratch":
            cure = "add --init_from=resume, and the run's config or --out_dir"
            raise UserError(f"eval_only = True needs a trained model: {cure}")
    elif find_checkpoint(out) and not settings["overwrite"]:
        ways = "--init_from=resume goes on with it, --overwrite=true replaces it, --out_dir=FOLDER leaves it alone"
        raise UserError(f"{out} already holds a run: {ways}")


def of_model(settings) -> dict:
    """Return the settings that are fields of a GPTConfig, as it takes them."""
    values = {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}
    return values | {name: values[name] or None for name in ("n_kv_head", "n_inner")}


@resource_errors()
def begin_from_scratch(settings, data) -> GPT:
    """Return a model of random weights."""
    return GPT(GPTConfig(**of_model(settings), vocab_size=data.meta["vocab_size"]))


@resource_errors()
def begin_from_llama(settings, data) -> GPT:
    """Return a Llama (hf:NAME) under the attention and residual of the settings. Put its shape into the settings."""
    name = settings["init_from"].removeprefix("hf:")
    if data.tokenizer.state() != hf_tokenizer(name).state():
        raise wrong_tokens(data, name, settings["init_from"])
    model = from_pretrained(name, **{field: value for field, value in of_model(settings).items() if field not in SHAPE})
    if model.config.vocab_size < data.meta["vocab_size"]:
        raise UserError(f"{name} has {model.config.vocab_size} tokens, its tokenizer {data.meta['vocab_size']}")
    settings |= {field: getattr(model.config, field) for field in SHAPE}
    return model


@resource_errors()
def begin_from_run(settings, given, data) -> GPT:
    """Return a model with the weights of another run (run:FOLDER).

    Put its shape into the settings, and its attention and residual where none are given. Weights that only some kinds
    have (σ, τ, a, b) come along if the attention is the same, `mix` if the residual is. Otherwise they start at their
    initial values.
    """
    folder = Path(settings["init_from"].removeprefix("run:"))
    path = find_checkpoint(folder, prefer="best") or folder / "best.pt"
    checkpoint = load_checkpoint(path)
    if data.tokenizer.state() != checkpoint["tokenizer"]:
        raise wrong_tokens(data, path, settings["init_from"])
    old = GPTConfig(**checkpoint["config"])
    method = {"attention", "qk_scale", "sigma", "residual", "keep_input"} - given.keys()
    settings |= {name: getattr(old, name) for name in SHAPE | method}
    config = GPTConfig(**of_model(settings), vocab_size=old.vocab_size)
    model = GPT(config)
    with torch.device("meta"):
        common = GPT(replace(config, attention="standard", residual="standard")).state_dict().keys()
    variant = {"w2": "sigma", "summed_qk": "qk_scale"}.get(config.attention, "attention")
    same_attention = all(getattr(config, name) == getattr(old, name) for name in ("attention", variant))
    same_residual = config.residual == old.residual
    weights = checkpoint["model"]
    for name in weights.keys() - common:  # what only some kinds of attention, or of residual, have
        if not (same_attention if ".attn." in name else same_residual):
            del weights[name]
    model.load_state_dict(weights, strict=False)
    return model


def wrong_tokens(data, owner, tokenizer):
    """Return the error for data in other tokens than the `owner`'s, with a command that prepares them in these."""
    folder, text = data.folder, data.meta["source"]
    if folder.name == "shakespeare_char":  # it has characters only
        folder, text = folder.with_name("text"), "data/shakespeare_char/input.txt"
    cure = f"{prepare_command(folder, text, tokenizer)}, then --dataset={folder.name}"
    return UserError(f"data/{data.folder.name} is not in the tokens of {owner}: prepare it with {cure}")


def prepare_command(folder, text, tokenizer):
    """Return the command that prepares `text` anew in `folder`, as far as it is known."""
    own = (folder / "prepare.py").exists()
    words = ["python", f"data/{folder.name if own else 'text'}/prepare.py"]
    if not own or folder.name == "text":
        words.append(text)
    if folder.name != "shakespeare_char":
        words.append(f"--tokenizer={tokenizer}")
    if not own:
        words.append(f"--name={folder.name}")
    return shlex.join(words)


# -- how a run goes on ---------------------------------------------------------------------------------------


def reopen(out, given, defaults):
    """Return what the run in `out` goes on from: the checkpoint's path, what is in it, and the settings."""
    path = find_checkpoint(out, prefer="best" if given.get("eval_only") else "latest") or out / "ckpt.pt"
    checkpoint = load_checkpoint(path)
    settings = resumed_settings(checkpoint, path, given, defaults)
    step, max_iters = checkpoint["iter_num"], settings["max_iters"]
    if step >= max_iters and not settings["eval_only"]:
        if (defaults | given)["init_from"] == "auto":
            print0(f"{path} has come to step {step:,} of {max_iters:,}: nothing is left to do")
            raise SystemExit(0)
        raise UserError(f"max_iters = {max_iters}, but {path} has come to step {step}: give more to go on")
    return path, checkpoint, settings


def resumed_settings(checkpoint, path, given, defaults):
    """Return the settings that a run goes on with: those it was trained with, and what is given and may change.

    A setting that is newer than the checkpoint was trained with at its default. Raise a UserError that names all
    settings that are given and differ, but must not.
    """
    trained = {name: checkpoint["settings"].get(name, default) for name, default in defaults.items()}
    may_change = MAY_CHANGE | ({"dataset", "batch_size", "dtype"} if given.get("eval_only") else set())
    of_another = SHAPE if starts_from_a_model(trained["init_from"]) else set()
    came_to = {name for name in ("dtype", "compile") if given.get(name) == "auto"}
    wanted = {name: value for name, value in given.items() if name not in of_another | came_to}
    changed = [
        f"{name} = {wanted[name]!r} (was {was!r})"
        for name, was in trained.items()
        if name in wanted and name not in may_change and wanted[name] != was
    ]
    if changed:
        raise UserError(f"{', '.join(changed)}: {path} was trained with other settings: resume with those")
    of_this_call = {name: defaults[name] for name in ("out_dir", "overwrite", "eval_only")}
    return trained | of_this_call | wanted | {"init_from": trained["init_from"]}


def resumed_model(checkpoint, path, settings, data) -> GPT:
    """Return the model of a checkpoint. Raise a UserError for data that it was not trained on, or cannot evaluate."""
    tokenizer = f"run:{path.parent}"
    if settings["eval_only"]:
        if data.tokenizer.state() != checkpoint["tokenizer"]:
            raise wrong_tokens(data, path, tokenizer)
    elif checkpoint["data"]["sha256"] != data.meta["sha256"]:
        source = checkpoint["data"]["source"]
        cure = f"prepare {source} again, {prepare_command(data.folder, source, tokenizer)}"
        raise UserError(f"data/{data.folder.name} is not what {path} was trained on: {cure}")
    return build_model(checkpoint)


def resume_notes(checkpoint, settings, machine):
    """Return, as lines, what is not as it was when the checkpoint was written."""
    unknown = sorted(settings.keys() - checkpoint["settings"].keys())
    lines = [f"{name}, new since the checkpoint, goes on at its default, {settings[name]!r}" for name in unknown]
    trained = checkpoint["settings"]["max_iters"]
    if settings["max_iters"] != trained and settings["lr_decay"] != "none":
        lines.append(f"max_iters = {settings['max_iters']} (was {trained}): the decay, and with it the learning rate, is another")
    if checkpoint["machine"] != machine:
        both = f"so far it ran on {checkpoint['machine']}, now on {machine}"
        lines.append(f"{both}: the same run from here, but not to the last bit")
    return lines


def restore_optimizers(checkpoint, model, optimizers, scaler):
    """Give the optimizers and the scaler what they had learned."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    if checkpoint["optimizer"]:
        options = StateDictOptions(full_state_dict=True)
        set_optimizer_state_dict(model, optimizers, checkpoint["optimizer"], options=options)
    scaler.load_state_dict(checkpoint["scaler"])
