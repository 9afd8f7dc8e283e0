"""A prepared folder -> batches: which windows a step trains on, and which ones it is evaluated on."""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from config.runtime.common import UserError, sha256
from data.tokenizer import Tokenizer, tokenizer_from_state

VERSION = 1  # of the layout of a data folder
SPLITS = ("train", "val")
# by kind of tokenizer: the part of its state that is too large for meta.json, and the file that holds it
TOKENIZER_FILES = {"bpe": ("ranks", "tokenizer.tiktoken"), "hf": ("json", "tokenizer.json")}


def load_dataset(folder) -> "Dataset":
    """Return the data that `prepare` wrote to `folder`; UserError, naming file and cure, if they are not whole."""
    folder = Path(folder)
    path = folder / "meta.json"
    try:
        meta = json.loads(path.read_bytes())
        if meta["version"] != VERSION:
            raise UserError(f"version {meta['version']!r} is not {VERSION}, the one this program reads")
        dtype, state = np.dtype(meta["dtype"]), dict(meta["tokenizer"])
        if state.get("kind") in TOKENIZER_FILES:
            part, name = TOKENIZER_FILES[state["kind"]]
            path = folder / name
            content = path.read_bytes()
            if sha256(content) != state["sha256"]:
                raise UserError("not the file that meta.json was written with")
            state[part] = content.decode()
        tokenizer = tokenizer_from_state(state)
        splits = {}
        for split in SPLITS:
            path = folder / f"{split}.bin"
            if path.stat().st_size != meta["tokens"][split] * dtype.itemsize:
                raise UserError("not of the size that meta.json says")
            splits[split] = np.memmap(path, dtype, mode="r")
    except (OSError, ValueError) as error:
        what = getattr(error, "strerror", None) or error
        raise UserError(f"{path}: {what}; prepare data/{folder.name} again") from None
    return Dataset(meta, tokenizer, splits, folder)


@dataclass
class Dataset:
    """Token ids of two splits, "train" and "val", with what it takes to read them."""

    meta: dict
    tokenizer: Tokenizer
    splits: dict[str, np.ndarray]
    folder: Path

    def check_block_size(self, block_size):
        """Raise a UserError unless both splits have windows of `block_size` tokens, and the token after."""
        split = min(SPLITS, key=lambda name: len(self.splits[name]))
        tokens = len(self.splits[split])
        if block_size >= tokens:
            raise UserError(
                f"block_size={block_size} is too long for the {split} split of {tokens} tokens; "
                f"the largest that works is {tokens - 1}"
            )

    def check_ids(self, ids, split):
        """Raise a UserError for a token outside the vocabulary. Only a damaged file has one; a GPU would just crash."""
        if ids.max() >= self.meta["vocab_size"]:
            outside = f"token {ids.max()}, outside the vocabulary of {self.meta['vocab_size']}"
            raise UserError(f"{self.folder / split}.bin has {outside}: damaged; prepare it again")

    def batch(self, seed, step, shard, batch_size, block_size, shards=1):
        """Return windows of the train split: x and, one token on, y, both (batch_size, block_size) int64.

        A pure function: the same arguments give the same windows, whatever was drawn before. So a resumed run goes
        on as if it had never stopped. `shard` is one of the `shards` parts of a step (of processes and their
        micro-steps). An epoch cuts the split into windows side by side, from an offset of its own, and visits each
        once, in an order of its own.
        """
        self.check_block_size(block_size)
        assert 0 <= shard < shards
        data, seed = self.splits["train"], seed % 2**64
        per_epoch = max(len(data) - block_size, block_size) // block_size
        rows = np.empty((batch_size, block_size + 1), np.int64)
        done, first = 0, (step * shards + shard) * batch_size  # in the sequence of all windows of all epochs
        while done < batch_size:
            epoch, place = divmod(first + done, per_epoch)
            start = derive_seed(seed, epoch) % (len(data) - block_size * per_epoch)
            starts = start + block_size * shuffled(per_epoch, seed, epoch)[place : place + batch_size - done]
            rows[done : done + len(starts)] = data[starts[:, None] + np.arange(block_size + 1)]
            done += len(starts)
        rows = torch.from_numpy(rows)
        self.check_ids(rows, "train")
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def windows(self, split, batch_size, block_size, max_tokens, rank=0, world_size=1):
        """Yield fixed windows to evaluate on, as (x, y): at most `max_tokens` targets, spread evenly over the split.

        A split of no more targets than that is walked from end to end, each target counted once. Positions to leave
        out have target -1 (and token 0). They also fill the last batch, so that all batches have one shape. The
        targets are the same for every batch_size: add their losses up and divide by their number. Each process gets,
        by its rank, a share of them. All get as many batches, and the last batch of a process may have no target.
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
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            self.check_ids(x, split)
            self.check_ids(y, split)
            yield x, y


def derive_seed(*numbers) -> int:
    """Return one seed of 32 bits for several numbers, 0 or more. Other numbers give, except by chance, another seed."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


@lru_cache(maxsize=2)
def shuffled(windows, seed, epoch) -> np.ndarray:
    """Return the order of an epoch's windows: 8 bytes each, 70 MB for OpenWebText at a context of 1,024."""
    return np.random.RandomState(derive_seed(seed, epoch)).permutation(windows)  # whose stream never changes
