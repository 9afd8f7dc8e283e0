"""Checkpoints: a run's whole state in a file that is there whole or not at all; and how a run begins, or goes on."""

from dataclasses import fields, replace
from pathlib import Path

import torch
import torch.distributed as dist

from config.runtime.checks import SHAPE, starts_from_a_model
from config.runtime.common import CHECKPOINT_VERSION, UserError, atomic_write, find_checkpoint
from config.runtime.common import load_checkpoint, print0, resource_errors
from config.runtime.distributed import dist_max
from config.runtime.metrics import has_ended
from data.huggingface import from_pretrained
from data.tokenizer import hf_tokenizer
from model import GPT, GPTConfig

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
    state = {"version": CHECKPOINT_VERSION, **facts, "model": weights, "optimizer": learned}
    state["scaler"] = scaler.state_dict()
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


def newest_run():
    """Return the folder in out/ whose checkpoint was saved last."""
    out = Path("out")
    saved = [*out.glob("*/ckpt.pt"), *out.glob("*/best.pt")]
    if not saved:
        cure = "train one first, python train.py config/m1_shakespeare.py, or name one by --out_dir=FOLDER"
        raise UserError(f"{out.absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


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
    elif not settings["overwrite"]:
        ways = "--overwrite=true replaces it, --out_dir=FOLDER leaves it alone"
        if find_checkpoint(out).exists():
            raise UserError(f"{out} already holds a run: --init_from=resume goes on with it, {ways}")
        if has_ended(out):
            raise UserError(f"{out} holds the log of a run that has ended, and no checkpoint of it: {ways}")


def of_model(settings) -> dict:
    """Return the settings that are fields of a GPTConfig."""
    return {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}


@resource_errors()
def begin_from_scratch(settings, data) -> GPT:
    """Return a model of random weights."""
    return GPT(GPTConfig(**of_model(settings), vocab_size=data.meta["vocab_size"]))


@resource_errors()
def begin_from_llama(settings, data) -> GPT:
    """Return a Llama (hf:NAME) under the attention and residual of the settings. Put its shape into the settings."""
    name = settings["init_from"].removeprefix("hf:")
    check_tokens(data, hf_tokenizer(name).state(), name, settings["init_from"])
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
    path = find_checkpoint(Path(settings["init_from"].removeprefix("run:")), prefer="best")
    checkpoint = load_checkpoint(path)
    check_tokens(data, checkpoint["tokenizer"], path, settings["init_from"])
    old = GPTConfig(**checkpoint["config"])
    method = {"attention", "qk_scale", "sigma", "residual", "keep_input"} - given.keys()
    settings |= {name: getattr(old, name) for name in SHAPE | method}
    config = GPTConfig(**of_model(settings), vocab_size=old.vocab_size)
    model = GPT(config)
    with torch.device("meta"):
        common = GPT(replace(config, attention="standard", residual="standard")).state_dict().keys()
    variant = {"w2": "sigma", "summed_qk": "qk_scale"}.get(config.attention, "attention")
    same_attention = config.attention == old.attention and getattr(config, variant) == getattr(old, variant)
    same_residual = config.residual == old.residual
    weights = checkpoint["model"]
    for name in weights.keys() - common:  # what only some kinds of attention, or of residual, have
        if not (same_attention if ".attn." in name else same_residual):
            del weights[name]
    model.load_state_dict(weights, strict=False)
    return model


def check_tokens(data, state, owner, tokenizer):
    """Raise a UserError for data in other tokens than the `owner`'s, with a command that prepares a text in these."""
    if data.tokenizer.state() != state:
        cure = f"python data/text/prepare.py TEXT --name=NAME --tokenizer={tokenizer}, then --dataset=NAME"
        raise UserError(f"data/{data.folder.name} is not in the tokens of {owner}: prepare its text by {cure}")


# -- how a run goes on ---------------------------------------------------------------------------------------


def reopen(out, given, defaults):
    """Return what the run in `out` goes on from: the checkpoint's path, what is in it, and the settings."""
    path = find_checkpoint(out, prefer="best" if given.get("eval_only") else "latest")
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
    other_tokens, tokenizer = data.tokenizer.state() != checkpoint["tokenizer"], f"run:{path.parent}"
    if settings["eval_only"]:
        check_tokens(data, checkpoint["tokenizer"], path, tokenizer)
    elif other_tokens or checkpoint["data"]["sha256"] != data.meta["sha256"]:
        name, source = data.folder.name, checkpoint["data"]["source"]
        own = name != "text" and (data.folder / "prepare.py").exists()
        command = f"python data/{name}/prepare.py" if own else f"python data/text/prepare.py {source} --name={name}"
        in_its_tokens = "" if name == "shakespeare_char" else f" --tokenizer={tokenizer}"
        cure = f"prepare {source} again by {command}{in_its_tokens}"
        raise UserError(f"data/{data.folder.name} is not what {path} was trained on: {cure}")
    return build_model(checkpoint)


def resume_notes(checkpoint, settings, machine):
    """Return, as lines, what is not as it was when the checkpoint was written."""
    unknown = sorted(settings.keys() - checkpoint["settings"].keys())
    lines = [f"{name}, new since the checkpoint, goes on at its default, {settings[name]!r}" for name in unknown]
    before, now = checkpoint["settings"]["max_iters"], settings["max_iters"]
    if now != before and settings["lr_decay"] != "none":
        lines.append(f"max_iters = {now} (was {before}): the decay, and with it the learning rate, is another")
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
