"""Errors in one line, what goes to the terminal, signals, and the end of a program."""

import atexit
import errno
import importlib
import os
import signal
import sys
from contextlib import contextmanager, suppress
from pathlib import Path


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


def rank() -> int:
    number = os.environ.get("RANK", "")  # torchrun sets it; distributed.world_size checks it
    return int(number) if number.isdecimal() else 0


def print0(line):
    """Print a line on the first process. A full disk or a closed terminal is no reason to lose a run."""
    if rank() == 0:
        with suppress(OSError):
            print(line, flush=True)


def install_excepthook():
    """Show users' mistakes as one line on stderr from here on, and Ctrl-C, also during slow imports, as none."""
    sys.excepthook = report_error
    for stream in filter(None, (sys.stdout, sys.stderr)):  # text is UTF-8, on any terminal and in any pipe
        # a line is written when it is printed: on a full disk print raises an error, not the end of Python
        stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def report_error(kind, error, traceback):
    code = 1
    line = ""
    if issubclass(kind, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    elif getattr(error, "for_user", False):
        code = getattr(error, "exit_code", 2)
        line = " ".join(str(error).splitlines())
    elif issubclass(kind, OSError) and error.errno == errno.ENOSPC:
        code = 2
        line = f"{error.filename or 'the output'}: {error.strerror}"
    elif kind.__name__ == "OutOfMemoryError":  # PyTorch's, which may not have been imported yet
        code = 2
        line = f"the GPU ran out of memory: use smaller sizes ({str(error).partition('. ')[0]})"
    else:
        sys.__excepthook__(kind, error, traceback)
    if line:
        process = f" (process {rank()})" if rank() else ""
        print(f"{Path(sys.argv[0]).name}: error{process}: {line}", file=sys.stderr)
    exit_program(code)


def exit_program(code=0):
    dist = sys.modules.get("torch.distributed")  # it takes seconds to import
    together = hasattr(dist, "is_initialized") and dist.is_initialized()
    if together:
        atexit._run_exitfuncs()  # of the trackers
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except OSError:  # a full disk or a closed terminal, reported before
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if together:  # the interpreter's shutdown would be aborted by a waiting thread of gloo
        os._exit(code)
    raise SystemExit(code)


def quiet_pipe():
    """Let `| head` end the program silently."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class StopSignal:
    """Remember the `number` of a Ctrl-C, SIGTERM or SIGHUP, so that a run can finish its step, save and leave.

    A second signal ends the program at once, but not under torchrun, whose processes get a terminal's Ctrl-C twice.
    """

    def __init__(self):
        self.number = 0  # no signal yet
        self.listen(self.remember)

    def remember(self, number, frame):
        self.number = number
        self.listen(signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL)

    def listen(self, handler):
        for name in ("SIGINT", "SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has no SIGHUP
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it on purpose
                signal.signal(number, handler)
