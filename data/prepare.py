"""A text -> train.bin and val.bin (token ids, one after another) and meta.json (the tokenizer, the source, the counts).

A text is a str or, for several documents, anything that yields a str for each, every time it is iterated over. Empty
documents, and rows of a table without one (None), are left out.
"""

import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np

from config.runtime.program import UserError, atomic_write, command, file_errors, file_lock, print0
from data.tokenizer import END, CharTokenizer, gpt2_tokenizer, tokenizer_from_state, train_bpe

VERSION = 2  # of the layout of a data folder
SPLITS = ("train", "val")
DATA = Path(__file__).resolve().parent  # has a folder for each dataset
SAMPLE = 16 * 2**20  # characters to learn byte pairs from, at most


def dataset_folder(name) -> Path:
    """Return the folder of a dataset: data/NAME or, if the name has a slash, the folder of that path."""
    return Path(name).resolve() if "/" in name else DATA / name


def new_folder(name, script) -> Path:
    """Return the folder of a dataset that `script` is to make. Raise a UserError if it cannot."""
    folder = dataset_folder(name)
    if "/" not in name and not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"name = {name!r} is invalid: use letters, digits, '_', '-' and '.'")
    own = folder / "prepare.py"
    if own.exists() and not own.samefile(script):
        raise UserError(f"name = {name!r} is invalid: {folder} has its own prepare.py; choose another name")
    return folder


@file_errors()
def ensure_prepared(name) -> Path:
    """Return the folder of a dataset. Run its prepare.py first if it is in data/ and not prepared yet."""
    folder = dataset_folder(name)
    script, meta = folder / "prepare.py", folder / "meta.json"
    if meta.exists():
        return folder
    if folder == DATA / "text":  # its prepare.py needs a file
        raise UserError(f"dataset = 'text' is not prepared yet: run {command('data/text/prepare.py', 'my.txt')}")
    if folder.parent != DATA or not script.exists():
        names = {path.parent.name for path in DATA.glob("*/prepare.py")} - {"text"}
        names |= {path.parent.name for path in DATA.glob("*/meta.json")}
        others = f"{', '.join(sorted(names))}, or your own text, prepared by data/text/prepare.py"
        others += "; if a run's data have moved, resume it with --dataset=FOLDER"
        raise UserError(f"dataset = {name!r} is invalid: it must be one of {others}")
    with open(script, "rb") as file:
        file_lock(file, wait=True)  # of runs that start together one prepares, and the others wait for it
        if not meta.exists():
            print0(f"data/{folder.name}: not prepared yet, running data/{folder.name}/prepare.py")
            if subprocess.run([sys.executable, script], stdout=2).returncode:  # to stderr: stdout is train.py's
                raise SystemExit(2)  # prepare.py has printed the reason
    return folder


