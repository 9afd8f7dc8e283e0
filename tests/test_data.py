"""Tokenizers, prepared folders, batches: data/__init__.py and the prepare scripts."""

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import tracemalloc
import time
from pathlib import Path

import numpy as np
import pytest
import tiktoken.load
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import data
from data import BPETokenizer, CharTokenizer, Dataset, load, prepare, replace_file, tokenizer_from_state, train_bpe

ROOT = Path(__file__).resolve().parents[1]
TEXT = "".join(f"{i} green bottles, hanging on the wall; if {i} fell: 'twas Ünglück 瓶子!\n" for i in range(60))
BPE = train_bpe(TEXT, 400)
BYTES = BPETokenizer({bytes([i]): i for i in range(256)}, data.SPLIT, {"<|endoftext|>": 256})


@pytest.fixture(params=["char", "bpe"])
def folder(request, tmp_path, capsys):
    prepare(tmp_path / "words", TEXT, "bottles", request.param, 300 if request.param == "bpe" else None)
    return tmp_path / "words"


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def dataset(train, val):
    splits = {"train": np.array(train, dtype=np.uint16), "val": np.array(val, dtype=np.uint16)}
    return Dataset({"vocab_size": 65_536}, None, splits, Path("unused"), {})


# -- files ---------------------------------------------------------------------------------------------------


