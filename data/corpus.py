"""Texts of any size, a piece at a time: plain text and .jsonl as they are, tables by the package `datasets`.

A piece is (whether a document begins here, some of its text). A long text is cut where no token could have spanned the
cut, so that its pieces give the tokens of the whole: after a line's end or before a space. (Where some megabytes have
neither it is cut between any two characters. A tokenizer that puts a space before every text, as Llama 2's does, puts
one after each cut too.)
"""

import glob
import json
import os
import re
from functools import lru_cache
from pathlib import Path

from config.runtime.common import UserError, file_errors

PIECE = 4 * 2**20  # bytes of plain text read at a time

# the arguments of `datasets.load_dataset` for files of rows, by suffix, after which there may be a compression's
FORMATS = {
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".parquet": {"path": "parquet"},
    ".csv": {"path": "csv"},
    ".tsv": {"path": "csv", "sep": "\t"},
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


@file_errors()
def text_files(path):
    """Return `path` itself, or all texts below it, in the order of their names, if it is a folder."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    suffixes = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet")
    files = sorted(file for file in path.rglob("*") if file.name.lower().endswith(suffixes) and file.is_file())
    if not files:
        raise UserError(f"{path}: no {', '.join(suffixes)} files below this folder")
    return files


def read_files(paths, field="text"):
    """Yield the pieces of files, one after another. In files of rows, known by their suffix, `field` is the text."""
    for path in paths:
        os.stat(path)  # an OSError, which names it, if it is not there
        suffix, compressed = suffix_of(path)
        if suffix == ".jsonl" and not compressed:
            yield from read_jsonl(path, field)
        elif suffix in FORMATS:
            yield from read_rows(path, field)
        elif compressed:
            raise UserError(f"{path}: only files of rows, such as .jsonl.gz, are read compressed: decompress it first")
        else:
            yield from read_plain_text(path)


def suffix_of(path):
    """Return the suffix of a file without that of a compression, and whether it has one of those."""
    path = Path(str(path).lower())
    compressed = path.suffix in COMPRESSIONS
    return Path(path.stem).suffix if compressed else path.suffix, compressed


# up to the last line's end, or the last space, that stands between visible characters; up to the last character
CUT = re.compile(rb"(?s:.*)(?:[!-~\x80-\xff]\n(?=[!-~\x80-\xff])|[!-~\x80-\xff](?= [!-~\x80-\xff]))")
ANY_CUT = re.compile(rb"(?s:.+)(?=[\x00-\x7f\xc0-\xff])")


def read_plain_text(path):
    """Yield the pieces of a file in UTF-8, which is one document."""
    start, rest = 0, b""  # what has been read but not yielded, and where it begins

    def decode(content):
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise UserError(f"{path}: not UTF-8 text at byte {start + error.start}") from None
        return start == 0, text if start else text.removeprefix("\ufeff")  # the mark some editors put in front

    with open(path, "rb") as file:
        while len(content := file.read(PIECE)) == PIECE:
            content = rest + content
            cut = CUT.match(content) or ANY_CUT.match(content)
            piece, rest = (content[: cut.end()], content[cut.end() :]) if cut else (content, b"")
            yield decode(piece)
            start += len(piece)
        if content := rest + content:  # an empty file is no document
            yield decode(content)


def read_jsonl(path, field):
    """Yield a document for each line of a file."""
    place = 0
    with open(path, "rb") as file:
        for line in file:
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError):
                    raise UserError(f"{path}: line at byte {place}: not JSON") from None
                row = row if isinstance(row, dict) else {}
                if not isinstance(row.get(field, 0), str | None):
                    texts = [name for name, value in row.items() if isinstance(value, str)]
                    raise no_text(f"{path}: line at byte {place}", field, texts)
                if row[field] is not None:
                    yield True, row[field].encode(errors="replace").decode()  # JSON can hold half a surrogate pair
            place += len(line)


def read_rows(name, field="text"):
    """Yield a document for each row of a dataset's train split: of a file, of a folder or of the Hugging Face hub."""
    rows = load_rows(str(name))
    texts = [name for name, value in rows.features.items() if getattr(value, "dtype", "") in ("string", "large_string")]
    if field not in texts:
        raise no_text(name, field, texts)
    for batch in rows.select_columns(field).iter(batch_size=1000):
        yield from ((True, text) for text in batch[field] if text is not None)


@lru_cache(maxsize=4)
def load_rows(name):
    """Return the train split of a dataset, NAME or NAME:CONFIGURATION. `datasets` keeps it in a folder of its own."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{name} is read by a package that is not here: pip install datasets") from None
    try:
        if os.path.isfile(name) and suffix_of(name)[0] in FORMATS:
            return load_dataset(**FORMATS[suffix_of(name)[0]], data_files=glob.escape(name), split="train")
        path, _, configuration = (name, "", "") if os.path.exists(name) else name.partition(":")
        return load_dataset(path, configuration or None, split="train")
    except Exception as error:  # of the hub and of many formats, with types of their own
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"{name}: cannot be loaded: {reason}") from None


def no_text(where, field, texts):
    return UserError(f"{where}: no text in field {field!r}; --field may be: {', '.join(texts) or 'none'}")
