"""Files -> texts: plain text, .jsonl, tables, also compressed, folders of these, datasets of the Hugging Face hub."""

import importlib
import json
import os
import re
from itertools import chain
from pathlib import Path

from config.runtime.errors import UserError, file_errors, import_optional
from config.runtime.files import read_text
from config.runtime.processes import print0
from data.tokenizer import reason

REVISIONS = {"Skylion007/openwebtext": "79d93d786212f7344586290adb811d4ae6a1762c"}  # the same text for everyone
COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "lzma"}  # modules of Python, in which each has an `open`
TABLES = (".csv", ".tsv", ".parquet", ".arrow")
TEXTS = (".txt", ".md", ".jsonl", *TABLES)  # that a folder stands for; .json may only accompany them


@file_errors()
def text_files(path):
    """Return `path` itself ("-" is standard input) or all texts below a folder, in the order of their names."""
    path = Path("/dev/stdin" if str(path) == "-" else os.path.expanduser(path))
    if not path.is_dir():
        return [path]
    texts = [file for file in files_below(path, set()) if kind_of(file) in TEXTS]
    if not texts:
        raise UserError(f"{path}: no {', '.join(TEXTS)} files below this folder")
    return texts


def files_below(path, seen):
    """Return each file at or below `path` once, also behind links, except below names that begin with a dot."""
    real = os.path.realpath(path)
    if real in seen or not path.exists():  # a link may lead nowhere
        return []
    seen.add(real)
    if not path.is_dir():
        return [path]
    below = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    return [file for entry in below for file in files_below(entry, seen)]


def kind_of(path):
    """Return the suffix of a file, without that of its compression."""
    suffixes = [suffix for suffix in Path(str(path).lower()).suffixes if suffix not in COMPRESSED]
    return suffixes[-1] if suffixes else ""


def read_documents(path, field="text", separator=""):
    """Return the documents of a file: the `field` of each row if it has rows, else its text, cut at each separator.

    A separator that is alone on its line takes the line's end with it.
    """
    if kind_of(path) in (*TABLES, ".json"):
        texts = read_dataset(str(path), field)
    else:
        text = read_text(path, decompress) if Path(path).suffix.lower() in COMPRESSED else read_text(path)
        texts = read_jsonl(text, path, field) if kind_of(path) == ".jsonl" else [text]
    if separator:
        mark = re.escape(separator)
        texts = [part for text in texts for part in re.split(rf"(?m:^{mark}\r?\n)|{mark}", text)]
    return [text for text in texts if text]


def decompress(path) -> bytes:
    try:
        with importlib.import_module(COMPRESSED[Path(path).suffix.lower()]).open(path) as file:
            return file.read()
    except Exception as error:  # each module has its own
        raise UserError(f"{path}: cannot be decompressed: {reason(error)}") from None


def read_jsonl(text, path, field):
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not JSON") from None
            row = row if isinstance(row, dict) else {}
            check_field(f"{path}: line {number}", field, row)
            yield (row[field] or "").encode(errors="replace").decode()  # JSON can hold a lone surrogate


def read_dataset(name, field="text", limit=0.0):
    """Return the texts in the train split of a dataset: NAME or NAME:CONFIGURATION of the hub, a folder or a file.

    They stay on disk, in the cache of `datasets`. With a `limit`, that many gigabytes are streamed into a list.
    """
    if limit:
        print0(f"reading {limit} GB of {name} ...")
    datasets = import_optional("datasets")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told below
    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    options = {"split": "train", "revision": REVISIONS.get(path), "streaming": bool(limit)}
    if Path(path).is_file():
        path, options["data_files"] = os.path.split(os.path.realpath(path))
    try:
        rows = datasets.load_dataset(path, configuration or None, **options)
        first = next(iter(rows), {})
    except Exception as error:  # the hub and the file formats raise many types
        raise UserError(f"{name}: cannot be loaded: {reason(error.__cause__ or error)}") from None
    check_field(name, field, first)
    if not limit:
        return rows[field]
    texts, size = [], 0
    parts = (part[field] for part in rows.iter(64))  # row by row takes ten times as long
    for text in filter(None, chain.from_iterable(parts)):
        texts.append(text)
        size += len(text.encode())
        if size >= limit * 10**9:
            break
    return texts


def check_field(where, field, row):
    if not isinstance(row.get(field, 0), str | None):
        texts = [name for name, value in row.items() if isinstance(value, str)]
        raise UserError(f"{where}: no text in field {field!r}; --field may be: {', '.join(texts) or 'none'}")
