"""Settings: what a program declares at its top, changed by config files, changed by the command line.

A program declares its settings as plain assignments above the line that reads them:

    max_iters = 2000  # optimizer steps
    dropout = 0.0     # share of activations dropped in training
    settings = read_settings(__file__)

and is run as `python train.py config/m1_shakespeare.py --max_iters=200`. The type of a setting is the
type of its default (str, bool, int or float); a name or a value that does not fit is an error, never a guess.
"""

import ast
import difflib
import io
import math
import runpy
import sys
import tokenize
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from data.console import UserError

BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass
class Setting:
    default: str | bool | int | float
    comment: str


def read_settings(program, argv=None) -> dict:
    """The settings of `program` (its `__file__`): defaults <- config files, in order <- `--name=value` options.

    A bare `--name` turns a bool on. `--help` prints every setting and exits.
    """
    argv = sys.argv[1:] if argv is None else argv
    declared = declared_settings(program)
    if "--help" in argv or "-h" in argv:
        print(usage(program, declared))
        raise SystemExit(0)

    files = [argument for argument in argv if not argument.startswith("-")]
    options = {}
    for argument in argv:
        if argument.startswith("-"):
            name, value = parse_option(argument, declared)
            options[name] = value

    settings = {name: setting.default for name, setting in declared.items()}
    for path in files:
        settings |= read_file(find_file(path, program), declared)
    return settings | options


def declared_settings(program) -> dict[str, Setting]:
    """The literal assignments (and the comments beside them) above the call of `read_settings` in a script."""
    source = Path(program).read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}

    declared = {}
    for statement in ast.parse(source).body:
        calls = (ast.unparse(node.func) for node in ast.walk(statement) if isinstance(node, ast.Call))
        if any(call.split(".")[-1] == "read_settings" for call in calls):
            break
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if name.islower() and not name.startswith("_"):
                try:
                    default = ast.literal_eval(value)
                except ValueError:  # computed, so not a setting
                    continue
                if type(default) in (str, bool, int, float):
                    declared[name] = Setting(default, comments.get(statement.end_lineno, ""))
    return declared


def parse_option(argument, declared):
    """`--name=value` (or `--name`, for a bool) as the setting's name and its converted value."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if name not in declared:
        raise UserError(f"{argument.partition('=')[0]}: {unknown(name, declared)}")
    default = declared[name].default
    if not equals and not isinstance(default, bool):
        raise UserError(f"{argument}: write it as --{name}=value")
    try:
        return name, convert(text if equals else "true", default)
    except UserError as error:
        raise UserError(f"--{name}: {error}") from None


def find_file(path, program) -> Path:
    """A config file, looked for from the current folder and then from the program's, so that runs work anywhere."""
    home = Path(program).resolve().parent
    if path.endswith(".pt") or Path(path).is_dir() and any(Path(path).glob("*.pt")):
        raise UserError(f"{path}: not a config file; a run is named by --out_dir=FOLDER")
    for candidate in (Path(path), home / path):
        if candidate.is_file():
            if candidate.suffix != ".py":  # other files could be taken for programs too, such as a zip
                raise UserError(f"{path}: not a config file, whose name would end in .py")
            if candidate.samefile(program):
                raise UserError(f"{path}: is the program itself, not a config file")
            return candidate
    known = {file.stem: file.relative_to(home) for file in home.glob("config/[!_]*.py")}
    stem = Path(path).stem or "?"
    near = difflib.get_close_matches(stem, known, n=1) or [name for name in sorted(known) if name.startswith(stem)]
    hint = f"did you mean {known[near[0]]}?" if near else "settings are written as --name=value"
    raise UserError(f"{path}: no such config file ({hint})")


def read_file(path, declared) -> dict:
    """Run a config file; its public names, functions, classes and modules apart, are settings."""
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # a config file is a program and can fail like one
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        where = f"{path}, line {line}" if line else f"{path}"
        what = error.msg if isinstance(error, SyntaxError) else error
        raise UserError(f"{where}: {type(error).__name__}: {what}") from None

    settings = {}
    for name, value in names.items():
        if name.startswith("_") or callable(value) or isinstance(value, ModuleType):
            continue
        if name not in declared:
            raise UserError(f"{path}: {unknown(name, declared)}")
        try:
            settings[name] = convert(value, declared[name].default)
        except UserError as error:
            raise UserError(f"{path}: {name}: {error}") from None
    if not settings:
        raise UserError(f"{path}: sets nothing; settings are written as name = value")
    return settings


def unknown(name, declared):
    near = difflib.get_close_matches(name, declared, n=1)
    return f"unknown setting {name!r} ({f'did you mean {near[0]}?' if near else '--help lists all settings'})"


def convert(value, default):
    """`value`, from a config file or as text from the command line, in the type of `default`.

    >>> convert("1e3", 2000), convert(0, 0.1), convert("off", True), convert(False, "auto")
    (1000, 0.0, False, 'false')
    """
    kind = type(default)
    if isinstance(value, (str, bool, int, float)):
        if kind is str:
            return str(value).lower() if isinstance(value, bool) else str(value)
        if kind is bool and str(value).lower() in BOOLS:
            return BOOLS[str(value).lower()]
        if kind in (int, float) and not isinstance(value, bool):
            try:
                if kind is int and not isinstance(value, float) and abs(int(value)) < 2**63:
                    return int(value)
            except ValueError:  # text, perhaps of the form 1e3
                pass
            try:
                number = float(value)
            except (ValueError, OverflowError):
                number = math.nan
            if math.isfinite(number) and (kind is float or number.is_integer() and abs(number) < 2**63):
                return kind(number)
    wanted = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    raise UserError(f"{wanted} is needed, not {shorten(repr(value))}")


def shorten(text, length=80):
    return text if len(text) <= length else text[:length] + "..."


def usage(program, declared) -> str:
    """The text of `--help`."""
    rows = [(f"--{name}={s.default}", type(s.default).__name__, s.comment) for name, s in declared.items()]
    width = max((len(row[0]) for row in rows), default=0)
    lines = [f"  {option:{width}}  {kind:5}  {comment}".rstrip() for option, kind, comment in rows]
    head = f"usage: python {Path(program).name} [config.py ...] [--name=value ...]"
    return "\n".join([head, "", "settings, their defaults and types:", *lines])
