"""Reading what was prepared, batches and windows: data/dataset.py."""

import base64
import json
import shutil
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from config.runtime.errors import UserError
from data.dataset import Dataset, derive_seed, load_dataset, shuffled
from data.prepare import prepare

TEXT = "".join(f"{i} green bottles, hanging on the wall; if {i} fell: 'twas Ünglück 瓶子!\n" for i in range(60))


def dataset(train, val):
    splits = {"train": np.array(train, dtype=np.uint16), "val": np.array(val, dtype=np.uint16)}
    return Dataset({"vocab_size": 65_536}, None, splits, Path("unused"))


# -- reading -------------------------------------------------------------------------------------------------


def write(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def edit(**changes):
    """Change fields of meta.json, or take those away that become None."""

    def apply(folder):
        meta = json.loads((folder / "meta.json").read_bytes()) | changes
        meta = {name: value for name, value in meta.items() if value is not None}
        (folder / "meta.json").write_text(json.dumps(meta))

    return apply


BYTES = "".join(f"{base64.b64encode(bytes([i])).decode()} {i}\n" for i in range(256))


def byte_pairs(**changes):
    return edit(tokenizer={"kind": "bpe", "pattern": r"\s+|\S+", "special_tokens": {}, "ranks": BYTES, **changes})


FORM, BPE = "meta.json: not as prepare.py writes it", "meta.json: not byte pairs that tiktoken reads"
DAMAGE = [
    (lambda folder: (folder / "meta.json").unlink(), "meta.json: no such file"),
    (lambda folder: (folder / "train.bin").unlink(), "train.bin: no such file"),
    (write("meta.json", b""), "meta.json: not JSON"),
    (write("meta.json", b"\xff"), "meta.json: not JSON"),
    (write("meta.json", b"[" * 100_000), "meta.json: not JSON"),
    *((write("meta.json", content), FORM) for content in (b"{}", b"[]", b"null", b"5", b'{"version": 2}')),
    (edit(version=1), "meta.json: version 1 is not 2"),
    *((edit(**{name: None}), FORM) for name in (
        "version", "vocab_size", "dtype", "source", "text_sha256", "tokens", "bytes", "sha256", "tokenizer")),
    *((edit(**{name: ["odd"]}), FORM) for name in ("version", "vocab_size", "dtype", "tokens", "bytes", "tokenizer")),
    (edit(tokens={"train": 1.5, "val": 1}), FORM),
    (edit(bytes={"train": 100, "val": 0}), FORM),
    (edit(bytes={"train": "100", "val": 100}), FORM),
    (edit(dtype="uint32"), "meta.json: its tokenizer has 300 tokens, not 300 of type uint32"),
    (edit(vocab_size=299), "meta.json: its tokenizer has 300 tokens, not 299 of type uint16"),
    (edit(tokenizer={"kind": "word"}), "meta.json: not a tokenizer of kind 'char', 'bpe' or 'hf': {'kind': 'word'}"),
    (edit(tokenizer={"kind": "char", "characters": 5}), "meta.json: not a tokenizer of kind"),
    (edit(tokenizer={"kind": "hf", "json": "{}"}), "meta.json: not a tokenizer.json"),
    (byte_pairs(ranks=BYTES[: BYTES.index(" 100\n")] + " 100\n"), BPE),
    (byte_pairs(ranks=BYTES.replace(" 9\n", " 8\n")), BPE),
    (byte_pairs(pattern="("), BPE),
    (byte_pairs(special_tokens={"<end>": "odd"}), BPE),
    (byte_pairs(), "meta.json: its tokenizer has 256 tokens, not 300 of type uint16"),
    (write("train.bin", b""), "train.bin: not of the size that meta.json says"),
    (write("val.bin", b"\0\0\0"), "val.bin: not of the size that meta.json says"),
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    prepare(folder, TEXT, "bottles", tokenizer="bpe", vocab_size=300)
    return folder


@pytest.mark.parametrize("harm, named", DAMAGE, ids=count())
def test_damaged_data_is_refused_with_file_and_cure(whole, tmp_path, harm, named):
    folder = shutil.copytree(whole, tmp_path / "words")
    harm(folder)
    with pytest.raises(UserError) as error:
        load_dataset(folder)
    message = str(error.value)
    assert f"{folder}/{named}" in message and "\n" not in message
    assert message.endswith("; prepare data/words again")


# -- batches -------------------------------------------------------------------------------------------------


def test_batch_is_a_pure_function_of_its_arguments():
    words = dataset(range(1000), range(100))
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()
    x, y = words.batch(seed=1, step=2, shard=3, batch_size=8, block_size=16, shards=5)
    words.batch(9, 9, 0, 4, 4)
    again = words.batch(1, 2, 3, 8, 16, 5)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert torch.equal(torch.get_rng_state(), before[0]) and np.random.get_state()[1].tolist() == before[1]
    assert x.shape == y.shape == (8, 16) and x.dtype == y.dtype == torch.int64
    assert x.is_contiguous() and y.is_contiguous()
    assert torch.equal(y, x + 1) and torch.equal(x[:, 1:], y[:, :-1])
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4), (-1, 2, 3)):
        assert not torch.equal(x, words.batch(*other, 8, 16, 5)[0])


