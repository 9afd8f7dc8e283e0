"""Checkpoints: where they are, how they are read, the models in them, and the code that they were made with."""

import re
import subprocess
from contextlib import suppress
from dataclasses import fields
from pathlib import Path

import torch

from config.runtime.program import ROOT, UserError, command, file_errors, sha256
from model import GPT, ConfigError, GPTConfig

VERSION = 12  # of the layout of a checkpoint
CODE = ("model.py", "train.py")  # of which a run remembers the version

# settings that always come from the model that another one begins from, and those that never do
SHAPE = {"n_layer", "n_head", "n_kv_head", "n_embd", "n_inner", "bias", "rope_theta", "norm_eps", "tie_weights"}
NOT_INHERITED = {"block_size", "dropout"}
OWN = r"\.attn\.(?!\w+_proj\.)"  # weights of an attention kind that others do not have
# weights that mean something else under another value of a setting, in spite of the same name and shape
MEANING = {"attention": OWN, "w2_score": OWN, "qk_scale": r"\.attn\.(log_a|a|b)$", "residual": r"\.mix$"}


@file_errors()
def find(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists."""
    path, other = folder / "ckpt.pt", folder / "best.pt"
    if prefer == "best":
        path, other = other, path
    return other if other.exists() and not path.exists() else path


def find_source(name):
    """Return the path of the checkpoint that run:FOLDER names."""
    return find(Path(name.removeprefix("run:")), prefer="best")


def newest_run():
    saved = list(Path("out").glob("*/*.pt"))
    if not saved:
        train = command("train.py", "config/m1_shakespeare.py")
        cure = f"train one first ({train}), or name one with --out_dir=FOLDER"
        raise UserError(f"{Path('out').absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


@file_errors()
def load(path) -> dict:
    """Return a checkpoint, on the CPU, and its "path". No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes raise all sorts of errors
        checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py")
    if checkpoint["version"] != VERSION:
        versions = f"version {checkpoint['version']!r}; this program reads version {VERSION}"
        raise UserError(f"{path}: checkpoint {versions}: train again")
    return checkpoint | {"path": path}


def load_source(name, data) -> dict:
    """Return the checkpoint that run:FOLDER names, whose tokens must be those of the data."""
    source = load(find_source(name))
    check_tokens(data, source["tokenizer"], source["path"], name)
    return source


def check_tokens(data, state, owner, tokenizer):
    """Raise a UserError if the data are not in the `owner`'s tokens, with a command that prepares a text in them."""
    if data.tokenizer.state() != state:
        cure = command("data/text/prepare.py", "TEXT", "--name=NAME", f"--tokenizer={tokenizer}")
        problem = f"{data.folder} does not use the tokenizer of {owner}"
        raise UserError(f"{problem}: prepare its text with {cure}, then add --dataset=NAME")


# -- models


def of_model(settings) -> dict:
    """Return the settings that are fields of a GPTConfig."""
    return {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}


def make_config(settings, **others) -> GPTConfig:
    """Return the shape and the method of the settings' model, and `others` where the settings have no such field."""
    try:
        return GPTConfig(**others | of_model(settings))
    except ConfigError as error:
        raise UserError(error) from None


def config_of(checkpoint) -> GPTConfig:
    try:
        return GPTConfig(**checkpoint["config"])
    except (TypeError, ValueError) as error:  # says which field model.py lacks
        raise UserError(f"{checkpoint['path']} does not match this model.py: {error}") from None


def build_model(checkpoint) -> GPT:
    model = GPT(config_of(checkpoint))
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError as error:  # says which weights are missing, unexpected or of another size
        problem = " ".join(str(error).split())
        raise UserError(f"{checkpoint['path']} does not match this model.py: {problem:.300}") from None
    return model


def begin_from(source, settings, given):
    """Return a model with the weights of `source`, another run's checkpoint, and a note that lists new ones.

    What is inherited from its config goes into `settings`: the shape in any case, the rest unless it is given.
    A weight is kept if both models have it, in the same shape and meaning.
    """
    old = config_of(source)
    inherited = settings.keys() & source["config"].keys() - NOT_INHERITED - (given.keys() - SHAPE)
    settings |= {name: getattr(old, name) for name in inherited}
    model = GPT(make_config(settings, **source["config"]))
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
    return model, notes


# -- the version of the code


def code_version() -> dict:
    """Return the SHA-256 of model.py and train.py, and the git commit."""
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "--git-dir=.git"]  # and not that of a repository around a copy
        git += ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return {"files": {name: sha256((ROOT / name).read_bytes()) for name in CODE}, "commit": commit}


def code_notes(checkpoint, code, names=CODE):
    """Return a line that says which of the files `names` have changed since the run began."""
    was = checkpoint["code"]
    changed = [name for name in names if was["files"].get(name) != code["files"][name]]
    if not changed:
        return []
    at = f" at commit {was['commit']}" if was["commit"] else ""
    return [f"{', '.join(changed)}: changed since {checkpoint['path']} was trained{at}, so results may differ"]
