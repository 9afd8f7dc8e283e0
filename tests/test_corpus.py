"""Texts of any form, cut once, and their documents encoded in threads: data/prepare.py."""

import bz2
import gzip
import json
import lzma
import signal
import subprocess
import sys
import time
from itertools import count
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from config.runtime.errors import UserError
from conftest import ROOT, contents, hear_signals
from data import prepare as preparing
from data.dataset import load_dataset
from data.prepare import in_parts, prepare
from data.texts import read_dataset, read_documents
from data.tokenizer import END, SPLIT, BPETokenizer

DOCUMENTS = ["One line.", "Two\nlines of text, a little longer\n", "Ünglück und 瓶子", "  spaces  ", "the end"] * 5


GPT2 = BPETokenizer({bytes([i]): i for i in range(256)}, SPLIT, {END: 256})


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch, tmp_path):
    monkeypatch.setattr(preparing, "gpt2_tokenizer", lambda: GPT2)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def prepared(folder, text, *how, **options):
    """Prepare a text and return its tokens, and the data folder."""
    prepare(folder, text, "test", *how, **options)
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    loaded = load_dataset(folder)
    return np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist(), loaded


@given(st.lists(st.text(alphabet="ab \n\r\x01", max_size=300)), st.integers(-1, 400))
@example(["ab", "abab"], 4)  # cut inside a document
def test_no_character_is_lost_and_every_document_begins_once(documents, cut):
    parts = list(in_parts([None, *documents], "|", cut))
    whole = "|".join(documents)
    trained_on = [text for split, _, text in parts if split == "train"]
    assert "".join(text for _, _, text in parts) == whole
    assert "".join(trained_on) == whole[: max(cut, 0)]
    assert sum(begins for _, begins, _ in parts) == len(documents)
    assert len(parts) <= len(documents) + 1


@pytest.mark.parametrize("val_fraction", [0.1, 0.3, 0.97])
@pytest.mark.parametrize("tokenizer", ["char", "bpe", "gpt2"])
def test_the_last_characters_validate(tmp_path, tokenizer, val_fraction):
    """Each split has the tokens of its part of the text, as if that had been encoded in one piece."""
    text = "Ünglück, 瓶子 und mehr davon.\n" * 60
    _, loaded = prepared(tmp_path / "data", [text], tokenizer, 0, val_fraction)
    cut = int(len(text) * (1 - val_fraction))
    marks = loaded.tokenizer.document_start
    for split, part, start in (("train", text[:cut], marks), ("val", text[cut:], [])):
        assert loaded.splits[split].tolist() == start + loaded.tokenizer.encode(part)
        assert loaded.meta["bytes"][split] == len(part.encode())


@pytest.mark.parametrize("documents", [1, 10, 1000])
def test_byte_pairs_are_learned_from_all_over_what_is_trained_on(tmp_path, monkeypatch, documents):
    monkeypatch.setattr(preparing, "SAMPLE", 30_000)
    text = "".join(letter * 200_000 for letter in "abcdefghij")
    size, cut = len(text) // documents, int(0.9 * len(text))
    texts = [text[start : start + size] for start in range(0, len(text), size)]
    found = preparing.sample(in_parts(texts, "", cut), cut)
    assert 20_000 < len(found) < 50_000 and set(found) == set("abcdefghi")
    _, loaded = prepared(tmp_path / "data", texts, "bpe", 260)
    assert not any(b"jj" in token for token in loaded.tokenizer.ranks)


def jsonl(path, documents, field="text"):
    path.write_text("\n\n".join(json.dumps({"id": i, field: document}) for i, document in enumerate(documents)))
    return path


def test_documents_begin_with_their_token_or_after_a_lines_end(tmp_path):
    documents = read_documents(jsonl(tmp_path / "a.jsonl", [None, *DOCUMENTS, None], "body"), "body")  # null is none
    ids, loaded = prepared(tmp_path / "data", documents, "char")
    assert loaded.tokenizer.decode(ids) == "\n".join(DOCUMENTS)
    ids, _ = prepared(tmp_path / "data", documents, "gpt2")
    assert ids == [id for document in DOCUMENTS for id in GPT2.encode(END + document)]


def test_a_separator_ends_documents_and_its_line(tmp_path, capsys):
    (tmp_path / "a.txt").write_bytes(b"<|endoftext|>\none\n<|endoftext|>\r\ntwo<|endoftext|>\n three\n<|endoftext|>")
    assert read_documents(tmp_path / "a.txt", separator=END) == ["one\n", "two", "\n three\n"]
    (text,) = read_documents(tmp_path / "a.txt")
    for separator, documents in (("", 1), (END, 3)):
        ids, _ = prepared(tmp_path / "data", read_documents(tmp_path / "a.txt", separator=separator) * 5, "gpt2")
        assert ids.count(GPT2.document_start[0]) == 5 * documents
        note = f"NOTE    {END} in the text is encoded as plain text; --separator='{END}' of data/text/prepare.py"
        assert (note in capsys.readouterr().out) == (not separator)
        prepared(tmp_path / "data", [*read_documents(tmp_path / "a.txt", separator=separator), "the last"], "char")
        assert (note in capsys.readouterr().out) == (not separator)  # it depends on the text alone


