"""A text -> train.bin and val.bin (token ids, one after another) and meta.json (the tokenizer, and what the ids are).

A text is a str or, for several documents, anything that yields a str for each, every time it is iterated over.
"""

import hashlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path

import numpy as np

from config import read_settings
from config.runtime.errors import UserError, file_errors, print0
from config.runtime.files import atomic_write, file_lock, folder_lock, load_checkpoint, read_text, sha256
from config.runtime.files import source_checkpoint
from data.dataset import SPLITS, VERSION, read_meta, token_dtype
from data.tokenizer import CharTokenizer, TokenizerError, gpt2_tokenizer, hf_tokenizer, reason, tokenizer_from_state
from data.tokenizer import train_bpe

DATA = Path(__file__).resolve().parent  # has a folder for each dataset
CHUNK = 4 * 2**20  # characters that a thread encodes at a time
REVISIONS = {"Skylion007/openwebtext": "79d93d786212f7344586290adb811d4ae6a1762c"}  # the same text for everyone
SAMPLE = 16 * 2**20  # characters to learn byte pairs from, at most


@file_errors()
def ensure_prepared(name) -> Path:
    """Return the folder of a dataset. Run its prepare.py first if it is not prepared or its input.txt has changed."""
    names = sorted({path.parent.name for path in [*DATA.glob("*/prepare.py"), *DATA.glob("*/meta.json")]})
    if name not in names:
        if name and Path(name).exists() and Path(name).resolve().parent != DATA:
            short = re.sub(r"\W+", "_", Path(name).resolve().stem)
            command = f"python data/text/prepare.py {shlex.quote(name)} --name={short}"
            raise UserError(f"dataset = {name!r} is a text: {command} prepares it for --dataset={short}")
        raise UserError(f"dataset = {name!r} does not work: it must be one of {', '.join(names)}")
    folder = DATA / name
    script, text = folder / "prepare.py", folder / "input.txt"
    if not script.exists():  # prepared by data/text/prepare.py
        return folder
    with open(script, "rb") as file:
        file_lock(file, wait=True)  # of runs that start together one prepares, and the others wait for it
        meta = read_meta(folder) if (folder / "meta.json").is_file() else {}
        if not meta:
            why = "it has not been prepared"
        elif text.exists() and sha256(read_text(text).encode()) != meta["text_sha256"]:
            why = "its input.txt is not the text that was prepared"
        else:
            return folder
        known = read_settings(script, [])
        options = [f"--{key}={value}" for key, value in meta.get("settings", {}).items() if key in known]
        print0(" ".join([f"data/{name}: {why}, running data/{name}/prepare.py", *options]))
        if subprocess.run([sys.executable, script, *options]).returncode:
            raise SystemExit(2)  # prepare.py has printed the reason
    return folder


@file_errors()
def text_files(path):
    """Return `path` itself or, if it is a folder, all texts below it, in the order of their names."""
    if not Path(path).is_dir():
        return [Path(path)]
    files, folders = [], set()
    for folder, subfolders, names in os.walk(path, followlinks=True):
        if os.path.realpath(folder) in folders:
            subfolders.clear()  # links may lead in a circle
            continue
        subfolders.sort()
        folders.add(os.path.realpath(folder))
        files += [Path(folder, name) for name in names if Path(name).suffix.lower() in (".txt", ".md", ".jsonl")]
    files = sorted(filter(Path.is_file, files))
    if not files:
        raise UserError(f"{path}: no .txt, .md or .jsonl files below this folder")
    return files


def read_documents(path, field="text"):
    """Return the documents of a file: the `field` of each line of a .jsonl file, or the whole text of any other."""
    path = Path(path)
    if path.suffix.lower() in (".csv", ".gz", ".json", ".parquet", ".tsv", ".xz", ".zst"):
        cure = "python data/openwebtext/prepare.py --dataset=FOLDER reads a folder of such files"
        raise UserError(f"{path}: only plain text and .jsonl are read here; {cure}")
    text = read_text(path)
    if path.suffix.lower() != ".jsonl":
        return [text] if text else []
    documents = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{path}: line {number} is not JSON") from None
            row = row if isinstance(row, dict) else {}
            check_field(f"{path}: line {number}", field, row)
            if row[field] is not None:
                documents.append(row[field].encode(errors="replace").decode())  # JSON can hold a lone surrogate
    return documents


