"""A text -> train.bin and val.bin (token ids, one after another) and meta.json (what they are, and the tokenizer).

The text may be of any size. It comes in pieces (corpus.py) and is encoded in chunks of some megabytes (encode.py).
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
from contextlib import ExitStack, closing
from functools import partial
from itertools import groupby
from pathlib import Path

from config.runtime.common import UserError, atomic_write, file_errors, file_lock, find_checkpoint
from config.runtime.common import folder_lock, load_checkpoint, print0, read_text, sha256
from data.dataset import SPLITS, TOKENIZER_FILES, VERSION
from data.encode import encode_all, token_dtype
from data.tokenizer import CharTokenizer, TokenizerError, gpt2_tokenizer, hf_tokenizer, tokenizer_from_state
from data.tokenizer import train_bpe

DATA = Path(__file__).resolve().parent  # has a folder for each dataset
CHUNK = 4 * 2**20  # characters that a process encodes at a time
SAMPLE = 16 * 2**20  # characters to learn byte pairs from, at most


# -- at first use --------------------------------------------------------------------------------------------


@file_errors()
def ensure_prepared(name) -> Path:
    """Return the folder of a dataset. Run its prepare.py first, unless that was done since its input.txt changed.

    Raises UserError for an unknown name, and SystemExit(2) if prepare.py fails, which has then said why.
    """
    names = sorted({path.parent.name for path in [*DATA.glob("*/prepare.py"), *DATA.glob("*/meta.json")]})
    if name not in names:
        if name and Path(name).exists() and Path(name).resolve().parent != DATA:
            short = re.sub(r"\W+", "_", Path(name).resolve().stem)
            command = f"python data/text/prepare.py {shlex.quote(name)} --name={short}"
            raise UserError(f"dataset = {name!r} is a text: {command} prepares it for --dataset={short}")
        raise UserError(f"dataset = {name!r} does not work: it must be one of {', '.join(names)}")
    folder = DATA / name
    script, meta = folder / "prepare.py", folder / "meta.json"
    if not script.exists():  # prepared by data/text/prepare.py
        return folder
    with open(script, "rb") as file:
        file_lock(file, wait=True)  # of runs that start together one prepares, and the others wait for it
        if not meta.exists() or text_is_new(folder):
            why = "its input.txt is new" if meta.exists() else "it has not been prepared"
            print0(f"data/{name}: {why}, running data/{name}/prepare.py")
            if subprocess.run([sys.executable, script]).returncode:
                raise SystemExit(2)
    return folder


def text_is_new(folder) -> bool:
    """Return whether input.txt is newer than meta.json, and another text: a copied folder has new times."""
    text, meta = folder / "input.txt", folder / "meta.json"
    if not text.exists() or max(text.stat().st_mtime, text.stat().st_ctime) <= meta.stat().st_mtime:
        return False
    return sha256(read_text(text).encode()).encode() not in meta.read_bytes()


# -- preparing -----------------------------------------------------------------------------------------------


@file_errors()
def prepare(folder, text, source, tokenizer="char", vocab_size=0, val_fraction=0.1, workers=0):
    """Write train.bin, val.bin and meta.json to `folder`. The last `val_fraction` of the characters is for validation.

    `text` is a str or, for any size, a function that yields pieces (see corpus.py). It is called two or three times.
    `tokenizer` is "char", "bpe" (`vocab_size` tokens, 1024 unless given, learned from the training part), "gpt2",
    "hf:NAME" or "run:FOLDER". `source` says where the text comes from; whoever shows a loss should show it.
    Bad input is a UserError or a TokenizerError. What was in the folder stays whole until, at the end, the new files
    take their places.
    """
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} is not between 0 and 1")
    if vocab_size and tokenizer != "bpe":
        raise UserError(f"vocab_size={vocab_size} goes with tokenizer 'bpe', not with {tokenizer!r}")
    pieces = text if callable(text) else lambda: [(False, text)]
    coder = None if tokenizer in ("char", "bpe") else find_tokenizer(tokenizer)
    if coder is None or not coder.document_start:
        pieces = partial(join_by_lines, pieces)
    length, size, text_sha256, characters = survey(pieces(), tokenizer == "char")
    cut = int(length * (1 - val_fraction))
    if coder is None:
        known = characters if tokenizer == "char" else sample(pieces(), cut)
        if len(set(known)) < 2:
            raise UserError(f"{source}: fewer than two distinct characters, so nothing to learn; give a longer text")
        coder = CharTokenizer(known) if tokenizer == "char" else train_bpe(known, vocab_size or 1024)

    chunks, workers = in_chunks(pieces(), cut), min(workers or os.cpu_count(), math.ceil(length / CHUNK))
    try:
        with closing(encode_all(coder, chunks, workers)) as encoded:
            write_dataset(Path(folder), coder, encoded, source, size, text_sha256)
    except TokenizerError as error:  # of a tokenizer that was not made for this text
        raise UserError(f"{source}: {error}") from None


def write_dataset(folder, coder, encoded, source, size, text_sha256):
    """Write (split, tokens, bytes of text) as they come, `size` bytes in all, and what is to be known of them."""
    state, contents = coder.state(), {}
    if state["kind"] in TOKENIZER_FILES:
        part, name = TOKENIZER_FILES[state["kind"]]
        contents[name] = state.pop(part).encode()
        state["sha256"] = sha256(contents[name])
    counts, sizes = dict.fromkeys(SPLITS, 0), dict.fromkeys(SPLITS, 0)
    hashes = {split: hashlib.sha256() for split in SPLITS}
    began, done = time.time(), 0
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:  # at its end the files take their places, the last opened first
        if not stack.enter_context(folder_lock(folder)):
            raise UserError(f"{folder}: another prepare.py is at work there: wait for it")
        stack.callback(lambda: any(folder.iterdir()) or folder.rmdir())
        names = ("meta.json", *contents, "train.bin", "val.bin")
        files = {name: stack.enter_context(atomic_write(folder / name)) for name in names}
        for split, ids, count in encoded:
            files[f"{split}.bin"].write(ids)
            hashes[split].update(ids)
            counts[split] += len(ids)
            sizes[split] += count
            before, done = done, done + count
            if size > CHUNK and done * 10 // size > before * 10 // size:  # ten lines for a long text
                print0(f"{done / 1e6:,.0f} of {size / 1e6:,.0f} MB, {done / 1e6 / (time.time() - began):.1f} MB/s")
        for split in SPLITS:
            if counts[split] < 2:
                part = f"its {split} part has fewer than two tokens"
                raise UserError(f"{source}: the text is too short: {part}; give a longer one, or another val_fraction")
        meta = {
            "version": VERSION,
            "tokenizer": state,
            "vocab_size": coder.vocab_size,
            "dtype": token_dtype(coder).name,
            "source": source,
            "text_sha256": text_sha256,
            "tokens": counts,
            "bytes": sizes,  # of text
            "sha256": {split: hashes[split].hexdigest() for split in SPLITS},  # of the .bin files
        }
        contents["meta.json"] = json.dumps(meta, indent=1).encode()
        for name, content in contents.items():
            files[name].write(content)
        for file in files.values():  # a full disk shows here
            file.flush()
        # until here what was in the folder is whole; from here on nothing is, until there is a meta.json again
        (folder / "meta.json").unlink(missing_ok=True)
    for _, name in TOKENIZER_FILES.values():  # of an earlier tokenizer
        if name not in contents:
            (folder / name).unlink(missing_ok=True)

    print0(f"{folder}: {source}, {size:,} bytes")
    print0(f"{counts['train']:,} tokens to train on and {counts['val']:,} to validate on, {meta['dtype']}")
    density = sum(counts.values()) / size
    print0(f"{coder.vocab_size:,} different tokens ({state['kind']}), {density:.3f} tokens per byte")


# -- the text in pieces --------------------------------------------------------------------------------------


def join_by_lines(pieces):
    """Yield the pieces of a text with a line's end between its documents, for a tokenizer with no token for that."""
    for i, (begins, text) in enumerate(pieces()):
        yield False, "\n" + text if begins and i else text