@pytest.mark.parametrize("name, content, named", [
    ("a.jsonl", b'{"text": "good"}\n{"text": 3}', "a.jsonl: line 2: no text in field 'text'; --field may be: none"),
    ("a.jsonl", b'{"title": "good"}\n', "line 1: no text in field 'text'; --field may be: title"),
    ("a.jsonl", b'{"text": "good"}\n\n{"text": "cut', "line 3 is not JSON"),
    ("a.jsonl", b"[" * 10**5, "line 1 is not JSON"),
    ("a.txt.gz", b"not compressed", "a.txt.gz: cannot be loaded: Not a gzipped file"),
    ("a.csv", b"id,story\n1,good\n", "a.csv: no text in field 'text'; --field may be: story"),
    ("a.parquet", b"PAR1", "a.parquet: cannot be loaded: "),
    ("a.txt", b"good text and then " + b"more of it " * 20 + b"\xff bad", "a.txt: not UTF-8 text at byte 239"),
], ids=count())  # fmt: skip
def test_bad_files(tmp_path, monkeypatch, name, content, named):
    monkeypatch.chdir(ROOT)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_documents(tmp_path / name)
    assert named in str(error.value) and "\n" not in str(error.value)


def parquet(path, documents):
    datasets.Dataset.from_dict({"id": range(len(documents)), "text": documents}).to_parquet(path)


@pytest.mark.parametrize("name", ["a[1].CSV", "a.tsv", "a.json", "a.parquet", "a.csv.gz", "a.jsonl.xz"])
def test_tables(tmp_path, name):
    """What is in a table is read as it is, whatever its form."""
    documents = [*DOCUMENTS, 'quoted: "a,\tb"\r\n', "1"]
    table = pandas.DataFrame({"id": range(len(documents) + 1), "body": [*documents, None]})
    write, options = {
        "csv": (table.to_csv, {}),
        "tsv": (table.to_csv, {"sep": "\t"}),
        "json": (table.to_json, {"orient": "records"}),
        "jsonl": (table.to_json, {"orient": "records", "lines": True}),
        "parquet": (table.to_parquet, {}),
    }[name.split(".")[1].lower()]
    write(tmp_path / name, **options)
    assert read_documents(tmp_path / name, "body") == documents


@pytest.mark.parametrize("name, package", [("a.txt.gz", gzip), ("a.md.bz2", bz2), ("a.xz", lzma)])
def test_compressed_texts(tmp_path, name, package):
    (tmp_path / name).write_bytes(package.compress(b"one\n<|endoftext|>\ntwo\n"))
    assert read_documents(tmp_path / name, "body", END) == ["one\n", "two\n"]


def test_a_dataset_of_several_configurations(tmp_path):
    names = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{names}---\n")
    for name in "ab":
        jsonl(tmp_path / f"{name}.jsonl", [f"in {name}"] * 9)
    texts = read_dataset(f"{tmp_path}:b")
    assert list(texts) == list(texts) == ["in b"] * 9
    with pytest.raises(UserError, match=r"cannot be loaded: .*config.* \['a', 'b'\]"):
        read_dataset(str(tmp_path))


def test_a_limit_streams_that_much_and_no_more(tmp_path):
    texts = [f"{i:04}" + "x" * 96 for i in range(100)]
    parquet(tmp_path / "train-0.parquet", [None, *texts])
    (tmp_path / "train-1.parquet").write_text("not read")
    assert read_dataset(str(tmp_path), limit=3e-6) == texts[:30]
    assert not list(tmp_path.rglob("*.arrow"))


def test_openwebtext_script(repo):
    Path("dataset").mkdir()
    parquet("dataset/train.parquet", DOCUMENTS * 40)
    command = "data/openwebtext/prepare.py --dataset=dataset --tokenizer=char --val_fraction=0.25"
    repo(command)
    loaded = load_dataset("data/openwebtext")
    text = "".join(loaded.tokenizer.decode(loaded.splits[split]) for split in ("train", "val"))
    assert text == "\n".join(DOCUMENTS * 40)
    repo(f"{command} --limit=1e-6")
    assert load_dataset("data/openwebtext").meta["source"] == "1e-06 GB of dataset"
    before = contents(Path("data/openwebtext"))
    repo(f"{command} --name=mine")
    assert load_dataset("data/mine").meta["source"] == "dataset" and contents(Path("data/openwebtext")) == before


def test_bad_datasets(tmp_path, monkeypatch):
    parquet(tmp_path / "train.parquet", DOCUMENTS)
    with pytest.raises(UserError, match="no text in field 'body'; --field may be: text"):
        read_dataset(str(tmp_path), field="body")
    with pytest.raises(UserError, match="missing: cannot be loaded"):
        read_dataset("missing")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", "/dev/null/cache")  # as where there is no home folder
    with pytest.raises(UserError, match="Not a directory: .*; HF_HOME=FOLDER moves the cache"):
        read_dataset(str(tmp_path))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="a package that is not installed: pip install datasets"):
        read_dataset("some/where")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")
def test_an_interrupted_program_ends_and_leaves_what_was_there(repo, tmp_path):
    prepare("data/plays", DOCUMENTS, "test")
    before = contents(Path("data/plays"))
    jsonl(tmp_path / "text.jsonl", (f"{i} green bottles, hanging on the wall" for i in range(200_000)))
    command = [sys.executable, "data/text/prepare.py", tmp_path / "text.jsonl", "--name=plays"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=hear_signals)
    unfinished = Path("data/plays/train.bin.tmp")
    while not (unfinished.exists() and unfinished.stat().st_size):  # it writes
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=120)[1] == b"" and process.returncode == 130
    assert contents(Path("data/plays")) == before
