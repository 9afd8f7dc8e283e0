"""Texts of any form, cut once, and their documents encoded in threads: data/prepare.py."""

import json
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

import data.text.prepare as text_script
from conftest import contents, hear_signals, refused
from data import prepare as preparing
from data.dataset import load_dataset
from data.prepare import in_parts, prepare
from data.text.prepare import read_documents
from data.tokenizer import END, SPLIT, BPETokenizer

DOCUMENTS = ["One line.", "Two\nlines of text, a little longer\n", "Ünglück und 瓶子", "  spaces  ", "the end"] * 5


GPT2 = BPETokenizer({bytes([i]): i for i in range(256)}, SPLIT, {END: 256})


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch, tmp_path):
    monkeypatch.setattr(preparing, "gpt2_tokenizer", lambda: GPT2)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


def prepared(folder, text, *how, **options):
    """Prepare a text and return its tokens, and the data folder."""
    prepare(folder, text, "test", *how, **options)
    assert sorted(path.name for path in folder.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    loaded = load_dataset(folder)
    return tokens_of(loaded), loaded


def tokens_of(loaded):
    return np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist()


@given(st.lists(st.text(alphabet="ab \n\r\x01", min_size=1, max_size=300)), st.integers(-1, 400))
@example(["ab", "abab"], 4)  # cut inside a document
def test_no_character_is_lost_and_every_document_begins_once(documents, cut):
    parts = list(in_parts([None, *documents, ""], "|", cut))
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


def test_documents_begin_with_their_token_or_after_a_lines_end(tmp_path, monkeypatch):
    monkeypatch.setattr(text_script, "field", "body")
    documents = read_documents(jsonl(tmp_path / "a.jsonl", [None, *DOCUMENTS, None], "body"))  # null is none
    ids, loaded = prepared(tmp_path / "data", documents, "char")
    assert loaded.tokenizer.decode(ids) == "\n".join(DOCUMENTS)
    ids, _ = prepared(tmp_path / "data", documents, "gpt2")
    assert ids == [id for document in DOCUMENTS for id in GPT2.encode(END + document)]


def test_a_separator_ends_documents_and_its_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "a.txt"
    path.write_bytes(b"<|endoftext|>\none\n<|endoftext|>\r\ntwo<|endoftext|>\n three\n<|endoftext|>")
    for separator, documents in (("", 1), (END, 3)):
        monkeypatch.setattr(text_script, "separator", separator)
        ids, _ = prepared(tmp_path / "data", read_documents(path) * 5, "gpt2")
        assert ids.count(GPT2.document_start[0]) == 5 * documents
        note = f"NOTE    {END} in the text is encoded as plain text; --separator='{END}' of data/text/prepare.py"
        assert (note in capsys.readouterr().out) == (not separator)
    assert read_documents(path) == ["one\n", "two", "\n three\n"]


# -- what the package `datasets` reads -----------------------------------------------------------------------

ROWS = datasets.Dataset.from_dict({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
SPLITS = datasets.DatasetDict(train=ROWS, test=ROWS.select([0]))


def folder_of_splits(path):
    for name, rows in SPLITS.items():
        rows.to_parquet(f"{path}/{name}.parquet")


def folder_with_brackets(path):
    """Write the folder splits_[1], and other rows to splits_1, which fits that name as a pattern."""
    folder_of_splits("splits_[1]")
    ROWS.select([0]).to_parquet("splits_1/train.parquet")


FORMS = {  # a file or folder, and how to write DOCUMENTS as such
    "a[1].csv": ROWS.to_csv,
    "splits": folder_of_splits,
    "splits_[1]": folder_with_brackets,
    "splits_[1]/train.parquet": folder_with_brackets,
    "saved": ROWS.save_to_disk,
    "saved_splits": SPLITS.save_to_disk,
}
READ = "data/openwebtext/prepare.py --name=rows --val_fraction=0.25"


@pytest.mark.parametrize("limit", ["", " --limit=1"])
@pytest.mark.parametrize("name", FORMS)
def test_files_and_folders(repo, name, limit):
    FORMS[name](name)
    repo(f"{READ} --dataset={name}{limit}")
    assert tokens_of(load_dataset("data/rows")) == [id for document in DOCUMENTS for id in GPT2.encode(END + document)]


@pytest.mark.parametrize("limit", ["", " --limit=1"])
def test_a_file_of_plain_text_is_one_document(repo, limit):
    text = "".join(DOCUMENTS)
    Path("texts").mkdir()
    for name in ("texts/a.txt.zst", "texts/b.txt.zst"):
        Path(name).write_bytes(zstandard.compress(text.encode()))
    for dataset, documents in (("texts/a.txt.zst", 1), ("texts", 2)):
        repo(f"{READ} --dataset={dataset}{limit}")
        assert tokens_of(load_dataset("data/rows")) == GPT2.encode(END + text) * documents


@pytest.mark.parametrize("limit", ["", " --limit=1"])
@pytest.mark.parametrize("name, separator", [("a.csv", ","), ("a.tsv", "\t")])
def test_words_for_missing_values_are_texts(repo, name, separator, limit):
    """... also behind an empty row, and next to numbers of which some are missing."""
    words = ["null", "NA", "nan", "N/A", "None", "007", "text"]
    rows = [("id", "text"), (1, ""), ("NA", ""), *((i if i % 2 else "", word) for i, word in enumerate(words))]
    Path(name).write_text("".join(f"{i}{separator}{word}\n" for i, word in rows))
    repo(f"{READ} --dataset={name}{limit} --tokenizer=char")
    loaded = load_dataset("data/rows")
    assert loaded.tokenizer.decode(tokens_of(loaded)) == "\n".join(words)


@pytest.mark.parametrize("path, name", [("a[1].csv", "a_1_"), ("splits", "splits")])
def test_the_text_program_names_the_command_that_reads_tables(repo, capsys, path, name):
    """... with the options that were given."""
    FORMS[path](path)
    error = refused(repo, f"data/text/prepare.py {path} --tokenizer=bpe --vocab_size=300 --val_fraction=0.25", capsys)
    repo(shlex.split(error.partition("tables and compressed files are read by python ")[2]))
    meta = load_dataset(f"data/{name}").meta
    assert meta["source"] == path
    assert meta["settings"] == {"tokenizer": "bpe", "vocab_size": 300, "val_fraction": 0.25}


def test_a_dataset_of_several_configurations(repo):
    Path("both").mkdir()
    names = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab")
    Path("both/README.md").write_text(f"---\nconfigs:\n{names}---\n")
    for name in "ab":
        jsonl(Path(f"both/{name}.jsonl"), [f"in {name}"] * 9)
    repo(f"{READ} --dataset=./both:b --tokenizer=char")
    assert load_dataset("data/rows").tokenizer.chars == "\n bin"


def test_a_limit_streams_that_much_and_no_more(repo, tmp_path):
    rows = datasets.Dataset.from_dict({"text": [None, *(f"{i:04}" + "x" * 96 for i in range(100))]})
    rows.to_parquet("dataset/train-0.parquet")
    Path("dataset/train-1.parquet").write_text("not read")
    repo(f"{READ} --dataset=dataset --limit=3e-6 --tokenizer=char")
    meta = load_dataset("data/rows").meta
    assert meta["source"] == "3e-06 GB of dataset" and sum(meta["bytes"].values()) == 30 * 100 + 29  # and line ends
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize("arguments, named", [
    ("a.csv --field=body", "a.csv: no text in field 'body'; fields with text: text"),
    ("a.csv --field=id", "a.csv: no text in field 'id'; fields with text: text"),
    ("numbers.csv", "numbers.csv: no text in field 'text'; fields with text: title"),  # behind an empty row
    ("bytes.parquet", "bytes.parquet: no text in field 'text'; fields with text: title"),
    ("lists.jsonl.gz", "lists.jsonl.gz: no text in field 'text'; fields with text: title"),
    ("broken.csv", "broken.csv: cannot be read: ParserError: .*Expected 2 fields in line 3, saw 4"),
    ("val_only", "val_only: cannot be read: .*validation"),
    ("missing", "missing: cannot be read: ConnectionError: .*missing"),
])  # fmt: skip
@pytest.mark.parametrize("limit", ["", " --limit=1"])
def test_bad_datasets(repo, capsys, arguments, named, limit):
    ROWS.to_csv("a.csv")
    Path("broken.csv").write_text('id,text\n1,"one"\n2,"two",three,four\n')
    ROWS.to_parquet("val_only/validation.parquet")
    for name, value in (("numbers.csv", 5), ("bytes.parquet", b"5"), ("lists.jsonl.gz", ["5"])):
        rows = datasets.Dataset.from_dict({"text": [None, value], "title": ["a", "b"]})
        {"csv": rows.to_csv, "parquet": rows.to_parquet, "gz": rows.to_json}[name.rpartition(".")[2]](name)
    error = refused(repo, f"{READ} --dataset={arguments}{limit}", capsys)
    assert re.match(f"prepare.py: error: {named}", error), error


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


def test_numbers_behind_many_empty_rows_are_no_text(repo, capsys):
    Path("late.csv").write_text("id,text\n" + "".join(f"{i},\n" for i in range(70)) + "70,6\n71,12345\n")
    assert "no text in field 'text'" in refused(repo, f"{READ} --dataset=late.csv", capsys)
