"""Files that are whole or not there at all, locks between processes, and texts as they are."""

import hashlib
import os
import zipfile
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from data.console import UserError, file_errors


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
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    with suppress(OSError):  # the rename itself reaches the disk; not every system can sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load_whole(path):
    """Return what torch.save wrote, on the CPU, or None if it is damaged. No code in it is run."""
    try:
        with zipfile.ZipFile(path) as file:  # torch.load does not look at the checksums in it
            if file.testzip() is not None:
                return None
        return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError):
        raise
    except Exception:  # damaged bytes make either fail in all sorts of ways
        return None


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
