"""
What is compared: variants, read from arguments such as "NAME: @HEAD my.diff config/m1_shakespeare.py --keep_input".

A variant is its code and its settings. `@COMMIT` or a folder names the code, any number of diffs are applied to it one
after another; otherwise it is the working tree. All runs go from a copy, in out/.../code/HASH. Comments and formatting
do not count.
"""

import ast
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from config import split_settings
from config.runtime.errors import UserError, file_errors
from config.runtime.files import sha256

OURS = {"out_dir", "init_from", "overwrite", "eval_only", "seed"}  # settings that a comparison makes itself
NO_MATTER = ("device", "tensorboard", "wandb")  # settings that do not affect a run's results
PRODUCT = ("*.py", "config/**/*.py", "data/*.py", "data/*/*.py")  # the files that runs are made of


@dataclass(frozen=True, eq=False)
class Variant:
    """Settings of train.py, and the code that they are settings of."""

    name: str
    settings: dict  # all of them
    defaults: dict
    home: Path  # its frozen code
    parameters: int = 0
    flops_per_step: float = 0.0
    trouble: tuple = ()  # why it cannot take part: a verdict, and its reason

    @property
    def identity(self):
        return f"{self.home.name}-{digest(self.settings)}"

    @property
    def flops(self):
        return self.flops_per_step * self.settings["max_iters"]

    def options(self, settings):
        """Return train.py's options for settings such as its own."""
        return [f"--{name}={value}" for name, value in settings.items() if value != self.defaults[name]]


def digest(settings):
    """Return eight letters that stand for the settings that matter."""
    return sha256(repr(sorted(item for item in settings.items() if item[0] not in NO_MATTER)).encode())[:8]


def read_variants(words, common, against, folder):
    """Return the variants of the arguments, each with its code frozen in `folder`, and the baseline first."""
    named = [split_name(one) for one in words]
    if against:
        named = named or [split_name("")]
        named.insert(0, (against, [f"@{against}"], named[0][2]))
    if len(named) < 2:
        raise UserError("a baseline and a candidate are needed: two variants, or --against=HEAD and one")
    names, variants = [name for name, _, _ in named], []
    for name, code, rest in named:
        if names.count(name) > 1:
            raise UserError(f"two variants are named {name!r}: rename one of them, as in 'NAME: words'")
        home = freeze(code, folder)
        defaults, settings = read_settings_of(name, rest, common, home)
        variants.append(Variant(name, settings, defaults, home))
    for name in ("dataset", "block_size", "eval_tokens"):
        if len({variant.settings[name] for variant in variants}) > 1:
            raise UserError(f"{name} differs: losses are comparable only on the same windows of the same text")
    return variants


def split_name(words):
    """Return the name of an argument, which may be given as "NAME: ...", the words for its code, and the others."""
    name, _, rest = f"{words} ".rpartition(": ")
    try:
        arguments = shlex.split(rest)
    except ValueError as error:  # a quotation that does not end
        raise UserError(f"{words}: {error}") from None
    is_folder = lambda word: (Path(word).expanduser() / "train.py").is_file()
    code = [word for word in arguments if word.startswith("@") or word.endswith(".diff") or is_folder(word)]
    name = " ".join((name or words).split()) or "defaults"
    return name, code, [word for word in arguments if word not in code]


def read_settings_of(name, arguments, common, home):
    """Return the defaults of the train.py in `home`, and a variant's settings.

    Config files come first, then the `common` options, then its own.
    """
    own = [str(home / word) if (home / word).is_file() else word for word in arguments]  # files as that code has them
    defaults, given = split_settings(home / "train.py", [*common, *own])
    if taken := given.keys() & OURS:
        raise UserError(f"{name}: {', '.join(taken)} is set by the comparison: leave it out")
    return defaults, defaults | given


# -- frozen code -------------------------------------------------------------------------------------------------


@file_errors()
def freeze(code, folder) -> Path:
    """Return the frozen copy, in `folder`, of the code that the words `code` name."""
    diffs = [Path(word).expanduser().resolve() for word in code if word.endswith(".diff")]
    sources = [word for word in code if not word.endswith(".diff")] or [str(ROOT)]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)}: a variant takes one source, plus diffs")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
        copy, source = Path(temporary) / "code", Path(sources[0]).expanduser()
        if sources[0].startswith("@"):
            source, archive = Path(temporary) / "commit", Path(temporary) / "commit.tar"
            run_git(f"{sources[0]}: unknown to git", ROOT, "archive", f"--output={archive}", sources[0][1:])
            shutil.unpack_archive(archive, source, filter="data")
        for path in (path for pattern in PRODUCT for path in source.glob(pattern)):
            place = copy / path.relative_to(source)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
        for diff in diffs:
            apply(diff, copy)
        place = folder / sha256(repr(trees_of(copy)).encode())[:12]
        with suppress(OSError):  # it is there already
            copy.rename(place)
    return place


def run_git(failure, folder, *arguments, **variables):
    done = subprocess.run(["git", *arguments], cwd=folder, env=os.environ | variables, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{failure}: {' '.join(done.stderr.split())}")


def apply(diff, copy):
    """Apply a diff to the copy, without what it says about tests and pages."""
    alone = {"GIT_CEILING_DIRECTORIES": str(copy.parent)}  # or git would look for a repository around it
    run_git(f"{diff.name} does not apply", copy, "apply", "--exclude=tests/*", "--exclude=*.md", str(diff), **alone)
    for path in copy.rglob("*"):
        if path.is_symlink():
            raise UserError(f"{diff.name} makes {path.name} a link: write the file itself, so that it stays as it is")


@cache
def trees_of(code):
    """Return {name: syntax tree} of the programs in a frozen code, and {name: bytes} of its other files."""
    trees = {}
    for path in sorted(code.rglob("*")):
        if path.is_file() and path.suffix != ".pyc" and not path.is_symlink():
            content = path.read_bytes()
            with suppress(SyntaxError, ValueError):  # a slip, which running it will show
                content = ast.dump(ast.parse(content)) if path.suffix == ".py" else content
            trees[path.relative_to(code).as_posix()] = content
    return trees


def differing_files(home, other):
    """Return the names of the files in which two frozen codes differ."""
    return sorted({name for name, _ in trees_of(home).items() ^ trees_of(other).items()})


@file_errors()
def link_data(home, prepared):
    """Let the frozen code in `home` find the prepared data, under the same name."""
    place = home / "data" / prepared.name
    place.mkdir(exist_ok=True)
    for path in prepared.iterdir():
        if path.is_file() and path.suffix != ".py":
            (place / path.name).unlink(missing_ok=True)
            (place / path.name).symlink_to(path.resolve())
