"""Files: the folder of the repository, atomic writes, locks, texts."""

import hashlib
import os
from contextlib import contextmanager
from pathlib import Path

from config.runtime.errors import UserError, file_errors

ROOT = Path(__file__).resolve().parents[2]


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


@file_errors()
def read_text(path) -> str:
    """Return the text of a UTF-8 file, with its own line ends: the same text on every system."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the byte-order mark of some editors
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