def test_replace_file_replaces_all_or_nothing(tmp_path):
    path = tmp_path / "file"
    for content in (b"old", b"new"):
        with replace_file(path) as file:
            file.write(content)
        assert path.read_bytes() == content
    with pytest.raises(KeyboardInterrupt), replace_file(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert contents(tmp_path) == {Path("file"): b"new"}


# -- tokenizers ----------------------------------------------------------------------------------------------


@given(st.text(min_size=1))
def test_char_round_trip(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids)
    assert tokenizer.decode(ids) == text and tokenizer.decode_bytes(ids) == text.encode()
    again = tokenizer_from_state(json.loads(json.dumps(tokenizer.state())))
    assert again.encode(text) == ids


@given(st.text())
def test_bpe_round_trip(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text and BPE.decode_bytes(ids) == text.encode()
    assert b"".join(BPE.decode_bytes([i]) for i in ids) == text.encode()
    again = tokenizer_from_state(json.loads(json.dumps(BPE.state())))
    assert again.encode(text) == ids == again.encode_array(text).tolist()


@given(st.text())
def test_python_and_tiktoken_split_alike(text):
    assert BPE.encode(text) == [i for piece in re.findall(data.SPLIT, text) for i in BPE.encode(piece)]


def test_split_matches_every_character():
    text = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert "".join(re.findall(data.SPLIT, text)) == text
    assert BYTES.decode(BYTES.encode(text)) == text


def naive_bpe(text, vocab_size):
    """Textbook BPE: count all pairs anew for every merge. Slow, short, and an oracle for `train_bpe`."""
    words = [list(piece.encode()) for piece in re.findall(data.SPLIT, text)]
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < vocab_size:
        pairs = [pair for word in words for pair in zip(word, word[1:])]
        if not pairs:
            break
        best = min(set(pairs), key=lambda pair: (-pairs.count(pair), pair))
        tokens.append(tokens[best[0]] + tokens[best[1]])
        words = [data.merge(word, best, len(tokens) - 1) for word in words]
    assert len(set(tokens)) == len(tokens)
    return tokens


@given(st.text(alphabet="aab b1.é", max_size=60))
def test_train_bpe_is_textbook_bpe(text):
    assert list(train_bpe(text, 280).ranks) == naive_bpe(text, 280)


def test_merge():
    assert data.merge([1, 1, 1, 2], (1, 1), 9) == [9, 1, 2]


def test_train_bpe_is_quick_and_stops_when_no_pairs_are_left():
    text = "".join(f"word{i * i % 7919} of {i % 97} more\n" for i in range(45_000))
    start = time.perf_counter()
    assert train_bpe(text, 1024).vocab_size == 1024
    assert time.perf_counter() - start < 10
    assert train_bpe("", 1024).vocab_size == 256
    assert train_bpe("abcd", 1024).vocab_size == 259


def test_special_tokens_in_text_are_plain_text():
    assert BYTES.encode("<|endoftext|>") == list(b"<|endoftext|>")
    assert BYTES.decode([256]) == "<|endoftext|>"


def test_broken_utf8_decodes_to_replacement_characters():
    assert BYTES.decode([*"é".encode(), 0xFF]) == "é\ufffd"


@pytest.mark.parametrize(
    "text, named", [("é", "'é'"), ("ab☃é☃", "'☃', 'é'"), ("\n", r"'\n'"), ("\ud800", r"'\ud800'")]
)
def test_unknown_characters_are_named(text, named):
    with pytest.raises(ValueError, match=re.escape(named)):
        CharTokenizer("ab").encode(text)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"kind": "word"}, "unknown kind"),
        ({"kind": ["bpe"]}, "unknown kind"),
        ({"pattern": 5}, "pattern"),
        ({"pattern": "("}, "pattern"),
        ({"pattern": r"\p{Nonsense}"}, "pattern"),
        ({"special_tokens": {"\ud800": 400}}, "special tokens"),
        ({"special_tokens": ["x"]}, "special tokens"),
        ({"special_tokens": {"x": 7}}, "repeats"),
        ({"special_tokens": {"x": 9999}}, "gaps"),
        ({"ranks": None}, "missing"),
        ({"ranks": "YQ== 0\n"}, "byte values"),
        ({"ranks": "YQ== 0\nYQ== 1\n"}, "repeat"),
        ({"ranks": "YQ==\n"}, "damaged"),
        ({"ranks": "*** 0\n"}, "damaged"),
        ({"ranks": "YQ== x\n"}, "damaged"),
        ({"kind": "char"}, "characters"),
        ({"kind": "char", "characters": ""}, "characters"),
        ({"kind": "char", "characters": "ba"}, "order"),
        ({"kind": "char", "characters": "aa"}, "distinct"),
        ({"kind": "char", "characters": "a\ud800"}, "surrogate"),
    ],
)
def test_damaged_tokenizers_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        tokenizer_from_state(BPE.state() | changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("state", [None, 3, [], "char", {}])
def test_what_is_no_tokenizer_is_refused(state):
    with pytest.raises(ValueError, match="unknown kind"):
        tokenizer_from_state(state)


def test_gpt2(monkeypatch):
    small = tiktoken.Encoding(
        "gpt2", pat_str=r"\s+|\S+", mergeable_ranks=BYTES.ranks, special_tokens={"<|endoftext|>": 256}
    )
    monkeypatch.setattr(tiktoken, "get_encoding", {"gpt2": small}.get)
    tokenizer = data.gpt2_tokenizer()
    assert tokenizer.vocab_size == 257 and tokenizer.special_tokens == {"<|endoftext|>": 256}

    def offline(name):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(tiktoken, "get_encoding", offline)
    with pytest.raises(ValueError, match="--tokenizer=bpe") as error:
        data.gpt2_tokenizer()
    assert "\n" not in str(error.value)


# -- preparing -----------------------------------------------------------------------------------------------


def test_prepared_text_loads_back(folder, capsys):
    loaded = load(folder)
    cut = int(len(TEXT) * 0.9)
    for split, part in (("train", TEXT[:cut]), ("val", TEXT[cut:])):
        assert loaded.tokenizer.decode(loaded.splits[split].tolist()) == part
        assert loaded.meta["tokens"][split] == len(loaded.splits[split])
        assert loaded.meta["bytes"][split] == len(part.encode())
        assert not loaded.splits[split].flags.writeable
    assert loaded.meta["source"] == "bottles" and loaded.meta["warning"] == ""
    assert loaded.meta["text_sha256"] == data.sha256(TEXT.encode())
    assert tokenizer_from_state(loaded.tokenizer.state()).encode(TEXT) == loaded.tokenizer.encode(TEXT)


def test_tokenizer_file_is_tiktokens(tmp_path):
    prepare(tmp_path, TEXT, "bottles", tokenizer="bpe", vocab_size=300)
    ranks = tiktoken.load.load_tiktoken_bpe(str(tmp_path / "tokenizer.tiktoken"))
    assert ranks == load(tmp_path).tokenizer.ranks and len(ranks) == 300
    prepare(tmp_path, TEXT, "bottles", tokenizer="char")
    assert not (tmp_path / "tokenizer.tiktoken").exists()


def test_merges_are_learned_from_the_training_part_alone(tmp_path):
    prepare(tmp_path, "ab" * 900 + "xy" * 100, "letters", tokenizer="bpe", vocab_size=300)
    ranks = load(tmp_path).tokenizer.ranks
    assert b"ab" in ranks and b"xy" not in ranks


def test_large_vocabularies_take_four_bytes(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 66_000)))
    prepare(tmp_path, text, "everything")
    loaded = load(tmp_path)
    assert loaded.meta["dtype"] == "uint32" and loaded.splits["val"][-1] == 65_999


