"""Files that are whole or not there at all, a run's checkpoints, locks between processes, and texts as they are."""

import hashlib
import os
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from data.console import UserError, file_errors

CHECKPOINT_VERSION = 6  # of the layout of a checkpoint


@contextmanager
def atomic_write(path):
    """Yield a binary file to write. At the end it takes the place of `path`, whole, or not at all if anything fails.

    Until then it has a name in .tmp. What a killed process leaves by that name, the next one overwrites.
    """
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
    """Return the path of ckpt.pt ("latest") or best.pt ("best") of a run, or the other one if only that exists."""
    paths = [folder / "ckpt.pt", folder / "best.pt"]
    if prefer == "best":
        paths.reverse()
    return next((path for path in paths if path.exists()), paths[0])


@file_errors()
def load_checkpoint(path) -> dict:
    """Return what `save_checkpoint` wrote, on the CPU, if it is whole. No code in it is run."""
    checkpoint = None
    with open(path, "rb") as file, suppress(Exception):  # damaged bytes make the rest fail in all sorts of ways
        if zipfile.ZipFile(file).testzip() is None:  # torch.load does not look at the checksums in it
            file.seek(0)
            checkpoint = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(checkpoint, dict) or "version" not in checkpoint:
        other = path.with_name("best.pt" if path.name == "ckpt.pt" else "ckpt.pt")
        cure = f"; once it is moved away {other} takes its place" if other.exists() else ""
        raise UserError(f"{path}: damaged, or not a checkpoint of train.py{cure}")
    if checkpoint["version"] != CHECKPOINT_VERSION:
        raise UserError(f"{path}: of version {checkpoint['version']!r}; this program reads {CHECKPOINT_VERSION}")
    return checkpoint


def file_lock(file, wait=False) -> bool:
    """Return whether the open `file` is now this process's own: of all that ask for it, one holds it at a time.

    The system takes a lock away from a process that ends, however it ends. Where there are no locks, all get it.
    """
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
    """Yield whether the folder is this process's own, as `file_lock` does, until the end of the block."""
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
    """Return a UTF-8 file as it is: line ends stay, so that the same bytes are the same text on every system."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the mark some editors put in front
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
