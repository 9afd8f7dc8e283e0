"""What the programs share before PyTorch is imported: settings, errors, files.

The first statements of a program are its settings, `max_iters = 2000  # optimizer steps`, up to its first import.
Config files override them, then --name=value. A setting's type is that of its default: str, bool, int or float. A name
or a value that does not fit is an error, never a guess.
"""

import ast
import difflib
import math
import os
import re
import runpy
import signal
import sys
from contextlib import contextmanager, suppress
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]


class UserError(ValueError):
    """A mistake that we find in settings, files or data. Other errors, except OSErrors, keep their traceback."""


class Settings(NamedTuple):
    values: dict  # of all settings
    given: dict  # of those that config files and options name: later ones override earlier ones
    files: list  # paths of the config files
    options: dict  # of --name=value


def configure(program, argv=None) -> Settings:
    """Begin a program: return the settings of the file `program` (its `__file__`), and report errors from here on.

    Call it before PyTorch is imported, which takes seconds. `--help` prints the settings and ends the program.
    """
    sys.excepthook = report_error
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # not in a notebook; UTF-8 on any terminal and in any pipe
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)
    argv = sys.argv[1:] if argv is None else argv
    if "--help" in argv or "-h" in argv:
        print(read_defaults(program)[1])
        raise SystemExit
    # OpenMP's idle threads wait in a loop. Next to another busy program, that slows the working ones down tenfold.
    with suppress(OSError):  # /proc is Linux's
        if int(Path("/proc/loadavg").read_text().split()[3].partition("/")[0]) > 1:  # programs that compute now
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return read_settings(program, argv)


def read_settings(program, argv) -> Settings:
    """Return the settings of the file `program`, which is not run, as config files and options change them."""
    defaults, _ = read_defaults(program)
    files, options, given = [], {}, {}
    for argument in argv:
        name, equals, text = argument.removeprefix("--").partition("=")
        if not argument.startswith("--"):
            files.append(argument)
            given |= read_file(argument, program, defaults)
        elif equals or name not in defaults:
            options[name] = convert(name, text, defaults, f"--{name}")
        elif isinstance(defaults[name], bool):
            options[name] = True
        else:
            raise UserError(f"{argument}: write it as {argument}=VALUE")
    given |= options
    return Settings(defaults | given, given, files, options)


def read_defaults(program) -> tuple[dict, str]:
    """Return {name: default} of a program's settings, and its docstring with the lines that they stand on."""
    source = Path(program).read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
    docstring, *statements = ast.parse(source).body
    settings = list(takewhile(lambda statement: not isinstance(statement, (ast.Import, ast.ImportFrom)), statements))
    defaults = {setting.targets[0].id: ast.literal_eval(setting.value) for setting in settings}
    lines = source.splitlines()[docstring.end_lineno : settings[-1].end_lineno if settings else 0]
    return defaults, "\n".join([docstring.value.value.strip(), *lines])


def read_file(name, program, defaults) -> dict:
    """Run a config file, from the current folder or the program's, and return its public plain values."""
    paths = [path for path in (Path(name), Path(program).resolve().parent / name) if path.is_file()]
    if not paths or not name.endswith(".py"):  # a text would be run as a program
        raise UserError(f"{name}: no such config file; settings are written as --name=value")
    try:
        names = runpy.run_path(str(paths[0]))
    except (Exception, SystemExit) as error:  # a config file is a program and can fail like one
        raise UserError(f"{name}: {type(error).__name__}: {error}") from error
    plain = {key: value for key, value in names.items() if not (callable(value) or isinstance(value, ModuleType))}
    return {key: convert(key, plain[key], defaults, f"{name}: {key}") for key in plain if not key.startswith("_")}


def convert(name, value, defaults, where):
    """Return `value`, from a config file or as text from the command line, in the type of the setting's default."""
    if name not in defaults:
        near = difflib.get_close_matches(name.lower().replace("-", "_"), defaults, n=1, cutoff=0.85)
        raise UserError(f"{where}: unknown setting ({f'did you mean {near[0]}?' if near else '--help lists them all'})")
    kind, text = type(defaults[name]), str(value)
    if isinstance(value, (str, bool, int, float)):
        if kind is str:
            return re.sub("^(run:|FILE:|)~/", lambda found: found[1] + os.path.expanduser("~/"), text)
        if kind is bool and text.lower() in ("true", "false"):
            return text.lower() == "true"
        with suppress(ValueError):  # no number
            if kind is float and math.isfinite(float(text)):
                return float(text)
            if kind is int and float(text).is_integer():
                return int(text) if text.lstrip("-").isdecimal() else int(float(text))  # 1e3, too
    needed = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    raise UserError(f"{where}: expected {needed}, not {repr(value):.80}")


def check_min(settings, names, low):
    """Raise a UserError for the first of the settings `names` (separated by spaces) that is below `low`."""
    for name in names.split():
        if settings[name] < low:
            raise UserError(f"{name} = {settings[name]} is invalid: it must be at least {low}")


def report_error(kind, error, traceback):
    """End a program. Mistakes, and files that cannot be read or written, take one line on stderr; Ctrl-C takes none."""
    code, line = 2, ""
    if isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    elif isinstance(error, UserError):
        line = error
    elif isinstance(error, OSError):
        line = f"{error.filename or 'the output'}: {error.strerror or error}"
    else:
        code = 1
        sys.__excepthook__(kind, error, traceback)
    if line:
        print(f"{Path(sys.argv[0]).name}: error: {' '.join(str(line).splitlines())}", file=sys.stderr, flush=True)
    dist = sys.modules.get("torch.distributed")
    if hasattr(dist, "is_initialized") and dist.is_initialized():  # a thread of gloo would abort the interpreter's end
        os._exit(code)
    raise SystemExit(code)


def print0(line):
    """Print a line on the first process. A full disk or a closed terminal is no reason to lose a run."""
    if os.environ.get("RANK", "0") == "0":
        with suppress(OSError):
            print(line, flush=True)


@contextmanager
def atomic_write(path):
    """Yield a binary file to write, NAME.tmp until it is whole. If anything fails, `path` stays as it was."""
    temporary = Path(f"{path}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        cause = error.__context__ if isinstance(error, RuntimeError) else error  # PyTorch hides a full disk
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror, cause.filename or str(path)) from error
        raise


def file_lock(file, wait=False) -> bool:
    """Return whether this process now has the lock of an open file. Windows, and some file systems, have no locks."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except (ImportError, OSError) as error:
        return not isinstance(error, BlockingIOError)
    return True


def read_text(path) -> str:
    """Return the text of a UTF-8 file, or of standard input ("-"), with its own line ends, which no system changes."""
    content = sys.stdin.buffer.read() if str(path) == "-" else Path(path).read_bytes()
    try:
        return content.decode("utf-8").removeprefix("\ufeff")  # the byte-order mark of some editors
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}") from None
