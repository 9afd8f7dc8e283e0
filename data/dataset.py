"""Batches from a prepared folder: the windows that each step trains on, and those for evaluation."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from config.runtime.program import UserError, command, file_errors, read_text, sha256
from data.prepare import SPLITS, VERSION
from data.tokenizer import Tokenizer, tokenizer_from_state

HASHED = 64 * 2**20  # bytes of the largest file that is hashed when it is loaded, in 0.05 s


@file_errors()
def load_dataset(folder) -> "Dataset":
    """Return the data that `prepare` wrote to `folder`. Raise a UserError if they are incomplete, damaged or old."""
    folder = Path(folder)
    meta = read_meta(folder)
    check_input(folder, meta)
    tokenizer = tokenizer_from_state(meta["tokenizer"])
    meta["tokenizer"] = {"kind": meta["tokenizer"]["kind"]}  # all of it may be megabytes, and runs log `meta`
    splits = {}
    for split in SPLITS:
        path = folder / f"{split}.bin"
        size = meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize
        if path.stat().st_size != size:
            raise damaged(path, "its size differs from meta.json")
        ids = np.memmap(path, meta["dtype"], mode="r")
        if ids.nbytes <= HASHED and sha256(ids) != meta["sha256"][split]:
            raise damaged(path, "changed since prepare.py wrote it (SHA-256)")
        splits[split] = ids
    return Dataset(meta, tokenizer, splits, folder)


def read_meta(folder) -> dict:
    """Return what prepare.py has noted in meta.json, if this version of the program can read it."""
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
        version = meta["version"]
    except (KeyError, ValueError):
        raise damaged(path, "not written by prepare.py") from None
    if version != VERSION:
        raise damaged(path, f"version {version}; this program reads version {VERSION}")
    return meta


def check_input(folder, meta):
    """Raise a UserError if the input.txt from which a prepare.py makes `folder` has changed since."""
    text, script = folder / "input.txt", folder / "prepare.py"
    if folder.name == "text" or not (text.exists() and script.exists()):  # data/text is made from other files
        return
    if sha256(read_text(text).encode()) != meta["text_sha256"]:
        raise UserError(f"{text} has changed since it was prepared: run {command(script)}, with the options of before")


def damaged(path, problem) -> UserError:
    return UserError(f"{path}: {problem}; prepare the text again")


@dataclass
class Dataset:
    """Token ids of two splits, "train" and "val", with what it takes to read them."""

    meta: dict
    tokenizer: Tokenizer
    splits: dict[str, np.ndarray]
    folder: Path

    def check_block_size(self, block_size):
        split = min(SPLITS, key=lambda name: len(self.splits[name]))
        tokens = len(self.splits[split])
        if block_size >= tokens:
            problem = f"block_size={block_size} is too long for the {split} split of {tokens} tokens"
            raise UserError(f"{problem}; the maximum is {tokens - 1}")

    def read(self, split, places):
        """Return the tokens there as int64. One beyond the vocabulary is a UserError: large files are not hashed."""
        ids = self.splits[split][places].astype(np.int64)
        if ids.max() >= self.meta["vocab_size"]:
            problem = f"token {ids.max()} is beyond the vocabulary of {self.meta['vocab_size']} tokens"
            raise damaged(self.folder / f"{split}.bin", problem)
        return ids

    def batch(self, seed, step, shard, batch_size, block_size, shards=1):
        """Return windows of the train split: x and, one token on, y, both (batch_size, block_size) int64.

        A pure function of its arguments, so that a resumed run draws the same batches. `shard` is one of the `shards`
        micro-steps of a step. Each epoch cuts the split into adjacent windows, from a new random offset, and visits
        each window once, in a new random order.
        """
        self.check_block_size(block_size)
        assert 0 <= shard < shards
        tokens = len(self.splits["train"])
        per_epoch = max(tokens // block_size - 1, 1)  # one less than fits, to leave room for the offset
        rows = np.empty((batch_size, block_size + 1), np.int64)
        first = (step * shards + shard) * batch_size  # in the sequence of all windows of all epochs
        done = 0
        while done < batch_size:
            epoch, place = divmod(first + done, per_epoch)
            start = derive_seed(seed, epoch) % (tokens - block_size * per_epoch)
            starts = start + block_size * shuffled(per_epoch, seed, epoch)[place : place + batch_size - done]
            places = starts[:, None] + np.arange(block_size + 1)
            rows[done : done + len(starts)] = self.read("train", places)
            done += len(starts)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def windows(self, split, batch_size, block_size, max_tokens, rank=0, world_size=1):
        """Yield fixed windows to evaluate on, as (x, y): at most `max_tokens` targets, spread evenly over the split.

        A split with no more targets is covered from end to end, each target once. Targets of -1 are left out, and fill
        the last batch. The targets do not depend on batch_size. Each process gets its share, in equally many batches.
        """
        targets = len(self.splits[split]) - 1
        if targets <= max_tokens:
            starts = np.arange(0, targets, block_size)
            ends = np.minimum(starts + block_size, targets)
        else:
            length = min(block_size, max_tokens)
            count = max_tokens // length
            starts = np.arange(count) * (targets - length) // max(count - 1, 1)
            ends = starts + length

        batch_size = min(batch_size, -(-len(starts) // world_size))
        missing = -len(starts) % (batch_size * world_size)
        starts = np.pad(starts, (0, missing))[rank::world_size]
        ends = np.pad(ends, (0, missing))[rank::world_size]
        for first in range(0, len(starts), batch_size):
            rows = slice(first, first + batch_size)
            places = starts[rows, None] + np.arange(block_size + 1)
            ids = self.read(split, np.minimum(places, targets))
            counted = places[:, :-1] < ends[rows, None]
            y = np.where(counted, ids[:, 1:], -1)
            yield torch.from_numpy(ids[:, :-1]), torch.from_numpy(y)


def derive_seed(*numbers) -> int:
    """Return a seed of 32 bits for several numbers, none negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def shuffled(windows, seed, epoch) -> np.ndarray:
    """Return the order of an epoch's windows: 8 bytes each, 70 MB for OpenWebText at a context of 1,024."""
    return np.random.RandomState(derive_seed(seed, epoch)).permutation(windows)  # whose stream never changes