def read_dataset(name, field="text", limit=""):
    """Return the texts in the train split of a dataset, NAME or NAME:CONFIGURATION: of the hub, or of a folder.

    Without a `limit`, they stay on disk, in the cache of `datasets`. With one, that much text is streamed into a list.
    """
    match = re.fullmatch(r"([1-9]\d*)([KMG])B", limit)
    if limit and not match:
        raise UserError(f"limit = {limit!r} does not work: write it as 500MB or 1GB")
    try:
        from datasets import load_dataset
        from tqdm import tqdm
    except ImportError:
        raise UserError(f"{name} needs a package that is not installed: pip install datasets") from None
    path, _, configuration = (name, "", "") if Path(name).exists() else name.partition(":")
    options = {"split": "train", "revision": REVISIONS.get(path), "streaming": bool(limit)}
    try:
        rows = load_dataset(path, configuration or None, **options)
        row = next(iter(rows), {})
    except Exception as error:  # the hub and the file formats raise many types
        raise UserError(f"{name}: cannot be loaded: {reason(error.__cause__ or error)}") from None
    check_field(name, field, row)
    if not limit:
        return rows[field]
    texts, size = [], int(match[1]) * {"K": 10**3, "M": 10**6, "G": 10**9}[match[2]]
    with tqdm(total=size, unit="B", unit_scale=True) as progress:
        for text in filter(None, rows[field]):
            texts.append(text)
            progress.update(len(text.encode()))
            if progress.n >= size:
                break
    return texts


def check_field(where, field, row):
    if not isinstance(row.get(field, 0), str | None):
        texts = [name for name, value in row.items() if isinstance(value, str)]
        raise UserError(f"{where}: no text in field {field!r}; --field may be: {', '.join(texts) or 'none'}")


