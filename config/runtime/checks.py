"""Checks of train.py's settings."""

import math
from dataclasses import fields
from pathlib import Path

from config.runtime.errors import UserError, import_optional
from model import ConfigError, GPTConfig

CHOICES = {  # of settings that are not the model's
    "init_from": ("scratch", "resume", "auto", "hf:NAME", "run:FOLDER"),
    "lr_decay": ("cosine", "linear", "none"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "true", "false"),
}

# settings that come from the model which --init_from=hf:NAME or run:FOLDER names
SHAPE = {"n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights"}

# options that have no effect with certain values of other settings
NO_EFFECT = {
    "qk_scale": {"attention=standard", "attention=w2"},
    "w2_score": {"attention=standard", "attention=summed_qk"},
    "sigma": {"attention=standard", "attention=summed_qk", "w2_score=overlap"},
    "keep_input": {"residual=standard"},
}

# settings that a run's folder is named after
METHOD = ("attention", "qk_scale", "w2_score", "sigma", "residual", "keep_input")


def of_model(settings) -> dict:
    """Return the settings that are fields of a GPTConfig."""
    return {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}


def make_config(settings, **others) -> GPTConfig:
    """Return the shape and the method of the settings' model, and `others` where the settings have no such field."""
    try:
        return GPTConfig(**others | of_model(settings))
    except ConfigError as error:
        raise UserError(error) from None


def run_folder(settings, defaults, argv) -> Path:
    config_files = [Path(argument).stem for argument in argv if not argument.startswith("-")]
    method = [name for name in METHOD if settings[name] != defaults[name]]
    options = [name if settings[name] is True else settings[name] for name in method]
    name = settings["out_dir"] or "out/" + "-".join(config_files or [Path(settings["dataset"]).name, *options])
    return Path(name)


def check_settings(settings, world_size):
    """Raise a UserError for a setting that cannot work, before anything is read, written or downloaded."""
    of_another = settings["init_from"].startswith(("hf:", "run:"))
    settings["compile"] = settings["compile"].lower()  # True and False are typed as for a switch
    for name, choices in CHOICES.items():
        if settings[name] not in choices and not (name == "init_from" and of_another):
            raise UserError(f"{name} = {settings[name]!r} is invalid: it must be one of {', '.join(choices)}")
    check_range(settings, "batch_size grad_accum_steps max_iters checkpoint_interval eval_tokens log_interval", 1)
    check_range(settings, "seed eval_interval warmup_iters learning_rate min_lr_frac weight_decay grad_clip", 0)
    check_range(settings, "beta1 beta2", 0, 1)
    if settings["grad_accum_steps"] % world_size and not settings["eval_only"]:
        shared = f"it must be a multiple of {world_size}, the number of processes"
        raise UserError(f"grad_accum_steps = {settings['grad_accum_steps']} is invalid: {shared}")
    for package in ("tensorboard", "wandb"):
        if settings[package]:
            import_optional(package)
    if not of_another:
        make_config(settings)


def check_range(settings, names, low, high=math.inf):
    """Raise a UserError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f" and below {high}" if high < math.inf else ""
            raise UserError(f"{name} = {settings[name]} is invalid: it must be at least {low}{below}")


def ineffective_settings(settings, given):
    """Return a line for each given setting that has no effect, and for a warm-up that is the whole run."""
    lines = []
    values = {f"{name}={value}" for name, value in settings.items()}
    for name, value in given.items():
        for other in values & NO_EFFECT.get(name, set()):
            lines.append(f"{name} = {value!r} has no effect with {other}")
        if name in SHAPE and value != settings[name]:
            lines.append(f"{name} = {value!r} has no effect: {settings['init_from']} has {settings[name]!r}")
    if settings["max_iters"] <= settings["warmup_iters"] and not settings["eval_only"]:
        steps = f"max_iters = {settings['max_iters']}, warmup_iters = {settings['warmup_iters']}"
        lines.append(f"the warm-up to learning_rate = {settings['learning_rate']} takes up the whole run: {steps}")
    return lines
