"""Checkpoints, and how a run starts from one or resumes."""

import math
import re
from dataclasses import replace
from pathlib import Path

import torch

from config.runtime.checks import SHAPE, check_settings, of_model
from config.runtime.distributed import all_max
from config.runtime.errors import UserError, file_errors, print0, rank
from config.runtime.files import (
    CHECKPOINT_VERSION,
    atomic_write,
    find_checkpoint,
    load_checkpoint,
    load_weights,
    source_checkpoint,
)
from model import GPT, GPTConfig

# settings that a resumed run may change; with any other it would be a different run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "eval_only", "max_iters", "device", "compile", "parallel"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "log_interval", "tensorboard", "wandb"}
# settings that a run does not inherit from the one it starts from
NOT_INHERITED = {"block_size", "vocab_size", "dropout", "activation_checkpointing"}
# weights that mean something else under another value of a setting, in spite of the same name and shape
MEANING = {"attention": r"\.attn\.(?!\w+_proj\.)", "qk_scale": r"\.attn\.(log_a|a|b)$", "residual": r"\.mix$"}


def save_checkpoint(path, facts, log) -> bool:
    """Write `facts` on the first of several processes. Return whether that worked, on all of them."""
    failed = False
    if rank() == 0:
        try:
            log.hold_folder()
            with atomic_write(log.first_checkpoint if log.pending else path) as file:
                torch.save({"version": CHECKPOINT_VERSION, **facts}, file)
            if log.pending:
                log.replace_old_run(path)
        except (OSError, RuntimeError) as raised:
            error = raised if isinstance(raised, OSError) else raised.__context__  # PyTorch wraps what `file` raises
            if not isinstance(error, OSError):
                raise
            log.problem = error.strerror
            print0(f"NOT SAVED: {path} at step {facts['iter_num']}: {log.problem}; training continues")
            failed = True
    return not all_max(failed)


