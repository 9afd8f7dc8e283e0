"""Texts -> train.bin and val.bin (token ids, one after another) and meta.json (the tokenizer, and what they are)."""

import hashlib
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain, islice, repeat
from pathlib import Path

import numpy as np

from config import UserError, atomic_write, file_lock, print0
from data.tokenizer import CharTokenizer, gpt2_tokenizer, tokenizer_from_state, train_bpe

VERSION = 3  # of the layout of a data folder
DATA = Path(__file__).resolve().parent  # has a folder for each dataset
SAMPLE = 16 * 2**20  # characters to learn byte pairs from, at most


def dataset_folder(name, script=None) -> Path:
    """Return data/NAME or, if the name has a slash, the folder of that path.

    If `script` is given, the folder must have no other prepare.py.
    """
    folder = Path(name).resolve() if "/" in name else DATA / name
    existing = folder / "prepare.py"
    if script and existing.exists() and not existing.samefile(script):
        raise UserError(f"name = {name!r} is taken: {existing} makes that dataset; choose another name")
    return folder


def ensure_prepared(name) -> Path:
    """Return the folder of a dataset. Run its prepare.py first if it is in data/ and not prepared yet."""
    folder = dataset_folder(name)
    meta = folder / "meta.json"
    if not meta.exists():
        if folder.parent != DATA or folder.name == "text" or not (folder / "prepare.py").exists():
            scripts = [path for path in DATA.glob("*/prepare.py") if path.parent.name != "text"]  # which needs texts
            names = sorted({path.parent.name for path in [*scripts, *DATA.glob("*/meta.json")]})
            raise UserError(f"dataset = {name!r} is missing: choose {', '.join(names)}, or run data/text/prepare.py")
        print0(f"{name}: not prepared yet, running data/{folder.name}/prepare.py")
        with open(folder / "prepare.py", "a") as script:  # locked: of runs that begin at once, only one prepares it
            file_lock(script, wait=True)
            if not meta.exists() and subprocess.run([sys.executable, script.name], stdout=2).returncode:
                raise SystemExit(2)  # prepare.py has printed the reason, to stderr: stdout is train.py's
    return folder


def split_end(documents, val_fraction):
    """Return the documents to train on and those to validate on: the last val_fraction of all characters."""
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction = {val_fraction} is not between 0 and 1")
    cut = int(sum(map(len, documents)) * (1 - val_fraction))
    for i, document in enumerate(documents):
        if cut < len(document):
            return [*documents[:i], document[:cut]], [document[cut:], *documents[i + 1 :]]
        cut -= len(document)
    return documents, []


def prepare(folder, train, val, source, tokenizer="char", vocab_size=1024):
    """Write train.bin, val.bin and meta.json to `folder`, from documents that can be iterated over more than once.

    `tokenizer` is "char", "bpe" (with `vocab_size` tokens), "gpt2" or "run:FOLDER". Errors leave `folder` as it was.
    """
    coder = make_tokenizer(tokenizer, train, val, vocab_size)
    dtype = "uint16" if coder.vocab_size < 65_536 else "uint32"
    meta = {"version": VERSION, "vocab_size": coder.vocab_size, "dtype": dtype, "source": source}
    meta |= {"tokens": {}, "bytes": {}, "documents": {}, "sha256": {}}
    text_hash = hashlib.sha256()

    def encode(piece):
        separator, text = piece
        mark = coder.document_start if separator else []  # a token that stands for the separator, and for its byte
        ids = coder.encode_array(text if mark else separator + text)
        return np.concatenate((mark, ids), dtype=dtype, casting="unsafe"), (separator + text).encode()

    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack, ThreadPoolExecutor() as pool:  # tokenizers release the GIL
        lock = os.open(folder if os.name == "posix" else os.devnull, os.O_RDONLY)  # Windows has no locks
        stack.callback(os.close, lock)
        if not file_lock(lock):
            print0(f"{folder}: another program is preparing this dataset; this one begins when it has ended")
            file_lock(lock, wait=True)
        stack.callback(lambda: any(folder.iterdir()) or folder.rmdir())  # a new folder, if nothing came into it
        interrupts = []  # a KeyboardInterrupt between two lines of the pool would leave a lock that threads wait for
        stack.callback(signal.signal, signal.SIGINT, signal.signal(signal.SIGINT, lambda *_: interrupts.append(True)))
        names = ("meta.json", "train.bin", "val.bin")  # the first one takes its place last, and completes the folder
        meta_file, *files = (stack.enter_context(atomic_write(folder / name)) for name in names)
        for split, documents, file in zip(("train", "val"), (train, val), files):
            tokens, size, count, file_hash, pieces = 0, 0, 0, hashlib.sha256(), separated(documents)
            while some := list(islice(pieces, 256)):  # documents in memory at a time
                for ids, content in pool.map(encode, some):
                    file.write(ids)
                    file_hash.update(ids)
                    text_hash.update(content)
                    tokens, size, count = tokens + len(ids), size + len(content), count + 1
                if interrupts:
                    raise KeyboardInterrupt
                if sys.stderr.isatty():
                    print(f"{split}: {tokens:,} tokens", end=" \r", file=sys.stderr, flush=True)
            if tokens < 2:
                raise UserError(f"{source}: the text is too short: its {split} part has fewer than two tokens")
            meta["tokens"][split], meta["bytes"][split], meta["documents"][split] = tokens, size, count
            meta["sha256"][split] = file_hash.hexdigest()
        meta |= {"text_sha256": text_hash.hexdigest(), "tokenizer": coder.state()}
        meta_file.write(json.dumps(meta, indent=1).encode())
        for file in (meta_file, *files):  # a full disk shows here, before an old file is touched
            file.flush()
            os.fsync(file.fileno())
        (folder / "meta.json").unlink(missing_ok=True)  # old and new files together are no dataset
    print0(f"{folder}: {source}, {sum(meta['tokens'].values()):,} {tokenizer} tokens, {coder.vocab_size:,} different")


def make_tokenizer(name, train, val, vocab_size):
    if name == "char":
        return CharTokenizer(chain.from_iterable(map("".join, chain(separated(train), separated(val)))))
    if name == "bpe":  # from blocks of a thousand characters from all over the text
        blocks = (text[i : i + 1000] for text in map("".join, separated(train)) for i in range(0, len(text), 1000))
        sample = "".join(islice(blocks, 0, None, 1 + sum(map(len, filter(None, train))) // SAMPLE))
        print0(f"learning {vocab_size:,} tokens from {len(sample):,} characters")
        return train_bpe(sample, vocab_size)
    if name == "gpt2":
        return gpt2_tokenizer()
    if name.startswith("run:"):
        from config.runtime import load_checkpoint  # with PyTorch, which takes seconds

        return tokenizer_from_state(load_checkpoint(name.removeprefix("run:"), best=True)["tokenizer"])
    raise UserError(f"tokenizer = {name!r} is invalid: choose from char, bpe, gpt2, run:FOLDER")


def separated(documents):
    """Yield (separator, text) for each document that is not empty. The separator is a newline; the first has none."""
    return zip(chain([""], repeat("\n")), filter(None, documents))


def sha256(content) -> str:
    return hashlib.sha256(content).hexdigest()
