"""Checkpoints: a run's whole state in a file that is there whole or not at all, and of the same run when it goes on."""

import zipfile
from dataclasses import fields
from pathlib import Path

import torch
import torch.distributed as dist

from config.runtime.common import resource_errors
from config.runtime.distributed import dist_max
from data.console import UserError, print0
from data.files import atomic_write
from model import GPT, ConfigError, GPTConfig

VERSION = 5  # of the layout of a checkpoint
PARTS = ("iter_num", "val_loss", "settings", "config", "data", "tokenizer", "machine", "model", "optimizer", "scaler")

# what a resumed run may change; a change of anything else would make it another run
MAY_CHANGE = {"out_dir", "init_from", "overwrite", "eval_only", "max_iters", "device", "compile", "parallel"}
MAY_CHANGE |= {"checkpoint_interval", "eval_interval", "eval_tokens", "log_interval", "tensorboard", "wandb"}

# what a Llama to start from brings along
LLAMA_SHAPE = {"n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights"}


# -- writing -------------------------------------------------------------------------------------------------


@resource_errors()
def save_checkpoint(path, model, optimizers, scaler, **facts) -> bool:
    """Writes the state of the training, and `facts`; whether that worked. On a full disk what was there stays whole.

    All processes call it, and the first writes what they gather, on the CPU. Raises ValueError, before anything is
    written, for a fact that `load_checkpoint` would refuse.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    begun = any(optimizer.state for optimizer in optimizers)  # with float16 the first steps may all have been skipped
    learned = get_optimizer_state_dict(model, optimizers, options=options) if begun else {}
    state = {"version": VERSION, **facts, "model": weights, "optimizer": learned, "scaler": scaler.state_dict()}
    check_loadable(state)
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


def check_loadable(value, name="checkpoint"):
    """ValueError, by name, for what torch.load(weights_only=True) would refuse to read."""
    if isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_loadable(item, f"{name}[{key!r}]")
    elif type(value) not in (str, int, float, bool, type(None)) and not isinstance(value, torch.Tensor):
        raise ValueError(f"{name} is of type {type(value).__name__}: a checkpoint holds plain values and tensors alone")


# -- reading -------------------------------------------------------------------------------------------------


def find_checkpoint(folder, prefer="latest"):
    """ckpt.pt (the latest) or best.pt of a run's folder, or the other one where that is missing; None without any."""
    names = {"latest": ("ckpt.pt", "best.pt"), "best": ("best.pt", "ckpt.pt")}[prefer]
    return next((folder / name for name in names if (folder / name).exists()), None)


def newest_run():
    """The folder in out/ whose checkpoint was saved last; UserError if there is none."""
    saved = [*Path("out").glob("*/ckpt.pt"), *Path("out").glob("*/best.pt")]
    if not saved:
        raise UserError("out/ holds no run to sample from: train one first, python train.py config/m1_shakespeare.py")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


def load_checkpoint(path) -> dict:
    """What `save_checkpoint` wrote, on the CPU. No code in it is run. UserError for one that cannot be read."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not look at the checksums in it
            whole = file.testzip() is None
        checkpoint = torch.load(path, map_location="cpu", weights_only=True) if whole else None
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except Exception:  # damaged bytes make either fail in all sorts of ways
        checkpoint = None
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        others = [other for other in (path.parent / "ckpt.pt", path.parent / "best.pt") if other != path and other.exists()]
        cure = f"; once it is moved away {others[0]} takes its place" if others else ""
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py{cure}")
    version = checkpoint["version"]
    if version != VERSION:
        raise UserError(f"{path}: a checkpoint of version {version!r}; this program reads {VERSION}")
    missing = [part for part in PARTS if part not in checkpoint]
    if missing:
        raise UserError(f"{path}: damaged: it has no {missing[0]!r}")
    return checkpoint


@resource_errors()
def build_model(checkpoint, path) -> GPT:
    """The model of a checkpoint, with its weights; UserError if they do not fit its config."""

    def misfit(reason):
        return UserError(f"{path}: the weights do not fit the config saved with them: {' '.join(str(reason).split())[:200]}")

    unknown = sorted(checkpoint["config"].keys() - {field.name for field in fields(GPTConfig)})
    if unknown:
        raise misfit(f"this model.py knows no {unknown[0]!r}")
    try:
        config = GPTConfig(**checkpoint["config"])
    except ConfigError as error:
        raise misfit(error) from None
    model = GPT(config)
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:
        raise misfit(error) from None
    return model


def restore_optimizers(checkpoint, path, model, optimizers, scaler):
    """Gives the optimizers and the scaler what they had learned; UserError if that does not fit the model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    try:
        if checkpoint["optimizer"]:
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(model, optimizers, checkpoint["optimizer"], options=options)
        scaler.load_state_dict(checkpoint["scaler"])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path}: its optimizer state does not fit: {' '.join(str(error).split())[:200]}") from None


def check_same_run(checkpoint, path, settings, defaults, data, machine):
    """UserError for settings, all of which it names, or data that would make it another run than the checkpoint's.

    Settings that are newer than the checkpoint count as trained with at their defaults. Returns what to tell, as lines.
    """
    trained = checkpoint["settings"]
    free = MAY_CHANGE | (LLAMA_SHAPE if trained["init_from"].startswith("hf:") else set())
    before = {**defaults, **trained}
    changed = {name: value for name, value in settings.items() if name not in free and value != before[name]}
    if changed:
        now = ", ".join(f"{name} = {value!r} (was {before[name]!r})" for name, value in changed.items())
        raise UserError(f"{now}: {path} was trained with other settings: resume with those")
    if checkpoint["data"]["sha256"] != data.meta["sha256"]:
        source = checkpoint["data"]["source"]
        raise UserError(f"{data.folder} is not what {path} was trained on: prepare {source} again")
    new = sorted(settings.keys() - trained.keys())
    notes = [f"{name} is a setting that the checkpoint does not know; it goes on at {settings[name]!r}" for name in new]
    if checkpoint["machine"] != machine:
        both = f"so far it ran on {checkpoint['machine']}, now on {machine}"
        notes.append(f"{both}: the same run from here, but not to the last bit")
    return notes
