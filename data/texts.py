"""Files -> texts: plain text, .jsonl, tables, compressed files, folders of these, datasets of the Hugging Face hub."""

import glob
import json
import os
import re
from itertools import chain
from pathlib import Path

from config.runtime.errors import UserError, file_errors, import_optional
from config.runtime.files import read_text
from config.runtime.processes import one_line, print0

REVISIONS = {"Skylion007/openwebtext": "79d93d786212f7344586290adb811d4ae6a1762c"}  # the same text for everyone
TEXTS = (".txt", ".md", ".jsonl", ".csv", ".tsv", ".parquet", ".arrow")  # that a folder stands for
TABLES = {".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".arrow": "arrow"}
COMPRESSED = (".gz", ".bz2", ".xz")


@file_errors()
def text_files(path):
    """Return `path` itself ("-" is standard input) or all texts below a folder, in the order of their names."""
    path = Path("/dev/stdin" if str(path) == "-" else os.path.expanduser(path))
    if not path.is_dir():
        return [path]
    files = files_below(path, set())
    texts = [file for file in files if file.suffix.lower() in TEXTS]  # others may only accompany these
    texts = texts or [file for file in files if file.suffix.lower() in (".json", *COMPRESSED)]
    if not texts:
        raise UserError(f"{path}: no {', '.join(TEXTS)}, .json or compressed files below this folder")
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


def read_documents(path, field="text", separator=""):
    """Return the documents of a file: the `field` of each row if it has rows, else its text, cut at each separator.

    A separator that is alone on its line takes the line's end with it.
    """
    path = Path(path)
    kind = path.suffix.lower()
    if kind == ".jsonl":
        texts = read_jsonl(path, field)
    else:
        texts = read_table(path, field) if kind in (*TABLES, *COMPRESSED) else [read_text(path)]
    if separator:
        mark = re.escape(separator)
        texts = [part for text in texts for part in re.split(rf"(?m:^{mark}\r?\n)|{mark}", text)]
    return [text for text in texts if text]


def read_jsonl(path, field):
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not JSON") from None
            row = row if isinstance(row, dict) else {}
            check_field(f"{path}: line {number}", field, row)
            yield (row[field] or "").encode(errors="replace").decode()  # JSON can hold a lone surrogate


def read_table(path, field):
    """Return the texts in a table, or in a compressed file."""
    kind = next(filter(TABLES.get, reversed(Path(path.name.lower()).suffixes)), "")
    options = {".tsv": {"sep": "\t"}, "": {"sample_by": "document"}}.get(kind, {})
    options["data_files"] = glob.escape(os.path.realpath(path))
    return read_dataset(str(path), field if kind else "text", float("inf"), TABLES.get(kind, "text"), **options)


def read_dataset(name, field="text", limit=0.0, builder="", **options):
    """Return the texts in the train split of a dataset, NAME or NAME:CONFIGURATION: of the hub, or of a folder.

    They stay on disk, in the cache of `datasets`. With a `limit`, that many gigabytes are streamed into a list.
    Where `name` is that of a file, `builder` and `options` say how `datasets` reads it.
    """
    if limit:
        print0(f"reading {name} ...")
    datasets = import_optional("datasets")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # errors are told below
    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    options |= {"split": "train", "revision": REVISIONS.get(path), "streaming": bool(limit)}
    try:
        rows = datasets.load_dataset(builder or path, configuration or None, **options)
        check_field(name, field, next(iter(rows), {}))
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
    except UserError:
        raise
    except Exception as error:  # the hub and the file formats raise many types
        cure = "; HF_HOME=FOLDER moves the cache" if isinstance(error, OSError) and error.filename else ""
        raise UserError(f"{name}: cannot be loaded: {one_line(error.__cause__ or error):.200}{cure}") from None


def check_field(where, field, row):
    if not isinstance(row.get(field, 0), str | None):
        texts = [name for name, value in row.items() if isinstance(value, str)]
        raise UserError(f"{where}: no text in field {field!r}; --field may be: {', '.join(texts) or 'none'}")
