"""Mistakes of users, which are told in one line."""

import importlib
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake in settings, files or data that the project itself has found. All other errors keep their traceback."""


@contextmanager
def file_errors(path=None):
    """Raise a UserError that names the file, or else `path`, for an OSError inside."""
    try:
        yield
    except (OSError, RuntimeError) as raised:
        error = raised if isinstance(raised, OSError) else raised.__context__  # PyTorch hides those of torch.save
        if not isinstance(error, OSError):
            raise
        name = error.filename2 or error.filename or path  # filename2: what it was to be renamed to
        raise UserError(f"{name}: {error.strerror}" if name and error.strerror else error) from error


def import_optional(package):
    """Return a package that is not in requirements.txt."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"this needs a package that is not installed: pip install {package}") from None