@file_errors()
def prepare(folder, text, source, tokenizer="char", vocab_size=0, val_fraction=0.1):
    """Write train.bin, val.bin and meta.json to `folder`. The last `val_fraction` of the characters is for validation.

    `tokenizer` is "char", "bpe" (`vocab_size` tokens, 1024 unless given, learned from the training part), "gpt2",
    "hf:NAME" or "run:FOLDER". `source` says where the text comes from; whoever shows a loss should show it.
    Bad input is a UserError or a TokenizerError, and leaves the folder as it was.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} is not between 0 and 1")
    if vocab_size and tokenizer != "bpe":
        raise UserError(f"vocab_size={vocab_size} works only with tokenizer 'bpe', not with {tokenizer!r}")
    settings = {"tokenizer": tokenizer, "vocab_size": vocab_size, "val_fraction": val_fraction}
    coder = None if tokenizer in ("char", "bpe") else find_tokenizer(tokenizer)
    # if a tokenizer has no token that begins a document, a newline separates them
    pieces = partial(in_pieces, text, "" if coder and coder.document_start else "\n")
    length = sum(len(piece) for _, piece in pieces())
    cut = int(length * (1 - val_fraction))
    if coder is None:
        characters = chain.from_iterable(piece for _, piece in pieces())
        known = set(characters) if tokenizer == "char" else sample(pieces(), cut)
        if len(set(known)) < 2:
            raise UserError(f"{source}: fewer than two distinct characters, so nothing to learn; give a longer text")
        coder = CharTokenizer(known) if tokenizer == "char" else train_bpe(known, vocab_size or 1024)
    try:
        write_dataset(Path(folder), coder, encode_all(coder, in_chunks(pieces(), cut)), length, source, settings)
    except TokenizerError as error:  # of a tokenizer that was not made for this text
        raise UserError(f"{source}: {error}") from None


def find_tokenizer(name):
    if name == "gpt2":
        return gpt2_tokenizer()
    if name.startswith("hf:"):
        return hf_tokenizer(name.removeprefix("hf:"))
    if name.startswith("run:"):
        return tokenizer_from_state(load_checkpoint(source_checkpoint(name))["tokenizer"])
    raise UserError(f"unknown tokenizer {name!r}; choose from 'char', 'bpe', 'gpt2', 'hf:NAME', 'run:FOLDER'")


def write_dataset(folder, coder, encoded, length, source, settings):
    """Write what `encode_all` yields, `length` characters in all. The new files take their places together or not."""
    tokens, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    hashes, text_hash = {split: hashlib.sha256() for split in SPLITS}, hashlib.sha256()
    dtype, began, done = token_dtype(coder.vocab_size), time.time(), 0
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # at its end the files take their places, the last opened first
        if not stack.enter_context(folder_lock(folder)):
            raise UserError(f"{folder}: another prepare.py is at work there: wait for it")
        stack.callback(lambda: any(folder.iterdir()) or folder.rmdir())
        names = ("meta.json", "train.bin", "val.bin")
        files = {name: stack.enter_context(atomic_write(folder / name)) for name in names}
        for split, ids, text in encoded:
            ids, content = ids.astype(dtype), text.encode()
            files[f"{split}.bin"].write(ids)
            hashes[split].update(ids)
            text_hash.update(content)
            tokens[split] += len(ids)
            sizes[split] += len(content)
            before, done = done, done + len(text)
            if length > CHUNK and done * 10 // length > before * 10 // length:  # ten lines for a long text
                speed = sum(sizes.values()) / 1e6 / (time.time() - began)
                print0(f"{done / length:.0%} of {length:,} characters, {speed:.1f} MB/s")
        for split in SPLITS:
            if tokens[split] < 2:
                problem = f"the text is too short: its {split} part has fewer than two tokens"
                raise UserError(f"{source}: {problem}; give a longer one, or another val_fraction")
        meta = {
            "version": VERSION,
            "vocab_size": coder.vocab_size,
            "dtype": dtype.name,
            "source": source,
            "settings": settings,  # with which a new input.txt is prepared
            "text_sha256": text_hash.hexdigest(),
            "tokens": tokens,
            "bytes": sizes,  # of text
            "sha256": {split: hashes[split].hexdigest() for split in SPLITS},  # of the .bin files
            "tokenizer": coder.state(),
        }
        files["meta.json"].write(json.dumps(meta, indent=1).encode())
        for file in files.values():  # which takes long for large ones, and shows a full disk
            file.flush()
            os.fsync(file.fileno())
        # from here on the folder is incomplete, until it has a meta.json again
        (folder / "meta.json").unlink(missing_ok=True)

    size = sum(sizes.values())
    print0(f"{folder}: {source}, {size:,} bytes")
    print0(f"{tokens['train']:,} tokens to train on and {tokens['val']:,} to validate on, {dtype}")
    kind, density = meta["tokenizer"]["kind"], sum(tokens.values()) / size
    print0(f"{coder.vocab_size:,} different tokens ({kind}), {density:.3f} tokens per byte")


def encode_all(coder, chunks):
    """Yield (split, tokens, text) of each chunk, in order. Threads encode: tokenizers release the GIL."""

    def encode(split_and_pieces):
        split, pieces = split_and_pieces
        arrays = []
        for begins, piece in pieces:
            arrays += [np.array(coder.document_start * begins, np.uint32), coder.encode_array(piece)]
        return split, np.concatenate(arrays), "".join(piece for _, piece in pieces)

    threads = os.cpu_count()
    with ThreadPoolExecutor(threads) as pool:
        while some := list(islice(chunks, 4 * threads)):  # so much is in memory at a time
            yield from pool.map(encode, some)


# Where a long document is cut: after a single newline between two characters that are not spaces. Our pattern and
# GPT-2's also split there, so the parts have the tokens of the whole. (After several spaces they may not: GPT-2's
# pattern splits off the last one before a word, but not at the end of a text.)
CUT = re.compile(r"[^\s\x00-\x1f\x7f]\n(?=[^\s\x00-\x1f\x7f])")


def in_pieces(text, separator):
    """Yield (whether a document begins, some of its text), with `separator` between documents. A str begins none."""
    several = not isinstance(text, str)
    documents = (document for document in text if document is not None) if several else [text]
    for i, document in enumerate(documents):
        document, start = separator + document if i else document, 0
        while place := CUT.search(document, start + CHUNK):
            yield several and start == 0, document[start : place.end()]
            start = place.end()
        yield several and start == 0, document[start:]


def in_chunks(pieces, cut):
    """Yield (split, its next pieces), those that begin within the same CHUNK characters of the text."""
    for (split, _), group in groupby(divide(pieces, cut), key=lambda piece: piece[:2]):
        yield split, [(begins, text) for _, _, begins, text in group]


def divide(pieces, cut):
    """Yield (split, chunk, begins, text): the first `cut` characters train. A piece that crosses the cut is split."""
    done = 0
    for begins, piece in pieces:
        chunk, left = done // CHUNK, cut - done
        if 0 < left < len(piece):
            yield "train", chunk, begins, piece[:left]
            yield "val", chunk, False, piece[left:]
        else:
            yield "train" if left > 0 else "val", chunk, begins, piece
        done += len(piece)


def sample(pieces, cut):
    """Return SAMPLE characters from all over the training part, or all of it if it has no more."""
    share = min(1, SAMPLE / max(cut, 1))
    texts = ("".join(piece for _, piece in chunk) for split, chunk in in_chunks(pieces, cut) if split == "train")
    return "".join(text[: math.ceil(len(text) * share)] for text in texts)