@file_errors()
def prepare(folder, text, source, tokenizer="char", vocab_size=0, val_fraction=0.1, train_documents=None):
    """Write train.bin, val.bin and meta.json to `folder`. The last `val_fraction` of the characters is for validation.

    With `train_documents`, that many documents are for training instead, and all others for validation.
    `tokenizer` is "char", "bpe" (`vocab_size` tokens, 1024 unless given, learned from the training part), "gpt2" or
    "run:FOLDER". `source` says where the text comes from; show it with any loss.
    Bad input is a UserError, and leaves the folder as it was.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} is not between 0 and 1")
    if vocab_size and tokenizer != "bpe":
        raise UserError(f"vocab_size={vocab_size} works only with tokenizer 'bpe', not with {tokenizer!r}")
    settings = {"tokenizer": tokenizer, "vocab_size": vocab_size, "val_fraction": val_fraction}
    coder = None if tokenizer in ("char", "bpe") else find_tokenizer(tokenizer)
    # if a tokenizer has no token that begins a document, a newline separates them
    parts = partial(in_parts, text, "" if coder and coder.document_start else "\n")
    length = sum(len(part) for _, _, part in parts(0))
    cut = int(length * (1 - val_fraction))
    if train_documents is not None:
        cut = sum(len(part) for _, _, part in islice(parts(0), train_documents))
    if tokenizer == "char":
        coder = CharTokenizer(chain.from_iterable(part for _, _, part in parts(cut)))
    if tokenizer == "bpe":
        coder = train_bpe(sample(parts(cut), cut), vocab_size or 1024)
    with closing(encode_all(coder, parts(cut))) as encoded:  # its threads end here, also after an error
        write_dataset(Path(folder), coder, encoded, length, source, settings)


def find_tokenizer(name):
    if name == "gpt2":
        return gpt2_tokenizer()
    if name.startswith("run:"):
        from config.runtime import checkpoints  # with PyTorch, which takes seconds

        return tokenizer_from_state(checkpoints.load(checkpoints.find_source(name))["tokenizer"])
    raise UserError(f"unknown tokenizer {name!r}; choose from 'char', 'bpe', 'gpt2', 'run:FOLDER'")


def in_parts(text, separator, cut):
    """Yield (split, whether a document begins, text) of each document. A str is one without a beginning.

    The first `cut` characters are for training: a document across the cut gives two parts. `separator` is put between
    documents.
    """
    several = not isinstance(text, str)
    documents = (document for document in text if document) if several else [text]
    left = cut
    for i, document in enumerate(documents):
        part = separator + document if i else document
        if 0 < left < len(part):
            yield "train", several, part[:left]
            yield "val", False, part[left:]
        else:
            yield "train" if left > 0 else "val", several, part
        left -= len(part)


def sample(parts, cut):
    """Return about SAMPLE characters, in blocks of a thousand from all over the training part, or all that it has."""
    texts = (text for split, _, text in parts if split == "train")
    blocks = (text[start : start + 1000] for text in texts for start in range(0, len(text), 1000))
    return "".join(islice(blocks, 0, None, 1 + cut // SAMPLE))


def encode_all(coder, parts):
    """Yield (split, tokens, text) of each part, in order. Threads encode: tokenizers release the GIL."""
    dtype = token_dtype(coder.vocab_size)

    def encode(part):
        split, begins, text = part
        start = coder.document_start if begins else []
        return split, np.concatenate((start, coder.encode_array(text)), dtype=dtype, casting="unsafe"), text

    with ThreadPoolExecutor() as pool:
        while some := list(islice(parts, 256)):  # so many are in memory at a time
            with ctrl_c_held():  # between two lines of the pool's own code, it would leave a lock that threads wait for
                encoded = pool.map(encode, some)
            yield from encoded


@contextmanager
def ctrl_c_held():
    """Let a Ctrl-C inside wait for the end, except on Windows."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def token_dtype(vocab_size) -> np.dtype:
    return np.dtype("uint16" if vocab_size < 65_536 else "uint32")


def write_dataset(folder, coder, encoded, length, source, settings):
    """Write the parts from `encode_all`, of `length` characters. meta.json comes last and completes the folder."""
    tokens, sizes, characters, marked, shown = Counter(), Counter(), 0, False, time.monotonic()
    hashes, text_hash = {split: hashlib.sha256() for split in SPLITS}, hashlib.sha256()
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # at its end the files take their places, the last opened first
        if hasattr(os, "O_DIRECTORY"):  # Windows can neither open a folder nor lock a file
            opened = os.open(folder, os.O_DIRECTORY)  # a lock of the folder itself leaves no file in it
            stack.callback(os.close, opened)
            if not file_lock(opened):
                raise UserError(f"{folder}: another program is preparing this dataset: wait until it has ended")
        stack.callback(lambda: any(folder.iterdir()) or folder.rmdir())  # a new folder, if nothing came into it
        names = ("meta.json", "train.bin", "val.bin")
        files = {name: stack.enter_context(atomic_write(folder / name)) for name in names}
        for split, ids, text in encoded:
            content = text.encode()
            files[f"{split}.bin"].write(ids)
            hashes[split].update(ids)
            text_hash.update(content)
            tokens[split] += len(ids)
            sizes[split] += len(content)
            characters += len(text)
            marked = marked or END in text
            if (now := time.monotonic()) > shown + 5:
                shown = now
                print0(f"{characters / length:.1%}   {tokens.total():,} tokens")
        for split in SPLITS:
            if tokens[split] < 2:
                problem = f"the text is too short: its {split} part has fewer than two tokens"
                raise UserError(f"{source}: {problem}; give a longer one, or another val_fraction")
        meta = {
            "version": VERSION,
            "vocab_size": coder.vocab_size,
            "dtype": token_dtype(coder.vocab_size).name,
            "source": source,
            "settings": settings,  # the options of prepare.py
            "text_sha256": text_hash.hexdigest(),
            "tokens": tokens,
            "bytes": sizes,  # of text
            "sha256": {split: hashes[split].hexdigest() for split in SPLITS},  # of the .bin files
            "tokenizer": coder.state(),
        }
        files["meta.json"].write(json.dumps(meta, indent=1).encode())
        (folder / "meta.json").unlink(missing_ok=True)

    print0(f"{folder}: {source}, {sizes.total():,} bytes")
    print0(f"{tokens['train']:,} training tokens, {tokens['val']:,} validation tokens, {coder.vocab_size:,} different")
    if marked:
        cure = f"--separator='{END}' of data/text/prepare.py splits plain files into documents there"
        print0(f"NOTE    {END} in the text is encoded as plain text; {cure}")