def test_the_shards_of_a_step_are_its_batch():
    words = dataset(range(1000), range(100))
    whole = words.batch(seed=1, step=2, shard=0, batch_size=12, block_size=16)
    for shards in (2, 3, 12):
        parts = [words.batch(1, 2, shard, 12 // shards, 16, shards) for shard in range(shards)]
        for x, of_parts in zip(whole, zip(*parts)):
            assert torch.equal(x, torch.cat(of_parts))


def firsts(words, batches, batch_size, block_size, seed=0):
    """Return the first tokens, which are their places, of the windows of the first batches."""
    return torch.cat([words.batch(seed, step, 0, batch_size, block_size)[0][:, 0] for step in range(batches)]).tolist()


def test_an_epoch_visits_every_window_once():
    places = firsts(dataset(range(1012), range(100)), batches=30, batch_size=10, block_size=10)
    epochs = [places[i : i + 100] for i in range(0, 300, 100)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(min(epoch), 1000 + min(epoch), 10))
    assert len({tuple(epoch) for epoch in epochs}) == len({min(epoch) for epoch in epochs}) == 3
    # a batch may end one epoch and begin the next
    assert firsts(dataset(range(1012), range(100)), batches=43, batch_size=7, block_size=10)[:300] == places


@pytest.mark.parametrize("tokens, block_size", [(6, 3), (6, 5), (40, 9), (41, 2)])
def test_batches_reach_both_ends(tokens, block_size):
    places = firsts(dataset(range(tokens), range(tokens)), 100, 50, block_size)
    assert set(places) == set(range(tokens - block_size))


def test_seeds_are_the_same_for_ever():
    """A run that is resumed must draw what it would have drawn."""
    assert derive_seed(1, 2, 3) == 3822189696
    assert shuffled(9, 1337, 0).tolist() == [8, 5, 6, 0, 2, 1, 4, 3, 7]


def windows(words, *arguments):
    batches = list(words.windows(*arguments))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@given(tokens=st.integers(2, 60), block=st.integers(1, 59), batch=st.integers(1, 9))
def test_windows_count_every_target_of_a_small_split_once(tokens, block, batch):
    words = dataset(range(100), range(tokens))
    if block >= tokens:
        with pytest.raises(UserError):
            next(words.windows("val", batch, block, tokens))
        return
    x, y = windows(words, "val", batch, block, tokens - 1)
    wanted = y >= 0
    assert y[wanted].tolist() == list(range(1, tokens))
    assert x[wanted].tolist() == list(range(tokens - 1))
    assert (x[~wanted] == 0).all() and (y[~wanted] == -1).all()


@given(tokens=st.integers(30, 200), block=st.integers(1, 20), limit=st.integers(1, 28), batch=st.integers(1, 9))
def test_windows_spread_over_a_large_split(tokens, block, limit, batch):
    words = dataset(range(300), range(tokens))
    x, y = windows(words, "val", batch, block, limit)
    targets = y[y >= 0].tolist()
    assert limit - block < len(targets) <= limit and len(set(targets)) == len(targets)
    assert torch.equal(y[y >= 0], x[y >= 0] + 1)
    if limit >= 2 * block:
        assert targets[0] == 1 and targets[-1] == tokens - 1
    _, one_by_one = windows(words, "val", 1, block, limit)
    assert targets == one_by_one[one_by_one >= 0].tolist()


@pytest.mark.parametrize("tokens, block, limit, world", [(30, 4, 99, 2), (10, 8, 99, 4), (200, 8, 64, 3)])
def test_processes_share_the_windows(tokens, block, limit, world):
    words = dataset(range(100), range(tokens))
    _, whole = windows(words, "val", 2, block, limit)
    shares = [list(words.windows("val", 2, block, limit, rank, world)) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    parts = torch.cat([y for share in shares for _, y in share])
    assert sorted(parts[parts >= 0].tolist()) == sorted(whole[whole >= 0].tolist())


def test_all_batches_of_windows_have_one_shape():
    shapes = {(x.shape, y.shape) for x, y in dataset(range(100), range(100)).windows("val", 4, 7, 99)}
    assert shapes == {((4, 7), (4, 7))}


def test_block_size_too_long_says_what_works():
    words = dataset(range(100), range(10))
    words.batch(0, 0, 0, 1, 9)
    message = "block_size=10 is too long for the val split of 10 tokens; the largest that works is 9"
    for call in (lambda: words.batch(0, 0, 0, 1, 10), lambda: next(words.windows("train", 1, 10, 50))):
        with pytest.raises(UserError, match=message):
            call()
