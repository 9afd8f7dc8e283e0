"""Files that are whole or not there at all, locks between processes, and texts as they are."""

import hashlib
import os
from contextlib import contextmanager, suppress
from pathlib import Path

from data.console import UserError, file_errors


@contextmanager
def atomic_write(path):
    """A binary file to write that takes the place of `path` at the end, whole, or not at all if anything fails."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
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


def clear_leftovers(folder):
    """Removes what killed processes have left of `atomic_write`; only if no living one can be at work in there."""
    for leftover in Path(folder).glob("*.*.[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)


def file_lock(file, wait=False) -> bool:
    """Whether the open `file` is now this process's own: of all that ask for it, one holds it at a time.

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


@file_errors()
def read_text(path) -> str:
    """A UTF-8 file as it is: line ends stay, so that the same bytes are the same text on every system."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the mark some editors put in front
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
