"""What users are told: mistakes in one line, and commands to copy."""

import importlib
import re
import shlex
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class UserError(ValueError):
    """A mistake in settings, files or data that the project itself has found. All other errors keep their traceback."""

    exit_code = 2


class FolderInUse(UserError):
    exit_code = 3


@contextmanager
def file_errors():
    """Raise a UserError that names the file for an OSError inside."""
    try:
        yield
    except OSError as error:
        name = error.filename2 or error.filename  # the one that it was to be renamed to
        raise UserError(f"{name}: {error.strerror}" if name is not None and error.strerror else error) from error


def import_optional(package):
    """Return a package that is not in requirements.txt."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"this needs a package that is not installed: pip install {package}") from None


def command(program, *arguments):
    """Return a shell command that runs a program of this repository from the current folder."""
    path = program if Path.cwd() == ROOT else ROOT / program
    return shlex.join(["python", str(path), *map(str, arguments)])


def printable(text):
    """Return text with its control characters escaped, since a terminal would obey them, whoever wrote them."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda match: repr(match[0])[1:-1], text)


def one_line(text):
    return printable(" ".join(str(text).splitlines()))