def survey(pieces, all_characters):
    """Return a text's length in characters and in bytes, its SHA-256 and, if asked, all its different characters."""
    length, size, digest, seen = 0, 0, hashlib.sha256(), set()
    for _, text in pieces:
        content = text.encode()
        length += len(text)
        size += len(content)
        digest.update(content)
        if all_characters:
            seen.update(text)
    return length, size, digest.hexdigest(), "".join(seen)


def divide(pieces, cut):
    """Yield (split, begins, text): the first `cut` characters train. The piece that goes beyond them comes in two."""
    for begins, text in pieces:
        if 0 < cut < len(text):
            yield "train", begins, text[:cut]
            yield "val", False, text[cut:]
        else:
            yield "train" if cut > 0 else "val", begins, text
        cut -= len(text)


def in_chunks(pieces, cut):
    """Yield (split, its next pieces), of CHUNK characters together unless a single one is longer."""
    for split, group in groupby(divide(pieces, cut), key=lambda piece: piece[0]):
        chunk, length = [], 0
        for _, begins, text in group:
            if chunk and length + len(text) > CHUNK:
                yield split, chunk
                chunk, length = [], 0
            chunk.append((begins, text))
            length += len(text)
        yield split, chunk


def sample(pieces, cut):
    """Return SAMPLE characters from all over the training part, or all of it if it has no more."""
    share = min(1, SAMPLE / max(cut, 1))
    texts = ("".join(text for _, text in chunk) for split, chunk in in_chunks(pieces, cut) if split == "train")
    return "".join(text[: math.ceil(len(text) * share)] for text in texts)


# -- tokenizers by name --------------------------------------------------------------------------------------


def find_tokenizer(name):
    """Return the tokenizer of that name, one that need not be learned."""
    if name == "gpt2":
        return gpt2_tokenizer()
    if name.startswith("hf:"):
        return hf_tokenizer(name.removeprefix("hf:"))
    if name.startswith("run:"):
        folder = Path(name.removeprefix("run:"))
        return tokenizer_from_state(load_checkpoint(find_checkpoint(folder, prefer="best"))["tokenizer"])
    raise UserError(f"unknown tokenizer {name!r}; choose from 'char', 'bpe', 'gpt2', 'hf:NAME', 'run:FOLDER'")
