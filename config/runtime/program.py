"""A program, without PyTorch: its errors, its files, what it prints, how it starts and ends."""

import errno
import hashlib
import importlib
import os
import re
import shlex
import signal
import sys
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from config.runtime.processes import barrier, joined, rank

ROOT = Path(__file__).resolve().parents[2]


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


# -- files


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
    """Return the text of a UTF-8 file, or of standard input ("-"), with its own line ends, which no system changes."""
    content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")  # the byte-order mark of some editors
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# -- what a program prints


def print0(line):
    """Print a line on the first process. A full disk or a closed terminal is no reason to lose a run."""
    if rank() == 0:
        with suppress(OSError):
            print(one_line(line), flush=True)


def command(program, *arguments):
    """Return a shell command that runs a program of this repository from the current folder."""
    path = program if Path.cwd() == ROOT else ROOT / program
    return shlex.join(["python", str(path), *map(str, arguments)])


def one_line(text):
    return " ".join(str(text).splitlines())


# -- how a program starts and ends

held = ExitStack()  # what ends with a program: the lock of its run


def choose_waiting():
    """Let OpenMP's threads, of which there is one a core, sleep when they wait, if other programs are computing now.

    Usually they wait in a loop, which on a quiet machine is faster by a third. But where another program needs the
    same cores, a looping thread takes the core from the one it waits for: ten times slower. Results are the same.
    """
    with suppress(OSError):  # /proc is Linux's
        runnable = Path("/proc/loadavg").read_text().split()[3].partition("/")[0]
        if int(runnable) > 1:  # one is this process
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def check_processes():
    """Raise a UserError if the environment has only a part of what torchrun sets, as on some clusters."""
    size = os.environ.get("WORLD_SIZE") or "1"
    if size == "1":
        return
    numbers, texts = ("WORLD_SIZE", "RANK", "LOCAL_RANK"), ("MASTER_ADDR", "MASTER_PORT")
    wrong = [name for name in numbers if not os.environ.get(name, "").isdecimal()]
    wrong += [name for name in texts if not os.environ.get(name)]
    if not wrong and int(os.environ["RANK"]) >= int(size):
        wrong = ["RANK"]
    if wrong:
        value = os.environ.get(wrong[0])
        found = f"WORLD_SIZE = {size!r}, " + (f"{wrong[0]} = {value!r}" if value else f"but no {wrong[0]}")
        cure = "start several processes with torchrun, which sets all of these variables, or one without WORLD_SIZE"
        del os.environ["WORLD_SIZE"]  # a single process reports the error
        raise UserError(f"the environment has {found}: {cure}")


def install_excepthook():
    """From here on, show users' mistakes in one line on stderr, and end silently on Ctrl-C, even during imports."""
    sys.excepthook = report_error
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook; text is UTF-8, on any terminal and in any pipe
            # a line is written when it is printed: on a full disk print raises an error, not the end of Python
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)


def report_error(kind, error, traceback):
    code, line = 2, ""
    if issubclass(kind, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    elif isinstance(error, UserError):
        line = error
    elif issubclass(kind, OSError) and error.errno == errno.ENOSPC:
        line = f"{error.filename or 'the output'}: {error.strerror}"
    elif out_of_memory(error):
        line = "out of memory: use a smaller batch_size, block_size, num_samples or model"
    else:
        code = 1
        sys.__excepthook__(kind, error, traceback)
    if line:
        process = f" (process {rank()})" if rank() else ""
        print(f"{Path(sys.argv[0]).name}: error{process}: {one_line(line)}", file=sys.stderr)
    exit_program(code)


def out_of_memory(error) -> bool:
    """Return whether an error says that memory is too small. PyTorch has no type of error for that on a CPU."""
    text = f"{type(error).__name__}: {error}"
    return bool(re.match(r"\w*MemoryError:|RuntimeError: .*DefaultCPUAllocator: ", text))


def exit_program(code=0):
    held.close()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a closed one is None
        try:
            stream.flush()
        except OSError:  # a full disk or a closed terminal, reported before
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if joined():  # the interpreter's shutdown would be aborted by a waiting thread of gloo
        os._exit(code)
    raise SystemExit(code)


def exit_together(code=0):
    """End this process, when all others have come as far."""
    barrier()
    exit_program(code)


def quiet_pipe():
    """Let `| head` end the program silently."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)


class StopSignal:
    """Remember the `number` of a Ctrl-C, or of what a cluster sends, so that a run can finish its step, save and leave.

    A second signal ends the program at once, but not under torchrun, whose processes get a terminal's Ctrl-C twice.
    """

    def __init__(self):
        self.number = 0  # no signal yet
        self.listen(self.remember)

    def remember(self, number, frame):
        self.number = number
        self.listen(signal.SIG_IGN if "TORCHELASTIC_RUN_ID" in os.environ else signal.SIG_DFL)

    def listen(self, handler):
        for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1"):  # Windows has only two of them
            number = getattr(signal, name, None)
            if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it on purpose
                signal.signal(number, handler)
