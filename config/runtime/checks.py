"""Checks of train.py's settings."""

import math

from config.runtime.errors import UserError, import_optional
from config.runtime.models import SHAPE, make_config

CHOICES = {  # of settings that are not the model's
    "init_from": ("scratch", "resume", "auto", "run:FOLDER"),
    "lr_decay": ("cosine", "linear", "none"),
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "compile": ("auto", "true", "false"),
}

# options that have no effect with certain values of other settings
NO_EFFECT = {
    "qk_scale": {"attention=standard", "attention=w2"},
    "w2_score": {"attention=standard", "attention=summed_qk"},
    "sigma": {"attention=standard", "attention=summed_qk", "w2_score=overlap"},
    "keep_input": {"residual=standard"},
}


def check_settings(settings, world_size):
    """Raise a UserError for a setting that cannot work, before anything is read, written or downloaded."""
    of_another = settings["init_from"].startswith("run:")
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
    if settings["wandb"]:
        import_optional("wandb")
    from_there = SHAPE if of_another else set()
    make_config({name: value for name, value in settings.items() if name not in from_there})


def check_range(settings, names, low, high=math.inf):
    """Raise a UserError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f" and below {high}" if high < math.inf else ""
            raise UserError(f"{name} = {settings[name]} is invalid: it must be at least {low}{below}")


def ineffective_settings(settings, given):
    """Return a line for each given setting that has no effect."""
    lines = []
    values = {f"{name}={value}" for name, value in settings.items()}
    for name, value in given.items():
        for other in values & NO_EFFECT.get(name, set()):
            lines.append(f"{name} = {value!r} has no effect with {other}")
        if name in SHAPE and value != settings[name]:
            lines.append(f"{name} = {value!r} has no effect: {settings['init_from']} has {settings[name]!r}")
    return lines
