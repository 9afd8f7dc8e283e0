"""Batches from a prepared folder: the windows that each step trains on, and those for evaluation."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from config.runtime.errors import UserError, file_errors
from data.tokenizer import Tokenizer, TokenizerError, tokenizer_from_state

VERSION = 2  # of the layout of a data folder
SPLITS = ("train", "val")


@file_errors()
def load_dataset(folder) -> "Dataset":
    """Return the data that `prepare` wrote to `folder`. Raise a UserError if they are incomplete or damaged."""
    folder, splits = Path(folder), {}

    def damaged(name, problem):
        return UserError(f"{folder / name}: {problem}; prepare data/{folder.name} again")

    for name in ("meta.json", "train.bin", "val.bin"):
        if not (folder / name).is_file():
            raise damaged(name, "no such file")
    try:
        meta = json.loads((folder / "meta.json").read_bytes())
    except (ValueError, RecursionError):
        raise damaged("meta.json", "not JSON") from None
    match meta:  # the one place where its form is checked
        case {"version": int(version)} if version != VERSION:
            raise damaged("meta.json", f"version {version} is not {VERSION}, the one this program reads")
        case {
            "version": int(),
            "vocab_size": int(vocab_size),
            "dtype": str(dtype),
            "source": str(),
            "text_sha256": str(),
            "tokens": {"train": int(), "val": int()},
            "bytes": {"train": int(train_bytes), "val": int(val_bytes)},
            "sha256": {"train": str(), "val": str()},
            "tokenizer": dict(state),
        } if min(train_bytes, val_bytes) > 0:
            pass
        case _:
            raise damaged("meta.json", "not as prepare.py writes it")
    try:
        tokenizer = tokenizer_from_state(state)
    except TokenizerError as error:
        raise damaged("meta.json", error) from None
    if (vocab_size, dtype) != (tokenizer.vocab_size, token_dtype(tokenizer.vocab_size).name):
        raise damaged("meta.json", f"its tokenizer has {tokenizer.vocab_size} tokens, not {vocab_size} of type {dtype}")
    meta["tokenizer"] = {"kind": state["kind"]}  # all of it may be megabytes, and runs log `meta`
    for split in SPLITS:
        path = folder / f"{split}.bin"
        if not 0 < path.stat().st_size == meta["tokens"][split] * np.dtype(dtype).itemsize:
            raise damaged(path.name, "not of the size that meta.json says")
        splits[split] = np.memmap(path, dtype, mode="r")
    return Dataset(meta, tokenizer, splits, folder)


def token_dtype(vocab_size) -> np.dtype:
    return np.dtype("uint16" if vocab_size < 65_536 else "uint32")


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
            raise UserError(f"{problem}; the largest that works is {tokens - 1}")

    def batch(self, seed, step, shard, batch_size, block_size, shards=1):
        """Return windows of the train split: x and, one token on, y, both (batch_size, block_size) int64.

        A pure function of its arguments, so that a resumed run draws the same batches. `shard` is one of the `shards`
        micro-steps of a step. Each epoch cuts the split into adjacent windows, from a new random offset, and visits
        each window once, in a new random order.
        """
        self.check_block_size(block_size)
        assert 0 <= shard < shards
        data, seed = self.splits["train"], seed % 2**64
        per_epoch = max(len(data) // block_size - 1, 1)  # one less than fits, to leave room for the offset
        rows = np.empty((batch_size, block_size + 1), np.int64)
        done, first = 0, (step * shards + shard) * batch_size  # in the sequence of all windows of all epochs
        while done < batch_size:
            epoch, place = divmod(first + done, per_epoch)
            start = derive_seed(seed, epoch) % (len(data) - block_size * per_epoch)
            starts = start + block_size * shuffled(per_epoch, seed, epoch)[place : place + batch_size - done]
            rows[done : done + len(starts)] = data[starts[:, None] + np.arange(block_size + 1)]
            done += len(starts)
        rows = torch.from_numpy(rows)
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def windows(self, split, batch_size, block_size, max_tokens, rank=0, world_size=1):
        """Yield fixed windows to evaluate on, as (x, y): at most `max_tokens` targets, spread evenly over the split.

        A split with no more targets is covered from end to end, each target once. Positions to leave out have target -1
        (and token 0). They also fill the last batch, so that all batches have the same shape. The targets do not depend
        on batch_size: average the loss over them. Each process gets its share, by rank, in equally many batches.
        """
        self.check_block_size(block_size)
        data = self.splits[split]
        targets = len(data) - 1
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
        starts, ends = (np.pad(places, (0, missing))[rank::world_size] for places in (starts, ends))
        for first in range(0, len(starts), batch_size):
            rows = slice(first, first + batch_size)
            positions = starts[rows, None] + np.arange(block_size)
            wanted = positions < ends[rows, None]
            positions = np.where(wanted, positions, 0)
            x = np.where(wanted, data[positions], 0).astype(np.int64)
            y = np.where(wanted, data[positions + 1].astype(np.int64), -1)
            yield torch.from_numpy(x), torch.from_numpy(y)


def derive_seed(*numbers) -> int:
    """Return a seed of 32 bits for several numbers, none negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@lru_cache(maxsize=2)  # a batch may end one epoch and begin the next
def shuffled(windows, seed, epoch) -> np.ndarray:
    """Return the order of an epoch's windows: 8 bytes each, 70 MB for OpenWebText at a context of 1,024."""
    return np.random.RandomState(derive_seed(seed, epoch)).permutation(windows)  # whose stream never changes
