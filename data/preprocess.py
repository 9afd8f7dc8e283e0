"""A text -> train.bin and val.bin (token ids, one after another) and meta.json (what they are, and the tokenizer)."""

import hashlib
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from data.console import UserError, file_errors, print0
from data.dataset import SPLITS, TOKENIZER_FILES, VERSION
from data.files import atomic_write, clear_leftovers, file_lock, read_text, sha256
from data.tokenizer import make_tokenizer

DATA = Path(__file__).resolve().parent  # has a folder for each dataset


def ensure_prepared(name) -> Path:
    """The folder of a dataset. Runs its prepare.py unless that has been done since its input.txt changed.

    Raises UserError for an unknown name, and SystemExit(2) if prepare.py fails, which has then said why.
    """
    names = sorted(script.parent.name for script in DATA.glob("*/prepare.py"))
    if name not in names:
        raise UserError(f"dataset = {name!r} does not work: it must be one of {', '.join(names)}")
    folder = DATA / name
    meta = folder / "meta.json"
    with open(folder / "prepare.py", "rb") as script:
        file_lock(script, wait=True)  # of runs that start together one prepares, and the others wait for it
        if not meta.exists() or text_is_new(folder):
            why = "its input.txt is new" if meta.exists() else "it has not been prepared"
            print0(f"data/{name}: {why}, running data/{name}/prepare.py")
            if subprocess.run([sys.executable, folder / "prepare.py"]).returncode:
                raise SystemExit(2)
    return folder


def text_is_new(folder) -> bool:
    """Whether input.txt is newer than meta.json and not the text that it was made of: a copied folder has new times."""
    text, meta = folder / "input.txt", folder / "meta.json"
    if not text.exists() or text.stat().st_mtime <= meta.stat().st_mtime:
        return False
    try:
        prepared = json.loads(meta.read_bytes())["text_sha256"]
    except (KeyError, TypeError, ValueError):  # damaged
        return True
    return sha256(read_text(text).encode()) != prepared


@file_errors()
def prepare(folder, text, source, tokenizer="char", vocab_size=None, val_fraction=0.1):
    """Writes train.bin, val.bin and meta.json to `folder`: the last `val_fraction` of `text` is for validation.

    `tokenizer` is "char", "bpe" (of `vocab_size` tokens, 1024 unless given, trained on the training part), "gpt2",
    "hf:NAME" or "run:FOLDER" (see `make_tokenizer`). `source` says where the text comes from; whoever shows a loss
    should show it. Bad input is a UserError, raised before anything is written. `corpus.py` does the same to texts
    that do not fit into memory.
    """
    check_fraction(val_fraction)
    check_worth(text, source)
    text_sha256 = sha256(text.encode())
    cut = int(len(text) * (1 - val_fraction))
    parts = dict(zip(SPLITS, (text[:cut], text[cut:])))
    sizes = {split: len(part.encode()) for split, part in parts.items()}
    coder = make_tokenizer(tokenizer, vocab_size, alphabet=lambda: text, sample=lambda: parts["train"])
    ids = {split: coder.encode_array(part) for split, part in parts.items()}
    check_lengths({split: len(ids[split]) for split in SPLITS}, source, val_fraction)
    write_dataset(folder, coder, {split: [ids[split]] for split in SPLITS}, sizes, source, text_sha256)


def check_fraction(val_fraction):
    if not 0 < val_fraction < 1:
        raise UserError(f"val_fraction={val_fraction} is not between 0 and 1")


def check_worth(text, source):
    if len(set(text)) < 2:
        raise UserError(f"{source}: fewer than two distinct characters, so nothing to learn; give a longer text")


def check_lengths(tokens, source, val_fraction):
    for split in SPLITS:
        if tokens[split] < 2:
            part = f"its {split} part has fewer than two tokens at val_fraction={val_fraction}"
            raise UserError(f"{source}: the text is too short: {part}; give a longer one")


def token_dtype(tokenizer):
    return np.dtype("uint16" if tokenizer.vocab_size < 65_536 else "uint32")


def write_dataset(folder, tokenizer, tokens, sizes, source, text_sha256):
    """Writes a data folder: for each split arrays of `tokens`, one after another, that come of `sizes` bytes of text.

    The files take their places all together, at the end: what was in the folder stays whole until then.
    """
    folder = Path(folder)
    dtype = token_dtype(tokenizer)
    state = tokenizer.state()
    contents = {}
    if state["kind"] in TOKENIZER_FILES:
        part, name = TOKENIZER_FILES[state["kind"]]
        contents[name] = state.pop(part).encode()
        state["sha256"] = sha256(contents[name])

    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    with ExitStack() as stack:  # at its end the files take their places, the last opened first
        files = {"meta.json": stack.enter_context(atomic_write(folder / "meta.json"))}
        for name, content in contents.items():
            files[name] = stack.enter_context(atomic_write(folder / name))
            files[name].write(content)
        counts, hashes = {}, {}
        for split in SPLITS:
            files[f"{split}.bin"] = file = stack.enter_context(atomic_write(folder / f"{split}.bin"))
            counts[split], hashes[split] = write_tokens(file, tokens[split], dtype)
        meta = {
            "version": VERSION,
            "tokenizer": state,
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "source": source,
            "text_sha256": text_sha256,
            "tokens": counts,
            "bytes": sizes,
            "sha256": hashes,  # of the .bin files
        }
        files["meta.json"].write(json.dumps(meta, indent=1).encode())
        for file in files.values():
            file.flush()
        # until here what was in the folder is whole; from here on nothing is, until there is a meta.json again
        (folder / "meta.json").unlink(missing_ok=True)
    for _, name in TOKENIZER_FILES.values():  # of an earlier tokenizer
        if name not in files:
            (folder / name).unlink(missing_ok=True)

    size, count = sum(sizes.values()), sum(counts.values())
    print0(f"{folder}: {source}, {size:,} bytes")
    print0(f"{counts['train']:,} tokens to train on and {counts['val']:,} to validate on, {dtype}")
    print0(f"{tokenizer.vocab_size:,} different tokens ({state['kind']}), {count / size:.3f} tokens per byte")


def write_tokens(file, arrays, dtype):
    """Writes arrays of tokens, one after another; how many they are, and the SHA-256 of what is written."""
    count, digest = 0, hashlib.sha256()
    for ids in arrays:
        content = ids.astype(dtype).tobytes()
        file.write(content)
        digest.update(content)
        count += len(ids)
    return count, digest.hexdigest()