@pytest.mark.parametrize(
    "text, options, message",
    [
        ("", {}, "fewer than two distinct"),
        ("aaaaaaaaaaaaaaaaaaaaaa", {}, "fewer than two distinct"),
        ("ab", {}, "too short"),
        ("abcdefghij", {}, "too short"),
        (TEXT, {"val_fraction": 0}, "val_fraction=0"),
        (TEXT, {"val_fraction": 1}, "val_fraction=1"),
        (TEXT, {"val_fraction": float("nan")}, "val_fraction=nan"),
        (TEXT, {"val_fraction": 1e-9}, "too short"),
        (TEXT, {"tokenizer": "words"}, "'words'"),
        (TEXT, {"tokenizer": "bpe", "vocab_size": 255}, "vocab_size=255"),
        (TEXT, {"tokenizer": "bpe", "vocab_size": 300.0}, "vocab_size=300.0"),
        (TEXT + "\udc80", {}, f"character {len(TEXT)} "),
    ],
)
def test_bad_input_changes_nothing(folder, text, options, message):
    before = contents(folder)
    with pytest.raises(ValueError, match=message) as error:
        prepare(folder, text, "bad", **options)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["meta.json", "tokenizer.tiktoken", "train.bin", "val.bin"])
def test_on_a_full_disk_what_was_there_stays(folder, monkeypatch, name):
    def full_disk(path):
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        return replace_file(path)

    before, replace_file = contents(folder), data.replace_file
    monkeypatch.setattr(data, "replace_file", full_disk)
    with pytest.raises(OSError):
        prepare(folder, TEXT, "bottles", tokenizer="bpe", vocab_size=300)
    assert contents(folder) == before


def test_half_replaced_folder_is_not_taken_for_whole(folder, monkeypatch):
    def killed(old, new):
        if new.name == "train.bin":
            raise KeyboardInterrupt
        replace(old, new)

    replace = os.replace
    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(folder, TEXT, "bottles", tokenizer="bpe", vocab_size=300)
    with pytest.raises(ValueError, match="meta.json.*prepare.py again"):
        load(folder)


# -- Tiny Shakespeare ----------------------------------------------------------------------------------------


def test_shakespeare_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "download", lambda url: TEXT.encode())
    monkeypatch.setattr(data, "SHAKESPEARE_SHA256", data.sha256(TEXT.encode()))
    assert data.tiny_shakespeare(tmp_path) == (TEXT, "Tiny Shakespeare", "")
    monkeypatch.setattr(data, "download", None)
    assert data.tiny_shakespeare(tmp_path) == (TEXT, "Tiny Shakespeare", "")


@pytest.mark.parametrize("outcome", [TimeoutError("timed out"), b"<html>captive portal</html>"])
def test_shakespeare_offline_is_loudly_something_else(tmp_path, monkeypatch, capsys, outcome):
    def download(url):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(data, "download", download)
    text, source, warning = data.tiny_shakespeare(tmp_path)
    assert len(text) > 100_000 and "Tiny Shakespeare" not in source
    assert "not Tiny Shakespeare" in warning and "\n" not in warning
    assert "NOT SHAKESPEARE" in capsys.readouterr().out
    assert contents(tmp_path) == {}


