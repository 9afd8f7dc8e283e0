"""Settings: the plain assignments at the top of a program, changed by config files, then by the command line.

The first statements of a program are its settings, `max_iters = 2000  # optimizer steps`, up to its first import. It is
run as `python train.py config/m1_shakespeare.py --max_iters=200`. The type of a setting is that of its default: str,
bool, int or float. A name or a value that does not fit is an error, never a guess.
"""

import ast
import difflib
import math
import os
import re
import runpy
import sys
from contextlib import suppress
from decimal import Decimal
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from config.runtime.program import (
    UserError,
    check_processes,
    choose_waiting,
    file_errors,
    install_excepthook,
    quiet_pipe,
)

WORDS = {  # of nanoGPT, and what train.py has instead
    "gradient_accumulation_steps": "grad_accum_steps",
    "lr": "learning_rate",
    "min_lr": "min_lr_frac, a fraction of learning_rate",
    "lr_decay_iters": "max_iters, where the decay ends",
    "decay_lr": "lr_decay, which may be none",
    "eval_iters": "eval_tokens, which counts tokens",
    "always_save_checkpoint": "checkpoint_interval, which counts steps",
    "backend": "device, which chooses it",
}
BOOLS = {"true": True, "false": False}


class Settings(NamedTuple):
    """The settings of a program, by their origin. Later ones override earlier ones."""

    defaults: dict
    files: list  # of each config file, in order: its path, and a dict
    options: dict  # of --name=value

    @property
    def given(self) -> dict:
        merged = {}
        for values in [*(values for _, values in self.files), self.options]:
            merged |= values
        return merged

    @property
    def values(self) -> dict:
        return self.defaults | self.given


def configure(program, argv=None):
    """Give the settings of a program their values for this run. `program` is its `globals()`."""
    program.update(start_program(program["__file__"], argv).values)


def start_program(program, argv=None) -> Settings:
    """Begin a program: return what read_settings does. Call it before PyTorch is imported, which takes seconds."""
    install_excepthook()  # from here on, users' mistakes end in one line and exit code 2
    check_processes()
    choose_waiting()
    return read_settings(program, sys.argv[1:] if argv is None else argv)


def read_settings(program, argv) -> Settings:
    """Return the settings of `program` (its `__file__`), which is not run. `--help` prints them and exits."""
    defaults, text = read_defaults(program)
    if "--help" in argv or "-h" in argv:
        quiet_pipe()
        print(text)
        raise SystemExit(0)
    files, options = [], {}
    for argument in argv:
        if argument.startswith("-"):
            options |= read_option(argument, defaults)
        else:
            files.append((argument, read_file(find_file(argument, program), defaults)))
    return Settings(defaults, files, options)


def read_defaults(program) -> tuple[dict, str]:
    """Return {name: default} of a program's settings, and its docstring with the lines that they stand on."""
    source = Path(program).read_text(encoding="utf-8-sig")  # some editors write a byte-order mark
    tree = ast.parse(source)
    docstring, *statements = tree.body
    settings = list(takewhile(lambda statement: not isinstance(statement, (ast.Import, ast.ImportFrom)), statements))
    defaults = {}
    for setting in settings:
        try:
            name, value = setting.targets[0].id, ast.literal_eval(setting.value)
        except (AttributeError, ValueError):  # with a type, or a calculation
            name, value = "", None
        if not isinstance(value, (str, bool, int, float)):
            needed = "a setting is name = value, where the value is a text, True, False or a number"
            raise UserError(f"{program}, line {setting.lineno}: {needed}")
        defaults[name] = value
    lines = source.splitlines()[docstring.end_lineno : statements[len(settings)].lineno - 1]
    return defaults, "\n".join([ast.get_docstring(tree), *lines]).rstrip()


def read_option(argument, defaults) -> dict:
    """Return {name: value} of `--name=value`, or of `--name`, for a bool."""
    name, equals, text = argument.removeprefix("--").partition("=")
    if not equals and not isinstance(defaults.get(name, True), bool):
        raise UserError(f"{argument}: write it as --{name}=value")
    return {name: convert(name, text if equals else "true", defaults, argument.partition("=")[0])}


@file_errors()
def find_file(path, program) -> Path:
    """Return a config file, searched for in the current folder, then in the program's: runs work anywhere."""
    home = Path(program).resolve().parent
    for file in (Path(path), home / path):
        if path.endswith(".py") and file.is_file():  # a text would be run as a program
            return file
    known = sorted(file.name for file in home.glob("config/[!_]*.py"))
    near = [name for name in known if name.startswith(f"{Path(path).stem}_")]  # m1.py is short for m1_shakespeare.py
    near = near or difflib.get_close_matches(Path(path).name, known, n=1, cutoff=0.85)
    hint = "settings are written as --name=value, as in --out_dir=FOLDER or --start=FILE:story.txt; "
    hint += "config files end in .py; data/text/prepare.py reads texts"
    if near and not Path(path).is_dir():  # a run's folder is named after its config
        hint = f"did you mean config/{' or config/'.join(near)}?"
    raise UserError(f"{path:.99}: no such config file ({hint})")


def read_file(path, defaults) -> dict:
    """Run a config file, and return its public names, except those of functions, classes and modules."""
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # a config file is a program and can fail like one
        raise UserError(f"{path}: {type(error).__name__}: {error}") from error
    public = {name: value for name, value in names.items() if not name.startswith("_")}
    values = {name: value for name, value in public.items() if not (callable(value) or isinstance(value, ModuleType))}
    return {name: convert(name, value, defaults, f"{path}: {name}") for name, value in values.items()}


def convert(name, value, defaults, where):
    """Return `value`, from a config file or as text from the command line, in the type of its default."""
    if name not in defaults:
        # not min_lr_frac for another program's min_lr, which means something else
        near = difflib.get_close_matches(name.lower().replace("-", "_"), defaults, n=1, cutoff=0.85)
        hint = f"did you mean {near[0]}?" if near else "--help lists all settings"
        if WORDS.get(name, "").partition(",")[0] in defaults:
            hint = f"train.py calls it {WORDS[name]}"
        raise UserError(f"{where}: unknown setting ({hint})")
    kind = type(defaults[name])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if isinstance(value, (str, bool, int, float)):
        if kind is str:
            return expand_home(name, text)
        if kind is bool and text.lower() in BOOLS:
            return BOOLS[text.lower()]
        with suppress(ArithmeticError, ValueError):  # text that is no number, or a number that is too large
            if kind is float and math.isfinite(float(text)):
                return float(text)
            number = Decimal(text)
            if kind is int and abs(number) < 2**63 and number == int(number):
                return int(number)
    needed = {str: "text", bool: "true or false", int: "a whole number", float: "a finite number"}[kind]
    raise UserError(f"{where}: expected {needed}, not {repr(value):.80}")


def expand_home(name, text):
    """Return text with ~ as the home folder in paths: ~/x, run:~/x, FILE:~/x. Prompts and separators stay."""
    prefix, path = re.fullmatch("(FILE:|run:|)(.*)", text, re.DOTALL).groups()
    return text if name in ("start", "separator") and not prefix else prefix + os.path.expanduser(path)


def check_range(settings, names, low, high=math.inf):
    """Raise a UserError for the first of the settings `names` (separated by spaces) that is not in [low, high)."""
    for name in names.split():
        if not low <= settings[name] < high:
            below = f" and below {high}" if high < math.inf else ""
            raise UserError(f"{name} = {settings[name]} is invalid: it must be at least {low}{below}")
