"""
Each variant's code as it was when the comparison began: a copy in out/.../code/HASH, from which all its runs go.

A variant may name its code: `@COMMIT`, or a folder, and any number of diffs, NAME.diff, which apply one after another.
Otherwise it is the working tree.
"""

import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from contextlib import suppress
from pathlib import Path

from config.runtime.errors import UserError, file_errors
from config.runtime.files import sha256

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("*.py", "config/**/*.py", "data/*.py", "data/*/*.py")  # the files that runs are made of


def split_code(arguments):
    """Return the arguments that name a variant's code, and the others."""
    is_folder = lambda word: (Path(word).expanduser() / "train.py").is_file()
    code = [word for word in arguments if word.startswith("@") or word.endswith(".diff") or is_folder(word)]
    return code, [word for word in arguments if word not in code]


@file_errors()
def freeze(code, folder) -> Path:
    """Return the frozen copy, in `folder`, of the code that the words `code` name."""
    sources = [word for word in code if not word.endswith(".diff")]
    if len(sources) > 1:
        raise UserError(f"{' and '.join(sources)}: a variant takes one source, plus diffs")
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder) as temporary:
        copy = Path(temporary) / "code"
        if sources and sources[0].startswith("@"):
            copy_commit(sources[0][1:], Path(temporary) / "commit", copy)
        else:
            copy_product(Path(sources[0]).expanduser() if sources else ROOT, copy)
        for word in code:
            if word.endswith(".diff"):
                apply(Path(word).expanduser().resolve(), copy)
        place = folder / sha256(repr(files_of(copy)).encode())[:12]
        with suppress(OSError):  # it is there already
            copy.rename(place)
    return place


def copy_product(source, target):
    for path in sorted(path for pattern in PRODUCT for path in source.glob(pattern)):
        place = target / path.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, place)


def copy_commit(commit, scratch, target):
    done = subprocess.run(["git", "-C", str(ROOT), "archive", commit], capture_output=True)
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())
        raise UserError(f"@{commit}: unknown to git: {said}")
    with suppress(tarfile.ReadError), tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(scratch, filter="data")
    if not (scratch / "train.py").exists():
        raise UserError(f"@{commit}: has no train.py")
    copy_product(scratch, target)


def apply(diff, copy):
    """Apply a diff to the copy, without what it says about tests and pages."""
    if not diff.is_file():
        raise UserError(f"{diff}: no such file")
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(copy.parent)}  # or git would look for a repository around it
    command = ["git", "apply", "--exclude=tests/*", "--exclude=*.md", str(diff)]
    done = subprocess.run(command, cwd=copy, env=alone, capture_output=True, text=True)
    if done.returncode:
        raise UserError(f"{diff.name} does not apply: {' '.join(done.stderr.split())}")


def files_of(code):
    """Return the content of each file in a frozen code."""
    paths = [path for path in sorted(code.rglob("*")) if path.suffix != ".pyc" and not path.is_symlink()]
    return {path.relative_to(code).as_posix(): path.read_bytes() for path in paths if path.is_file()}


@file_errors()
def link_data(home, prepared):
    """Let the frozen code in `home` find the prepared data, under the same name."""
    place = home / "data" / prepared.name
    place.mkdir(exist_ok=True)
    for path in prepared.iterdir():
        if path.is_file() and path.suffix != ".py":
            (place / path.name).unlink(missing_ok=True)
            (place / path.name).symlink_to(path.resolve())


def differing_files(home, other):
    """Return the names of the files in which two frozen codes differ."""
    mine, theirs = files_of(home), files_of(other)
    return sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
