"""Batches from a prepared folder: the windows that each step trains on, and those for evaluation."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from config import UserError, read_text
from data.prepare import VERSION, sha256
from data.tokenizer import Tokenizer, tokenizer_from_state

HASHED = 64 * 2**20  # bytes of the largest file that is hashed when it is loaded, in 0.05 s


def load_dataset(folder) -> "Dataset":
    """Return the data that `prepare` wrote to `folder`. A UserError says if they, or their text, have changed since."""
    folder = Path(folder)
    meta = json.loads((folder / "meta.json").read_bytes())
    if meta.get("version") != VERSION:
        raise UserError(f"{folder}: prepared by another version of this program; prepare the text again")
    text, script = folder / "input.txt", folder / "prepare.py"
    prepared_here = text.exists() and script.exists() and folder.name != "text"  # which is made from other files
    if prepared_here and sha256(read_text(text).encode()) != meta["text_sha256"]:
        raise UserError(f"{text}: changed since it was prepared; run {script} again, with the same options")
    splits = {}
    for split in ("train", "val"):
        path, size = folder / f"{split}.bin", meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize
        if path.stat().st_size != size or size <= HASHED and sha256(path.read_bytes()) != meta["sha256"][split]:
            raise UserError(f"{path}: changed since prepare.py wrote it; prepare the text again")
        splits[split] = np.memmap(path, meta["dtype"], mode="r")
    return Dataset(meta, tokenizer_from_state(meta.pop("tokenizer")), splits)  # runs log `meta`, so it must be short


@dataclass
class Dataset:
    """Token ids of two splits, "train" and "val", with what it takes to read them."""

    meta: dict
    tokenizer: Tokenizer
    splits: dict[str, np.ndarray]

    def read(self, split, places):
        """Return the tokens there. One beyond the vocabulary is an error: large files are not hashed."""
        ids = self.splits[split][places].astype(np.int64)
        if ids.max() >= self.meta["vocab_size"]:
            raise UserError(f"{split}.bin: token {ids.max()} is beyond the vocabulary; prepare the text again")
        return ids

    def batch(self, seed, step, micro_step, batch_size, block_size, micro_steps=1):
        """Return windows of the train split: x and, one token on, y, both (batch_size, block_size) int64.

        A pure function of its arguments, so that a resumed run draws the same batches. Each epoch cuts the split
        into adjacent windows, from a new random offset, and visits each window once, in a new random order.
        """
        tokens = len(self.splits["train"])
        per_epoch = max(tokens // block_size - 1, 1)  # one less than fits, to leave room for the offset
        rows = np.empty((batch_size, block_size + 1), np.int64)
        first = (step * micro_steps + micro_step) * batch_size  # in the sequence of all windows of all epochs
        done = 0
        while done < batch_size:
            epoch, place = divmod(first + done, per_epoch)
            start = derive_seed(seed, epoch) % (tokens - block_size * per_epoch)
            starts = start + block_size * shuffled(per_epoch, seed, epoch)[place : place + batch_size - done]
            places = starts[:, None] + np.arange(block_size + 1)
            rows[done : done + len(starts)] = self.read("train", places)
            done += len(starts)
        return torch.from_numpy(rows[:, :-1].copy()), torch.from_numpy(rows[:, 1:].copy())

    def windows(self, split, batch_size, block_size, max_tokens, rank=0, world_size=1):
        """Yield fixed windows to evaluate on, as (x, y): at most `max_tokens` targets, spread evenly over the split.

        A split with at most that many is covered from end to end, each target once. Targets of -1, which do not count,
        fill up short windows and the last batch. The others do not depend on batch_size. Each process gets its share,
        in equally many batches.
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
