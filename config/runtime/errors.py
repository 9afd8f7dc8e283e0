"""What users are told: mistakes in one line, and commands to copy."""

import importlib
import shlex
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class UserError(ValueError):
    """A mistake in settings, files or data that the project itself has found. All other errors keep their traceback."""

    for_user = True  # programs show it as one line


class FolderInUse(UserError):
    exit_code = 3


@contextmanager
def file_errors():
    """Raise a UserError that names the file for an OSError inside."""
    try:
        yield
    except OSError as error:
        named = error.filename is not None and error.strerror
        raise UserError(f"{error.filename}: {error.strerror}" if named else error) from error


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