def newest_run():
    saved = list(Path("out").glob("*/*.pt"))
    if not saved:
        cure = "train one first (python train.py config/m1_shakespeare.py), or name one with --out_dir=FOLDER"
        raise UserError(f"{Path('out').absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


def config_of(checkpoint):
    try:
        return GPTConfig(**checkpoint["config"])
    except TypeError as error:  # says which field model.py lacks
        raise UserError(f"{checkpoint['path']} does not match this model.py: {error}") from None


def build_model(checkpoint) -> GPT:
    model = GPT(config_of(checkpoint))
    load_weights(model, checkpoint["model"], checkpoint["path"])
    return model


def code_notes(checkpoint, code, training=True):
    """Return a line that names the files that differ from those of the run: of all its code, or model.py alone."""
    was = checkpoint["code"]
    names = was["files"] if training else ["model.py"]
    changed = [name for name in names if was["files"][name] != code["files"].get(name)]
    if not changed:
        return []
    back = "restore the files of that run"
    commit = was["commit"] or "-dirty"
    if not commit.endswith("-dirty"):
        back = f"git stash && git checkout {commit} -- {' '.join(changed)}"  # stash keeps edits that are not committed
    differ = f"{', '.join(changed)}: changed since {checkpoint['path']} was trained, so results may differ"
    return [f"{differ}; to go back: {back}"]


@file_errors()
def check_folder(log, settings):
    """Raise a UserError if a new run would replace another, or if there is nothing to start from, or to evaluate."""
    if settings["init_from"].startswith("run:"):
        source_checkpoint(settings["init_from"]).stat()
    if settings["eval_only"]:
        if settings["init_from"] == "scratch":
            cure = "add --init_from=resume, and the run's config or --out_dir"
            raise UserError(f"eval_only = True needs a trained model: {cure}")
    elif not settings["overwrite"]:
        ways = "--overwrite=true replaces it, --out_dir=FOLDER leaves it alone"
        if find_checkpoint(log.folder).exists():
            raise UserError(f"{log.folder} already holds a run: --init_from=resume continues it, {ways}")
        if log.has_ended():
            raise UserError(f"{log.folder} holds the log of a finished run but no checkpoint: {ways}")


def begin_from_run(settings, given, data):
    """Return a model with the weights of another run (run:FOLDER), and a line for what is not as it was there.

    Inherited settings go into `settings`. A weight is kept if both models have it, in the same shape and meaning.
    """
    source = load_checkpoint(source_checkpoint(settings["init_from"]))
    data.check_tokens(source["tokenizer"], source["path"], settings["init_from"])
    old = config_of(source)
    inherited = of_model(settings).keys() - NOT_INHERITED - (given.keys() - SHAPE)
    settings |= {name: getattr(old, name) for name in inherited}
    model = GPT(replace(old, **of_model(settings)))
    differing = [name for name in MEANING if getattr(old, name) != getattr(model.config, name)]
    kept, new = {}, set()
    for name, tensor in model.state_dict().items():
        found = source["model"].get(name)
        other_meaning = any(re.search(MEANING[setting], name) for setting in differing)
        if found is None or found.shape != tensor.shape or other_meaning:
            new.add(re.sub(r"\.\d+\.", ".*.", name))
        else:
            kept[name] = found
    model.load_state_dict(kept, strict=False)
    notes = [f"new weights, not from {settings['init_from']}: {', '.join(sorted(new))}"] if new else []
    for name in ("block_size", "dropout"):
        if name not in given and settings[name] != getattr(old, name):
            notes.append(f"{name} = {settings[name]}, not {getattr(old, name)} as in {settings['init_from']}")
    return model, notes


def begin(log, defaults, given, world_size):
    """Return the settings of a run and, if it resumes, the checkpoint to resume from, else None."""
    settings = defaults | given
    checkpoint, asked = None, settings["init_from"]
    resuming = asked == "resume"
    if asked == "auto":
        resuming = find_checkpoint(log.folder).exists()
        settings["init_from"] = "scratch"
    if resuming:
        checkpoint = load_checkpoint(find_checkpoint(log.folder, "best" if settings["eval_only"] else "latest"))
        settings = resumed_settings(checkpoint, given, defaults)
    check_settings(settings, world_size)
    if not resuming:
        check_folder(log, settings)
    elif checkpoint["iter_num"] >= settings["max_iters"] and not settings["eval_only"]:
        reached = f"{checkpoint['path']} is at step {checkpoint['iter_num']}"
        if asked == "auto":
            print0(f"{reached} of the run's {settings['max_iters']}: nothing left to do")
            raise SystemExit(0)
        raise UserError(f"max_iters = {settings['max_iters']}, but {reached}: raise it to continue")
    return settings, checkpoint


def resumed_settings(checkpoint, given, defaults):
    """Return the run's settings (for newer ones, the default), updated by given ones that may change."""
    settings = {name: checkpoint["settings"].get(name, default) for name, default in defaults.items()}
    may_change = MAY_CHANGE
    if given.get("eval_only"):
        may_change = MAY_CHANGE | {"dataset", "batch_size", "dtype"}
    ignored = {"init_from"}
    if settings["init_from"].startswith(("hf:", "run:")):
        ignored |= SHAPE
    settings |= {name: defaults[name] for name in ("out_dir", "overwrite", "eval_only")}
    changes = {name: value for name, value in given.items() if name not in ignored}
    for name in ("dtype", "compile"):
        if given.get(name) == "auto":  # the run keeps what that was
            del changes[name]
    others = [name for name, value in changes.items() if name not in may_change and value != settings[name]]
    if others:
        changed = ", ".join(f"{name} = {changes[name]!r} (was {settings[name]!r})" for name in others)
        raise UserError(f"{checkpoint['path']} was trained with other settings: leave out {changed}")
    return settings | changes


def resumed_model(checkpoint, settings, data) -> GPT:
    """Return the model of a checkpoint. Raise a UserError for data that it was not trained on, or cannot evaluate."""
    path, trained_on = checkpoint["path"], checkpoint["data"]
    if settings["eval_only"]:
        data.check_tokens(checkpoint["tokenizer"], path, f"run:{path.parent}")
    elif data.meta["sha256"] != trained_on["sha256"] or data.tokenizer.state() != checkpoint["tokenizer"]:
        cure = f"prepare {trained_on['source']} again"
        raise UserError(f"{path} was not trained on data/{data.folder.name}: {cure}")
    return build_model(checkpoint)


def resume_notes(checkpoint, settings, machine, code):
    if settings["eval_only"]:
        return code_notes(checkpoint, code, training=False)
    lines = code_notes(checkpoint, code)
    was = checkpoint["settings"]
    for name in sorted(was.keys() ^ settings.keys()):
        change = "added since the checkpoint" if name in settings else "no longer in train.py"
        lines.append(f"{name} = {(was | settings)[name]!r}: {change}")
    if settings["max_iters"] != was["max_iters"] and settings["lr_decay"] != "none":
        change = f"max_iters = {settings['max_iters']} (was {was['max_iters']})"
        lines.append(f"{change}: the learning rate decays differently")
    if checkpoint["machine"] != machine:
        lines.append(f"resuming on {machine} instead of {checkpoint['machine']}: results will not match bit for bit")
    return lines


def lowest_loss(folder) -> float:
    """Return the validation loss of best.pt, which may be newer than ckpt.pt."""
    path = find_checkpoint(folder, prefer="best")
    return load_checkpoint(path)["val_loss"] if path.name != "ckpt.pt" else math.inf
