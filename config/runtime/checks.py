"""What a person mistypes in train.py's settings, looked for in one place before anything is written."""

import math
from importlib.util import find_spec

import model

from config import did_you_mean
from config.runtime.common import UserError

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

# a setting, and what it needs to have an effect
NEEDS = {
    "qk_scale": ("attention=summed_qk", lambda s: s["attention"] == "summed_qk"),
    "sigma": ("attention=w2", lambda s: s["attention"] == "w2"),
    "keep_input": ("residual=m1 to m4.2", lambda s: s["residual"] != "standard"),
    "activation_checkpointing": ("residual=m1 to m4.2", lambda s: s["residual"] != "standard"),
}


def starts_from_a_model(init_from):
    return init_from.startswith(("hf:", "run:"))


def check_settings(settings, world_size):
    """Raise a UserError for a setting that cannot work, as far as the model and the data do not check it."""
    for name, choices in CHOICES.items():
        value = settings[name]
        if value not in choices and not (name == "init_from" and starts_from_a_model(value)):
            near = did_you_mean(value, choices)
            hint = f" ({near})" if near else ""
            raise UserError(f"{name} = {value!r} does not work: it must be one of {', '.join(choices)}{hint}")
    check_range(settings, "n_layer n_head n_embd rope_theta block_size batch_size grad_accum_steps max_iters", 1)
    check_range(settings, "checkpoint_interval eval_tokens log_interval", 1)
    check_range(settings, "n_kv_head n_inner norm_eps eval_interval warmup_iters learning_rate min_lr_frac", 0)
    check_range(settings, "weight_decay grad_clip seed", 0)
    check_range(settings, "dropout beta1 beta2", 0, 1)
    if settings["grad_accum_steps"] % world_size and not settings["eval_only"]:
        shared = f"it must be a multiple of {world_size}, the number of processes, which share it out"
        raise UserError(f"grad_accum_steps = {settings['grad_accum_steps']} does not work: {shared}")
    for package in ("tensorboard", "wandb"):
        if settings[package] and not find_spec(package):
            raise UserError(f"{package} = True needs a package: pip install {package}")


def check_range(settings, names, low, high=math.inf):
    """Raise a UserError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f", below {high}" if high < math.inf else ""
            raise UserError(f"{name} = {settings[name]} does not work: it must be {low} or more{below}")


def ineffective_settings(settings, given, defaults):
    """Return a line for each setting that is given but changes nothing, and for a warm-up that is the whole run."""
    lines = []
    for name, value in given.items():
        if name in NEEDS and value != defaults[name] and not NEEDS[name][1](settings):
            lines.append(f"{name} = {value!r} has no effect: it goes with {NEEDS[name][0]}")
        if name in SHAPE and value != settings[name]:
            lines.append(f"{name} = {value!r} has no effect: {settings['init_from']} has {settings[name]!r}")
    max_iters, warmup_iters = settings["max_iters"], settings["warmup_iters"]
    if max_iters <= warmup_iters:
        why = f"max_iters = {max_iters}, warmup_iters = {warmup_iters}"
        rate = f"learning_rate = {settings['learning_rate']}"
        lines.append(f"{rate} comes after the warm-up, which is the whole run: {why}")
    return lines