def test_own_input_is_taken_as_it_is(tmp_path):
    (tmp_path / "input.txt").write_bytes("\ufeffeins\r\nzwö\r".encode())
    text, source, _ = data.tiny_shakespeare(tmp_path)
    assert text == "eins\r\nzwö\r" and source == f"your own {tmp_path.name}/input.txt"
    (tmp_path / "input.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ValueError, match="input.txt: not UTF-8 text at byte 3"):
        data.tiny_shakespeare(tmp_path)


# -- reading -------------------------------------------------------------------------------------------------


def damage(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def edit(**changes):
    def apply(folder):
        meta = json.loads((folder / "meta.json").read_bytes())
        (folder / "meta.json").write_text(json.dumps(meta | changes))

    return apply


@pytest.mark.parametrize(
    "harm, named",
    [
        (lambda folder: (folder / "meta.json").unlink(), "meta.json"),
        (lambda folder: (folder / "val.bin").unlink(), "val.bin"),
        (damage("train.bin", b""), "train.bin"),
        (damage("val.bin", b"\0\0\0"), "val.bin"),
        (damage("tokenizer.tiktoken", b"YQ== 0\n"), "tokenizer.tiktoken"),
        (damage("tokenizer.tiktoken", data.ranks_to_text(train_bpe(TEXT[::-1], 300).ranks).encode()), "written with"),
        (lambda folder: (folder / "tokenizer.tiktoken").unlink(), "tokenizer.tiktoken"),
        (damage("meta.json", b"{"), "meta.json"),
        (damage("meta.json", b"[" * 100_000), "meta.json"),
        (damage("meta.json", b"\xff"), "meta.json"),
        (edit(version=2), "version 2"),
        (edit(vocab_size=12), "vocab_size"),
        (edit(vocab_size=True), "vocab_size"),
        (edit(dtype="float64"), "dtype"),
        (edit(source=None), "source"),
        (edit(tokenizer="char"), "tokenizer"),
        (edit(tokenizer={"kind": "bpe"}), "tokenizer.tiktoken"),
        (edit(tokens={"train": 1}), "tokens"),
        (edit(text_sha256="0"), "text_sha256"),
    ],
)
def test_damaged_data_is_refused_with_file_and_cure(tmp_path, harm, named):
    folder = tmp_path / "words"
    prepare(folder, TEXT, "bottles", tokenizer="bpe", vocab_size=300)
    harm(folder)
    with pytest.raises(ValueError) as error:
        load(folder)
    message = str(error.value)
    assert str(folder) in message and named in message and "\n" not in message
    assert message.endswith("run python data/words/prepare.py again")


def test_unknown_data_names_what_there_is():
    with pytest.raises(ValueError, match="no such data; .*shakespeare_char"):
        load(ROOT / "data" / "shakespere")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
KEYS = ["version", "tokenizer", "vocab_size", "dtype", "source", "warning", "text_sha256", "tokens", "bytes"]
INNER = ["kind", "characters", "pattern", "special_tokens", "sha256", "ranks", "train", "val"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(key=st.sampled_from(KEYS), inner=st.none() | st.sampled_from(INNER), value=JSON)
def test_any_metadata_loads_or_is_a_value_error(folder, key, inner, value):
    whole = (folder / "meta.json").read_bytes()
    meta = json.loads(whole)
    if inner and isinstance(meta[key], dict):
        meta[key][inner] = value
    else:
        meta[key] = value
    (folder / "meta.json").write_text(json.dumps(meta))
    try:
        load(folder)
    except ValueError as error:
        assert "\n" not in str(error) and "prepare.py again" in str(error)
    finally:
        (folder / "meta.json").write_bytes(whole)


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
    """The first tokens, which are their places, of the windows of the first batches."""
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


@given(count=st.integers(1, 3000), key=st.integers(0, 2**64 - 1))
def test_an_order_holds_every_number_once(count, key):
    order = data.shuffled(np.arange(count), count, key, 1)
    assert sorted(order.tolist()) == list(range(count))


def test_orders_are_random():
    n = 20_000
    order = data.shuffled(np.arange(n), n, 3, 4)
    for a, b, cells in ((np.arange(n), order, 20), (order[:-1] % 32, order[1:] % 32, 32)):
        counts, expected = np.histogram2d(a, b, bins=cells)[0], n / cells**2
        freedom = cells**2 - 1
        assert abs(((counts - expected) ** 2 / expected).sum() - freedom) < 4 * (2 * freedom) ** 0.5
    fixed = [(data.shuffled(np.arange(100), 100, 5, epoch) == np.arange(100)).sum() for epoch in range(1000)]
    assert 0.85 < np.mean(fixed) < 1.15 and 0.75 < np.var(fixed) < 1.3  # a random permutation has one on average


def test_a_corpus_of_ten_billion_tokens_costs_no_memory(tmp_path):
    tokens = 10**10
    with open(tmp_path / "train.bin", "wb") as file:
        file.truncate(2 * tokens)  # zeros that take no disk
    train = np.memmap(tmp_path / "train.bin", dtype=np.uint16, mode="r")
    huge = data.Dataset({"vocab_size": 1}, None, {"train": train, "val": train[:1000]}, tmp_path, {})
    tracemalloc.start()
    x, _ = huge.batch(0, 123_456, 0, 4, 64)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert x.shape == (4, 64) and peak < 1e6


def windows(data, *arguments):
    batches = list(data.windows(*arguments))
    return torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches])


@given(tokens=st.integers(2, 60), block=st.integers(1, 59), batch=st.integers(1, 9))
def test_windows_count_every_target_of_a_small_split_once(tokens, block, batch):
    words = dataset(range(100), range(tokens))
    if block >= tokens:
        with pytest.raises(ValueError):
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


@pytest.mark.parametrize("tokens, block, limit, world", [(30, 4, 99, 2), (30, 4, 99, 3), (10, 8, 99, 4), (200, 8, 64, 3)])
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
    words.check_sizes(1, 9)
    message = "block_size=10 is too long for the val split of 10 tokens; the largest that works is 9"
    for call in (
        lambda: words.check_sizes(1, 10),
        lambda: words.batch(0, 0, 0, 1, 10),
        lambda: next(words.windows("train", 1, 10, 50)),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(ValueError, match="max_tokens=0"):
        next(words.windows("val", 1, 5, 0))


# -- the scripts ---------------------------------------------------------------------------------------------


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """A copy of the repository's data and config folders to prepare in, far from the network."""
    root = tmp_path / "repo"
    kept_out = shutil.ignore_patterns("*.bin", "*.json", "*.tiktoken", "input.txt", "__pycache__")
    for name in ("data", "config"):
        shutil.copytree(ROOT / name, root / name, ignore=kept_out)
    monkeypatch.setattr(sys, "path", sys.path[:])

    def offline(url):
        raise OSError("no network")

    monkeypatch.setattr(data, "download", offline)

    def run(name, *arguments):
        path = root / "data" / name / "prepare.py"
        monkeypatch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as end:
            return end.code
        return 0

    run.root = root
    return run


@pytest.mark.parametrize("name, vocabulary", [("shakespeare_char", None), ("shakespeare_bpe", 1024)])
def test_shakespeare_scripts_work_offline(scripts, capsys, name, vocabulary):
    assert scripts(name) == 0
    meta = load(scripts.root / "data" / name).meta
    assert meta["vocab_size"] == vocabulary or vocabulary is None
    assert "not Tiny Shakespeare" in meta["warning"]
    assert "NOT SHAKESPEARE" in capsys.readouterr().out


def test_text_script_takes_files_and_folders(scripts, tmp_path, capsys):
    for name in ("b.md", "sub/a.txt", "sub/c.dat"):
        (tmp_path / "texts" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / name).write_text(f"{name}: {TEXT}", encoding="utf-8")
    one = tmp_path / "texts" / "sub" / "a.txt"
    assert scripts("text", one, tmp_path / "texts", "--tokenizer=bpe", "--vocab_size=280", "--val_fraction=0.3") == 0
    loaded = load(scripts.root / "data" / "text")
    assert loaded.meta["source"] == "a.txt and 2 more" and loaded.meta["vocab_size"] == 280
    text = loaded.tokenizer.decode(np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist())
    assert text == f"sub/a.txt: {TEXT}\nb.md: {TEXT}\nsub/a.txt: {TEXT}"
    assert scripts("text", one) == 0
    assert load(scripts.root / "data" / "text").meta["source"] == "a.txt"


@pytest.mark.parametrize(
    "arguments, named",
    [
        ([], "text"),
        (["missing.txt"], "missing.txt"),
        (["latin.txt"], "latin.txt: not UTF-8 text at byte 3"),
        (["empty.txt"], "distinct"),
        (["nothing"], "nothing"),
        (["good.txt", "--tokenizer=words"], "words"),
        (["good.txt", "--tokenizer=bpe", "--vocab_size=8"], "vocab_size=8"),
        (["good.txt", "--vocab_size=many"], "many"),
        (["good.txt", "--val_fraction=2"], "val_fraction=2"),
        (["good.txt", "--token=char"], "--token"),
    ],
)
def test_text_script_errors(scripts, tmp_path, monkeypatch, capsys, arguments, named):
    monkeypatch.chdir(tmp_path)
    Path("good.txt").write_text(TEXT, encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("empty.txt").touch()
    Path("nothing").mkdir()
    assert scripts("text", "good.txt") == 0
    before = contents(scripts.root)
    capsys.readouterr()
    assert scripts("text", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("prepare.py: error: ") and named in err
    assert contents(scripts.root) == before


def test_scripts_run_from_any_folder(scripts, tmp_path):
    (tmp_path / "my.txt").write_text(TEXT, encoding="utf-8")
    script = scripts.root / "data" / "text" / "prepare.py"
    result = subprocess.run([sys.executable, script, "my.txt"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert load(script.parent).meta["source"] == "my.txt"
