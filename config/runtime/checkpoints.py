"""Checkpoints: where they are, how they are read, the models in them, and the code that they were made with."""

import os
import re
import subprocess
from contextlib import suppress
from dataclasses import fields
from glob import glob
from pathlib import Path

import torch

from config.runtime.program import ROOT, UserError, command, file_errors, out_of_memory, sha256
from model import GPT, ConfigError, GPTConfig

VERSION = 12  # of the layout of a checkpoint
CODE = ("model.py", "train.py")  # of which a run remembers the version


@file_errors()
def find(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists.

    A path that ends in .pt is itself the checkpoint.
    """
    if folder.suffix == ".pt":
        return folder
    path, other = folder / "ckpt.pt", folder / "best.pt"
    if prefer == "best":
        path, other = other, path
    return other if other.exists() and not path.exists() else path


def find_source(name):
    """Return the path of the checkpoint that run:FOLDER, or run:FILE.pt, names."""
    return find(Path(name.removeprefix("run:")), prefer="best")


def newest_run():
    """Return the folder below out/ that has the newest checkpoint."""
    saved = [path for name in ("ckpt.pt", "best.pt") for path in glob(f"out/**/{name}", recursive=True)]
    saved = [path for path in saved if not Path(path).with_name("lock").exists()]  # a run of compare.py is its own
    if not saved:
        train = command("train.py", "config/m1_shakespeare.py")
        cure = f"train one first ({train}), or name one with --out_dir=FOLDER"
        raise UserError(f"{Path('out').absolute()} holds no run: {cure}")
    return Path(max(saved, key=os.path.getmtime)).parent


class Damaged(UserError):
    """The file is none that train.py has written."""


@file_errors()
def load(path) -> dict:
    """Return a checkpoint, on the CPU, and its "path". No code in it is run."""
    if not path.exists():
        raise UserError(f"{path}: no such checkpoint: name the folder of a run, such as out/m1_shakespeare")
    checkpoint = None
    with open(path, "rb") as file:
        try:
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # damaged bytes raise all sorts of errors
            if out_of_memory(error):
                raise
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        other = path.with_name({"ckpt.pt": "best.pt", "best.pt": "ckpt.pt"}.get(path.name, path.name))
        cure = f": remove it to try {other}, saved at another step" if other != path and other.exists() else ""
        raise Damaged(f"{path}: damaged, or not a checkpoint of train.py{cure}")
    if checkpoint["version"] != VERSION:
        versions = f"version {checkpoint['version']!r}; this program reads version {VERSION}"
        raise UserError(f"{path}: checkpoint {versions}: train again")
    return checkpoint | {"path": path}


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


def begin_from(source, settings):
    """Return a model with all weights of `source` that it has, by name and shape, and a note that lists its others."""
    model = GPT(make_config(settings, **source["config"]))
    initial, saved = model.state_dict(), source["model"]
    kept = {name for name in initial.keys() & saved.keys() if initial[name].shape == saved[name].shape}
    model.load_state_dict({name: saved[name] for name in kept}, strict=False)
    new = {re.sub(r"\.\d+\.", ".*.", name) for name in initial.keys() - kept}
    return model, [f"new weights, not from {settings['init_from']}: {', '.join(sorted(new))}"] if new else []


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
