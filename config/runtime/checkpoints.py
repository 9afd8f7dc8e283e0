"""Checkpoints: where they are, how they are read, and whether data and code are those that they were made with."""

import subprocess
import zipfile
from contextlib import suppress
from pathlib import Path

import torch

from config.runtime.errors import UserError, file_errors
from config.runtime.files import ROOT, sha256
from config.runtime.processes import command

VERSION = 12  # of the layout of a checkpoint
CODE = ("model.py", "train.py", "config/__init__.py", "config/runtime/*.py", "data/*.py")


def folder_of(path) -> Path:
    """Return the folder of a run, of which a checkpoint may be named instead."""
    path = Path(path)
    return path.parent if path.name in ("ckpt.pt", "best.pt") else path


@file_errors()
def find(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists."""
    path, other = folder / "ckpt.pt", folder / "best.pt"
    if prefer == "best":
        path, other = other, path
    return other if other.exists() and not path.exists() else path


def find_source(name):
    """Return the path of the checkpoint that run:FOLDER names."""
    return find(folder_of(name.removeprefix("run:")), prefer="best")


def newest_run():
    saved = list(Path("out").glob("*/*.pt"))
    if not saved:
        train = command("train.py", "config/m1_shakespeare.py")
        cure = f"train one first ({train}), or name one with --out_dir=FOLDER"
        raise UserError(f"{Path('out').absolute()} holds no run: {cure}")
    return max(saved, key=lambda path: path.stat().st_mtime).parent


@file_errors()
def load(path) -> dict:
    """Return a whole checkpoint, on the CPU, and its "path". No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes raise all sorts of errors
        if zipfile.ZipFile(file).testzip() is None:  # torch.load does not look at the checksums in it
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py")
    version = checkpoint["version"]
    if version != VERSION:
        commit = checkpoint.get("code", {}).get("commit")
        cure = f"train again, or check out commit {commit.removesuffix('-dirty')}" if commit else "train again"
        raise UserError(f"{path}: checkpoint version {version!r}; this program reads version {VERSION}: {cure}")
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


# -- the version of the code


@file_errors()
def code_version() -> dict:
    """Return the SHA-256 of each file of the training code, and the git commit."""
    paths = [path for pattern in CODE for path in sorted(ROOT.glob(pattern))]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        git = ["git", "-C", str(ROOT), "--git-dir=.git"]  # and not that of a repository around a copy
        git += ["describe", "--always", "--dirty", "--exclude=*", "--abbrev=10"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    files = {path.relative_to(ROOT).as_posix(): sha256(path.read_bytes()) for path in paths}
    return {"files": files, "commit": commit}


def code_notes(checkpoint, code, training=True):
    """Return a line that names the files that differ from those of the run: of all its code, or model.py alone."""
    was = checkpoint["code"]
    names = was["files"] if training else ["model.py"]
    changed = [name for name in names if was["files"].get(name) != code["files"].get(name)]
    if not changed:
        return []
    at = f" at commit {was['commit']}" if was["commit"] else ""
    return [f"{', '.join(changed)}: changed since {checkpoint['path']} was trained{at}, so results may differ"]
