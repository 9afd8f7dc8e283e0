"""What a person mistypes in train.py's settings, looked for in one place before anything is written."""

import math
from importlib.util import find_spec

from data.console import UserError

# a setting, and what it needs to have an effect
NEEDS = {
    "qk_scale": ("attention=summed_qk", lambda s: s["attention"] == "summed_qk"),
    "sigma": ("attention=w2", lambda s: s["attention"] == "w2"),
    "keep_input": ("residual=m1 to m4.2", lambda s: s["residual"] != "standard"),
    "activation_checkpointing": ("residual=m1 to m4.2", lambda s: s["residual"] != "standard"),
}


def check_settings(settings, world_size):
    """Raises UserError for a setting that cannot work, as far as the model and the data do not check it."""
    init_from = settings["init_from"]
    llama = init_from.removeprefix("auto:").startswith("hf:")
    choices = {
        "init_from": ("scratch", "resume", "auto", init_from if llama else "hf:NAME", "auto:hf:NAME"),
        "optimizer": ("adamw", "muon"),
        "lr_decay": ("cosine", "linear", "none"),
        "compile": ("auto", "true", "false"),
        "parallel": ("ddp", "fsdp"),
    }
    for name, good in choices.items():
        if settings[name] not in good:
            raise UserError(f"{name} = {settings[name]!r} does not work: it must be one of {', '.join(good)}")
    check_range(settings, "batch_size block_size grad_accum_steps max_iters n_layer n_head n_embd", 1)
    check_range(settings, "checkpoint_interval eval_interval eval_tokens log_interval", 1)
    check_range(settings, "n_kv_head n_inner warmup_iters learning_rate min_lr_frac weight_decay grad_clip", 0)
    check_range(settings, "dropout beta1 beta2", 0, 1)
    check_range(settings, "seed", 0, 2**63)
    if settings["grad_accum_steps"] % world_size:
        shared = f"it must be a multiple of {world_size}, the number of processes, which share it out"
        raise UserError(f"grad_accum_steps = {settings['grad_accum_steps']} does not work: {shared}")
    for package in ("tensorboard", "wandb"):
        if settings[package] and not find_spec(package):
            raise UserError(f"{package} = True needs a package: pip install {package}")
    if not settings["out_dir"].isprintable():
        raise UserError(f"out_dir = {settings['out_dir']!r} does not work: it must be a name that can be shown")
    if settings["overwrite"] and init_from.startswith(("resume", "auto")):
        raise UserError(f"overwrite = True and init_from = {init_from!r} contradict each other: leave one out")


def check_range(settings, names, low, high=math.inf):
    """UserError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f", below {high}" if high < math.inf else ""
            raise UserError(f"{name} = {settings[name]} does not work: it must be {low} or more{below}")


def ineffective_settings(settings, defaults):
    """A line for each setting that has been given but, with the others as they are, changes nothing."""
    return [
        f"{name} = {settings[name]!r} has no effect: it goes with {needed}"
        for name, (needed, is_met) in NEEDS.items()
        if settings[name] != defaults[name] and not is_met(settings)
    ]
