"""Checks of train.py's settings."""

import math
import os
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path

import model
from config import did_you_mean
from config.runtime.errors import UserError, file_errors
from model import ATTENTIONS, GPTConfig

CHOICES = model.CHOICES | {
    "init_from": ("scratch", "resume", "auto", "hf:NAME", "run:FOLDER"),
    "optimizer": ("adamw", "muon"),
    "lr_decay": ("cosine", "linear", "none"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "true", "false"),
    "parallel": ("ddp", "fsdp"),
}

# what comes from the model that a run starts from, with --init_from=hf:NAME and --init_from=run:FOLDER
SHAPE = {"n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights"}

METHOD = ("attention", "qk_scale", "sigma", "residual", "keep_input")  # settings that a run's folder is named after


def of_model(settings) -> dict:
    """Return the settings that are fields of a GPTConfig."""
    return {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}


def starts_from_a_model(init_from):
    return init_from.startswith(("hf:", "run:"))


@file_errors()
def run_folder(settings, defaults, argv) -> Path:
    """Return the folder of a run, which may not be there yet. Raise a UserError for a file in its place."""
    config_files = [Path(argument).stem for argument in argv if not argument.startswith("-")]
    options = [settings[name] if settings[name] is not True else name for name in METHOD if settings[name] != defaults[name]]
    name = settings["out_dir"] or "out/" + "-".join(config_files or [settings["dataset"], *options])
    folder = Path(os.path.expanduser(name))
    for path in (folder, *folder.parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"out_dir = {name!r} does not work: {path} is a file")
    return folder


def check_settings(settings, world_size):
    """Raise a UserError for a setting that cannot work, before anything is read, written or downloaded."""
    for name, choices in CHOICES.items():
        if name not in settings:
            raise UserError(f"{name} is an option in model.py that train.py lacks: add it to train.py's settings")
        value = settings[name]
        if value not in choices and not (name == "init_from" and starts_from_a_model(value)):
            near = did_you_mean(value, choices)
            hint = f" ({near})" if near else ""
            raise UserError(f"{name} = {value!r} does not work: it must be one of {', '.join(choices)}{hint}")
    check_range(settings, "n_layer", 1, 10_000)
    check_range(settings, "n_head n_embd block_size batch_size grad_accum_steps", 1, 2**24)
    check_range(settings, "n_kv_head n_inner", 0, 2**24)
    check_range(settings, "rope_theta max_iters checkpoint_interval eval_tokens log_interval", 1)
    check_range(settings, "norm_eps eval_interval warmup_iters learning_rate weight_decay grad_clip seed", 0)
    check_range(settings, "dropout beta1 beta2", 0, 1)
    if not 0 <= settings["min_lr_frac"] <= 1:
        raise UserError(f"min_lr_frac = {settings['min_lr_frac']} does not work: it must be 0 to 1")
    if settings["grad_accum_steps"] % world_size and not settings["eval_only"]:
        shared = f"it must be a multiple of {world_size}, the number of processes, which share it out"
        raise UserError(f"grad_accum_steps = {settings['grad_accum_steps']} does not work: {shared}")
    if not starts_from_a_model(settings["init_from"]):
        GPTConfig(**of_model(settings))
    for package in ("tensorboard", "wandb"):
        if settings[package] and not find_spec(package):
            raise UserError(f"{package} = True needs a package: pip install {package}")


def check_range(settings, names, low, high=math.inf):
    """Raise a UserError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f", below {high}" if high < math.inf else ""
            raise UserError(f"{name} = {settings[name]} does not work: it must be {low} or more{below}")


def ineffective_settings(settings, given, defaults, world_size=1, resuming=False):
    """Return a line for each given setting that has no effect, and for a warm-up that is the whole run."""
    needs = [  # settings, what they need, and whether it is there
        ("keep_input", "a residual other than standard", settings["residual"] != "standard"),
        ("residual keep_input", "two layers or more", settings["n_layer"] > 1),
        ("min_lr_frac", "an lr_decay", settings["lr_decay"] != "none"),
        ("parallel", "several processes, started by torchrun", world_size > 1),
        ("overwrite", "a run that starts", not resuming),
        ("max_iters checkpoint_interval eval_interval", "training, not eval_only", not settings["eval_only"]),
    ]
    for option in {name for attention in ATTENTIONS.values() for name in attention.options}:
        kinds = [kind for kind, attention in ATTENTIONS.items() if option in attention.options]
        needs.append((option, f"attention={' or '.join(kinds)}", settings["attention"] in kinds))
    lines = []
    for name, value in given.items():
        for names, needed, there in needs:
            if name in names.split() and value != defaults[name] and not there:
                lines.append(f"{name} = {value!r} has no effect: it needs {needed}")
        if name in SHAPE and value != settings[name]:
            lines.append(f"{name} = {value!r} has no effect: {settings['init_from']} has {settings[name]!r}")
    if settings["max_iters"] <= settings["warmup_iters"] and not settings["eval_only"]:
        rate, steps, warmup = (settings[name] for name in ("learning_rate", "max_iters", "warmup_iters"))
        why = f"max_iters = {steps}, warmup_iters = {warmup}"
        lines.append(f"the warm-up to learning_rate = {rate} takes up the whole run: {why}")
    return lines
