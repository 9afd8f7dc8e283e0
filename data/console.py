"""What a program says to whoever runs it: its lines, and the mistakes that they can mend."""

import os
from contextlib import contextmanager, suppress


class UserError(ValueError):
    """A mistake in settings, files or data, which the project itself has found: what is wrong, and what would work.

    The programs show it as one line and end with exit code 2. Every other error keeps its traceback, whatever its
    type: it may have been raised by a line of model.py that somebody has just written.
    """


@contextmanager
def file_errors():
    """Raise a UserError, which names the file, for an OSError of the files that are read or written inside."""
    try:
        yield
    except OSError as error:
        named = error.filename is not None and error.strerror
        raise UserError(f"{error.filename}: {error.strerror}" if named else error) from error


def print0(line):
    """Print a line, on the first of several processes. A full disk or a closed terminal is no reason to lose a run."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(line, flush=True)
