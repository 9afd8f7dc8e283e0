"""Files: atomic writes, checkpoints, locks, texts."""

import hashlib
import os
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from config.runtime.errors import UserError, file_errors

CHECKPOINT_VERSION = 9  # of the layout of a checkpoint
CHECKPOINTS = ("new.pt", "ckpt.pt", "best.pt")  # of a run; new.pt: the first one of a run that is replacing another


@contextmanager
def atomic_write(path):
    """Yield a binary file to write, NAME.tmp until it is whole. If anything fails, `path` stays as it was."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            error.filename = str(path)  # rather than the temporary one
        raise


@file_errors()
def find_checkpoint(folder, prefer="latest"):
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists.

    Next to new.pt, both belong to the run that was being replaced.
    """
    names = ("best.pt", "ckpt.pt") if prefer == "best" else ("ckpt.pt", "best.pt")
    existing = [folder / name for name in ("new.pt", *names) if (folder / name).exists()]
    return existing[0] if existing else folder / names[0]


def source_checkpoint(name):
    """Return the path of the checkpoint that run:FOLDER names."""
    return find_checkpoint(Path(os.path.expanduser(name.removeprefix("run:"))), prefer="best")


@file_errors()
def load_checkpoint(path) -> dict:
    """Return a whole checkpoint, on the CPU, and its "path". No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes raise all sorts of errors
        if zipfile.ZipFile(file).testzip() is None:  # torch.load does not look at the checksums in it
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py")
    version = checkpoint["version"]
    if version != CHECKPOINT_VERSION:
        raise UserError(f"{path}: checkpoint version {version!r}; this program reads version {CHECKPOINT_VERSION}")
    return checkpoint | {"path": path}


def load_weights(model, weights, owner):
    """Copy `weights`, which must be all of a model's and no others, into `model`."""
    try:
        model.load_state_dict(weights)
    except RuntimeError as error:  # says which are missing, unexpected or of another size
        problem = " ".join(str(error).split())
        raise UserError(f"{owner} does not match this model.py: {problem:.300}") from None


def file_lock(file, wait=False) -> bool:
    """Return whether this process now holds the lock of an open file. Where there are no locks, every process does."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; a file system without locks
        pass
    return True


@contextmanager
def folder_lock(folder):
    """Yield whether this process holds the lock of a folder."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows opens no folders
        yield True
        return
    try:
        yield file_lock(descriptor)
    finally:
        os.close(descriptor)


@file_errors()
def read_text(path) -> str:
    """Return the text of a UTF-8 file, with its own line ends: the same text on every system."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the byte-order mark of some editors
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
