"""Reading what was prepared, batches and windows: data/dataset.py."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from config import UserError
from conftest import BOTTLES, prepare
from data.dataset import Dataset, derive_seed, load_dataset, shuffled


def dataset(train, val):
    splits = {"train": np.array(train, dtype=np.uint16), "val": np.array(val, dtype=np.uint16)}
    return Dataset({"vocab_size": 65_536}, None, splits)


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path, BOTTLES, "bottles", tokenizer="bpe", vocab_size=300)
    return tmp_path


@pytest.mark.parametrize("name, harm", [
    ("meta.json", lambda old: old.replace(b'"version": 3', b'"version": 1')),
    ("val.bin", lambda old: old[:4]),
    ("val.bin", lambda old: old[:3]),  # half a token
    ("train.bin", lambda old: b""),
    ("train.bin", lambda old: old[::-1]),
])  # fmt: skip
def test_damaged_data_is_refused(folder, name, harm):
    (folder / name).write_bytes(harm((folder / name).read_bytes()))
    with pytest.raises(UserError, match=str(folder if name == "meta.json" else folder / name)):
        load_dataset(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_tokens_beyond_the_vocabulary_are_refused_in_files_too_large_to_be_hashed(folder, monkeypatch, split):
    path = folder / f"{split}.bin"
    np.full(path.stat().st_size // 2, 300, np.uint16).tofile(path)
    monkeypatch.setattr("data.dataset.HASHED", 0)
    words = load_dataset(folder)
    with pytest.raises(UserError, match=f"{split}.bin: token 300 "):
        words.batch(0, 0, 0, 2, 8) if split == "train" else next(words.windows("val", 2, 8, 100))


def test_token_ids_take_four_bytes_where_two_are_too_small(tmp_path):
    prepare(tmp_path, "".join(map(chr, range(0x10000, 0x10000 + 66_000))), "everything")
    ids = load_dataset(tmp_path).splits["val"]
    assert ids.dtype == np.uint32 and ids[-1] == 65_999


def test_batch_is_a_pure_function_of_its_arguments():
    words = dataset(range(1000), range(100))
    before = torch.get_rng_state()
    x, y = words.batch(seed=1, step=2, micro_step=0, batch_size=12, block_size=16)
    words.batch(9, 9, 0, 4, 4)
    again = words.batch(1, 2, 0, 12, 16)
    assert torch.equal(x, again[0]) and torch.equal(y, again[1])
    assert torch.equal(torch.get_rng_state(), before)
    assert x.shape == (12, 16) and x.dtype == y.dtype == torch.int64
    assert torch.equal(y, x + 1) and torch.equal(x[:, 1:], y[:, :-1])
    for other in ((2, 2, 0), (1, 3, 0)):
        assert not torch.equal(x, words.batch(*other, 12, 16)[0])
    parts = [words.batch(1, 2, micro_step, 4, 16, micro_steps=3)[0] for micro_step in range(3)]
    assert torch.equal(x, torch.cat(parts))


def firsts(words, batches, batch_size, block_size):
    """Return the first tokens, which are their places, of the windows of the first batches."""
    return torch.cat([words.batch(0, step, 0, batch_size, block_size)[0][:, 0] for step in range(batches)]).tolist()


def test_an_epoch_visits_every_window_once():
    places = firsts(dataset(range(1012), range(100)), batches=30, batch_size=10, block_size=10)
    epochs = [places[i : i + 100] for i in range(0, 300, 100)]
    orders = [tuple(range(100)), *(tuple((place - min(epoch)) // 10 for place in epoch) for epoch in epochs)]
    for epoch in epochs:
        assert sorted(epoch) == list(range(min(epoch), 1000 + min(epoch), 10))
    assert len({min(epoch) for epoch in epochs}) == 3 and len(set(orders)) == 4
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
    x, y = windows(words, "val", batch, block, tokens - 1)
    assert y[y != -1].tolist() == list(range(1, tokens))
    assert x[y != -1].tolist() == list(range(tokens - 1))


@given(tokens=st.integers(30, 200), block=st.integers(1, 20), limit=st.integers(1, 28), batch=st.integers(1, 9))
def test_windows_spread_over_a_large_split(tokens, block, limit, batch):
    words = dataset(range(300), range(tokens))
    x, y = windows(words, "val", batch, block, limit)
    targets = y[y >= 0].tolist()
    assert limit - block < len(targets) <= limit and len(set(targets)) == len(targets)
    assert torch.equal(y[y >= 0], x[y >= 0] + 1)
    if limit >= 2 * block:
        assert targets[0] == 1 and targets[-1] == tokens - 1
        gaps = np.diff(targets[::block])
        assert gaps.max() - gaps.min() <= 1
    _, one_by_one = windows(words, "val", 1, block, limit)
    assert targets == one_by_one[one_by_one >= 0].tolist()


@pytest.mark.parametrize("tokens, block, limit, world", [(30, 4, 99, 2), (10, 8, 99, 4), (200, 8, 64, 3)])
def test_processes_share_the_windows(tokens, block, limit, world):
    words = dataset(range(100), range(tokens))
    _, whole = windows(words, "val", 2, block, limit)
    shares = [windows(words, "val", 2, block, limit, rank, world)[1] for rank in range(world)]
    assert len({share.shape for share in shares}) == 1
    assert torch.equal(torch.cat(shares)[torch.cat(shares) >= 0].sort().values, whole[whole >= 0].sort().values)
