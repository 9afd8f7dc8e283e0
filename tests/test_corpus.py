"""Texts of any size and format, and that their chunks come to the same as the whole: data/corpus.py, encode.py, prepare.py."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from hypothesis import given, strategies as st

from conftest import hear_signals
from data import corpus, prepare as preparing
from config.runtime.common import UserError, folder_lock
from data.corpus import read_files, read_rows, text_files
from data.dataset import load_dataset
from data.encode import encode_all
from data.prepare import prepare
from data.tokenizer import END, SPLIT, BPETokenizer, train_bpe

WORDS = ["the", "quick", "Fuchs", "läuft", "über", "瓶子", "12345", "don't", "...", "!?", "🦊", "x" * 40, "\u00a0", "\x7f"]
GAPS = [" ", " ", " ", "\n", "\n\n", "  ", " \n", "\r\n", "\t", "\x01\n"]
DOCUMENTS = ["One line.", "Two\nlines of text, a little longer\n", "Ünglück und 瓶子", "  spaces  ", "the end"] * 5


def trained(pattern, special_tokens={}):
    ranks = train_bpe(" ".join(WORDS * 3) + "\n".join(DOCUMENTS), 400).ranks
    tokens = {token: len(ranks) + i for i, token in enumerate(special_tokens)}
    return BPETokenizer(ranks, pattern, tokens)


OURS = trained(SPLIT)
GPT2 = trained(r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+", [END])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "PIECE", 64)
    monkeypatch.setattr(preparing, "CHUNK", 64)
    monkeypatch.setattr(preparing, "gpt2_tokenizer", lambda: GPT2)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def tokens_of(folder):
    loaded = load_dataset(folder)
    return np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist(), loaded


def run(folder, paths, *how, workers=1, **options):
    prepare(folder, partial(read_files, paths, **options), "test", *how, workers=workers)
    assert sorted(path.name for path in folder.iterdir() if path.suffix not in (".json", ".tiktoken")) == ["train.bin", "val.bin"]
    return tokens_of(folder)


# -- cutting -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=90, max_size=150), st.sampled_from([OURS, GPT2]))
def test_pieces_give_the_tokens_of_the_whole(tmp_path, monkeypatch, words, tokenizer):
    text = "".join(word + gap + "so on\nand" * (i % 3 == 0) for i, (word, gap) in enumerate(words))
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    monkeypatch.setattr(corpus, "PIECE", 256)
    pieces = [piece for _, piece in read_files([path])]
    assert len(pieces) > 2
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@given(st.text(min_size=100, max_size=300))
def test_no_character_is_lost_wherever_a_text_is_cut(tmp_path, text):
    text = "a" + text  # no mark of an editor's in front
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    pieces = list(read_files([path]))
    assert "".join(piece for _, piece in pieces) == text
    assert [begins for begins, _ in pieces] == [True] + [False] * (len(pieces) - 1)


@pytest.mark.parametrize("val_fraction", [0.1, 0.3, 0.97])
@pytest.mark.parametrize("tokenizer", ["char", "bpe", "gpt2"])
def test_the_last_characters_validate(tmp_path, tokenizer, val_fraction):
    """Each split has the tokens of its part of the text, as if that had been encoded in one piece."""
    text = "Ünglück, 瓶子 und mehr davon. " * 60
    (tmp_path / "text.txt").write_bytes(text.encode())
    _, loaded = run(tmp_path / "data", [tmp_path / "text.txt"], tokenizer, 0, val_fraction)
    cut = int(len(text) * (1 - val_fraction))
    marks = loaded.tokenizer.document_start
    for split, part, start in (("train", text[:cut], marks), ("val", text[cut:], [])):
        assert loaded.splits[split].tolist() == start + loaded.tokenizer.encode(part)
        assert loaded.meta["bytes"][split] == len(part.encode())
        assert loaded.meta["tokens"][split] == len(loaded.splits[split])


# -- formats -------------------------------------------------------------------------------------------------


def write(path, documents, field="text"):
    rows = [{"id": i, field: document} for i, document in enumerate(documents)]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    match path.name.partition(".")[2]:
        case "jsonl":
            path.write_text(lines)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(lines.encode()))
        case "json":
            path.write_text(json.dumps(rows))
        case "parquet":
            datasets.Dataset.from_list(rows).to_parquet(path)
        case "csv":
            datasets.Dataset.from_list(rows).to_csv(path)
        case "tsv":
            datasets.Dataset.from_list(rows).to_csv(path, sep="\t")
    return path


@pytest.mark.parametrize("field", ["text", "body"])
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "json", "parquet", "csv", "tsv"])
def test_formats(tmp_path, suffix, field):
    path = write(tmp_path / f"documents.{suffix}", DOCUMENTS, field)
    ids, loaded = run(tmp_path / "data", [path], "char", field=field)
    assert loaded.tokenizer.decode(ids) == "\n".join(DOCUMENTS)
    ids, loaded = run(tmp_path / "data", [path], "gpt2", field=field)
    marks = [i for i, token in enumerate(ids) if token == GPT2.document_start[0]]
    assert [loaded.tokenizer.decode(ids[i + 1 : j]) for i, j in zip(marks, [*marks[1:], None])] == DOCUMENTS


def test_files_and_folders_of_all_formats_may_be_mixed(tmp_path):
    folder = tmp_path / "texts"
    (folder / "sub").mkdir(parents=True)
    names = ["a.txt", "b.jsonl", "sub/c[1*].parquet", "sub/d.jsonl.gz", "sub/E.MD", "sub/ignored.csv", "z.csv"]
    for name in names:
        path = folder / name
        path.write_text(f"in {name}") if path.suffix.lower() in (".txt", ".md") else write(path, [f"in {name}"])
    files = [file for path in (folder / "z.csv", folder, folder / "b.jsonl") for file in text_files(path)]
    ids, loaded = run(tmp_path / "data", files)
    order = ["z.csv", "a.txt", "b.jsonl", "sub/E.MD", "sub/c[1*].parquet", "sub/d.jsonl.gz", "b.jsonl"]
    assert loaded.tokenizer.decode(ids).splitlines() == [f"in {name}" for name in order]


def test_a_dataset(tmp_path):
    (tmp_path / "dataset").mkdir()
    for i in range(2):
        write(tmp_path / "dataset" / f"train-{i}.parquet", DOCUMENTS[i::2])
    assert list(read_rows(tmp_path / "dataset")) == [(True, text) for text in DOCUMENTS[0::2] + DOCUMENTS[1::2]]


def test_a_dataset_of_several_configurations(tmp_path):
    names = "---\nconfigs:\n" + "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab") + "---\n"
    (tmp_path / "README.md").write_text(names)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [f"{name}, {text}" for text in DOCUMENTS])
    for name in "ab":
        assert [text for _, text in read_rows(f"{tmp_path}:{name}")] == [f"{name}, {text}" for text in DOCUMENTS]
    with pytest.raises(UserError, match=r"cannot be loaded: .*config.* \['a', 'b'\]"):
        next(read_rows(tmp_path))


def test_openwebtext_script(repo, tmp_path):
    (tmp_path / "dataset").mkdir()
    write(tmp_path / "dataset" / "train.parquet", DOCUMENTS * 4)
    options = [f"--dataset={tmp_path / 'dataset'}", "--tokenizer=char", "--val_fraction=0.25", "--workers=1"]
    repo(["data/openwebtext/prepare.py", *options])
    ids, loaded = tokens_of("data/openwebtext")
    assert loaded.tokenizer.decode(ids) == "\n".join(DOCUMENTS * 4)
    assert len(loaded.splits["val"]) / len(ids) == pytest.approx(0.25, abs=0.01)


def test_a_file_may_be_given_twice_and_an_empty_one_is_no_document(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"{name} text, {name * 70}")
    (tmp_path / "0").touch()
    ids, loaded = run(tmp_path / "data", [tmp_path / name for name in "0ba0aba"])
    assert loaded.tokenizer.decode(ids) == "\n".join(f"{name} text, {name * 70}" for name in "baaba")


def test_byte_pairs_are_learned_from_all_over_what_is_trained_on(tmp_path, monkeypatch):
    pieces = [(True, f"{i} {letter * 20} " * 6000) for i, letter in enumerate("abcdefghij")]
    text = "".join(piece for _, piece in pieces)
    cut = int(0.9 * len(text))
    assert preparing.sample(pieces, cut) == text[:cut]
    monkeypatch.setattr(preparing, "SAMPLE", 20_000)
    found = preparing.sample(pieces, cut)
    assert 20_000 <= len(found) <= 20_010 and set(found) & set("abcdefghij") == set("abcdefghi")
    prepare(tmp_path, lambda: pieces, "letters", "bpe", 280, workers=1)
    assert not any(b"jj" in token for token in load_dataset(tmp_path).tokenizer.ranks)


# -- processes -----------------------------------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def files(tmp_path):
    paths = [write(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "b.txt"]
    paths[1].write_text("the quick brown fox " * 30)
    return paths


def test_processes_do_what_one_does(tmp_path, files, capsys):
    run(tmp_path / "one", files, "gpt2")
    capsys.readouterr()
    run(tmp_path / "two", files, "gpt2", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert 5 < capsys.readouterr().out.count("MB/s") <= 10


def test_little_is_read_ahead(monkeypatch):
    """The processes get the text as they need it, however slow they are and however large it is."""
    yielded = []

    def chunks():
        for i in range(100):
            yielded.append(i)
            yield "train", [(False, "ab")]

    encoded = encode_all(OURS, chunks(), workers=2)
    for _ in range(10):
        next(encoded)
    assert len(yielded) <= 10 + 2 * 2
    encoded.close()


def test_a_process_that_is_killed_says_so():
    with pytest.raises(UserError, match="a process has been ended.*fewer --workers"):
        deadly = SimpleNamespace(vocab_size=1, encode_array=signal.raise_signal)  # whose text is a signal
        list(encode_all(deadly, [("train", [(False, signal.SIGKILL)])], workers=2))


@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_run_leaves_what_was_there(tmp_path, files, workers):
    run(tmp_path / "data", files)
    before = contents(tmp_path / "data")
    readings = count()

    def interrupted():
        last = next(readings)
        for i, piece in enumerate(read_files(files)):
            if last and i == 20:
                raise KeyboardInterrupt
            yield piece

    for folder in ("data", "new"):
        readings = count()
        with pytest.raises(KeyboardInterrupt):
            prepare(tmp_path / folder, interrupted, "test", "gpt2", workers=workers)
    assert contents(tmp_path / "data") == before and not (tmp_path / "new").exists()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_goes_on_when_the_program_is_ended(repo, tmp_path, number):
    """Its pipes are closed when the last of its processes has ended."""
    (tmp_path / "text.txt").write_text("".join(f"{i} green bottles, hanging on the wall\n" for i in range(120_000)))
    command = [sys.executable, "data/text/prepare.py", tmp_path / "text.txt", "--name=plays", "--workers=2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, **pipes, start_new_session=True, preexec_fn=hear_signals)
    while not Path("data/plays/val.bin.tmp").exists():  # the last file to be opened
        assert process.poll() is None
        time.sleep(0.001)
    time.sleep(0.3)  # so that it is not between opening and noting to remove: the text takes some seconds from here
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
        assert process.communicate(timeout=120)[1] == b"" and process.returncode == 130
        assert not Path("data/plays").exists()
    else:
        process.kill()
        process.communicate(timeout=120)
        repo([*map(str, command[1:]), "--workers=1"])
        assert len(load_dataset("data/plays").splits["train"]) == int(0.9 * (tmp_path / "text.txt").stat().st_size)
        assert not list(Path("data/plays").glob("*.tmp"))


def test_two_at_once_are_refused(tmp_path, files):
    (tmp_path / "data").mkdir()
    with folder_lock(tmp_path / "data"):
        with pytest.raises(UserError, match="another prepare.py is at work there"):
            run(tmp_path / "data", files)
    run(tmp_path / "data", files)


# -- bad input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, content, named", [
    ("a.jsonl", b'{"text": "good"}\n{"text": 3}', "a.jsonl: line at byte 17: no text in field 'text'; --field may be: none"),
    ("a.jsonl", b'{"title": "good"}\n', "line at byte 0: no text in field 'text'; --field may be: title"),
    ("a.jsonl", b'["text"]\n', "line at byte 0: no text in field 'text'"),
    ("a.jsonl", b'{"text": "good"}\n{"text": "cut', "line at byte 17: not JSON"),
    ("a.jsonl", b"\xff\xfe\n", "line at byte 0: not JSON"),
    ("a.jsonl", b"\n\n", "fewer than two distinct characters"),
    ("a.jsonl.gz", gzip.compress(b'{"title": "good"}\n{"title": "x"}'), "no text in field 'text'; --field may be: title"),
    ("a.jsonl.gz", gzip.compress(b'{"text": "good"}\n' * 999)[:-9], "a.jsonl.gz: cannot be loaded"),
    ("a.jsonl.gz", b"plain text", "a.jsonl.gz: cannot be loaded"),
    ("a.txt.gz", gzip.compress(b"plain text"), "a.txt.gz: only files of rows, such as .jsonl.gz, are read compressed"),
    ("a.parquet", b"plain text", "a.parquet: cannot be loaded"),
    ("a.csv", b"id,title\n1,good", "a.csv: no text in field 'text'; --field may be: title"),
    ("a.txt", b"good text and then " + b"more of it " * 20 + b"\xff bad", "a.txt: not UTF-8 text at byte 239"),
    ("a.txt", b"\x80" * 200, "a.txt: not UTF-8 text at byte 0"),
], ids=count())  # fmt: skip
def test_bad_files(tmp_path, name, content, named):
    path = tmp_path / name
    path.write_bytes(content)
    for tokenizer in ("char", "bpe"):
        with pytest.raises(UserError) as error:
            run(tmp_path / "data", [path], tokenizer)
        assert named in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "data").exists()


def test_a_dataset_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="missing: cannot be loaded"):
        next(read_rows(tmp_path / "missing"))


def test_what_needs_datasets_says_so(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", DOCUMENTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for pieces, name in ((read_files([path]), path), (read_rows("some/where"), "some/where")):
        with pytest.raises(UserError, match=f"{name} is read by a package that is not here: pip install datasets"):
            next(pieces)


@pytest.mark.parametrize("tokenizer", ["char", "bpe", "gpt2"])
def test_half_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path, tokenizer):
    (tmp_path / "a.jsonl").write_text('{"text": "good \\ud800 text"}\n' * 9)
    ids, loaded = run(tmp_path / "data", [tmp_path / "a.jsonl"], tokenizer)
    assert loaded.tokenizer.decode(ids).replace(END, "\n").strip() == "\n".join(["good ? text"] * 9)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_what_is_null_is_no_document(tmp_path, suffix):
    documents = [None, *DOCUMENTS, None, "", *DOCUMENTS]
    ids, loaded = run(tmp_path / "data", [write(tmp_path / f"a.{suffix}", documents)], "gpt2")
    assert loaded.tokenizer.decode(ids).split(END)[1:] == [*DOCUMENTS, "", *DOCUMENTS]


def test_columns_that_are_not_text_are_refused(tmp_path):
    path = write(tmp_path / "train.parquet", DOCUMENTS)
    with pytest.raises(UserError, match="train.parquet: no text in field 'id'; --field may be: text"):
        run(tmp_path / "data", [path], field="id")
