"""Texts of any form, cut once, and their documents encoded in threads: data/prepare.py."""

import bz2
import gzip
import json
import lzma
import re
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from itertools import count
from pathlib import Path
from zipfile import ZipFile

import datasets
import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

import data.text.prepare as text_script
from config.runtime.program import UserError
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
    return np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist(), loaded


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


@pytest.mark.parametrize("name, content, named", [
    ("a.jsonl", b'{"text": "good"}\n{"text": 3}', "a.jsonl: line 2 is not JSON with a text in field 'text'"),
    ("a.jsonl", b'{"title": "good"}\n', "line 1 is not JSON with a text in field 'text'"),
    ("a.jsonl", b'{"text": "good"}\n\n{"text": "cut', "line 3 is not JSON"),
    ("a.txt", b"good text and then " + b"more of it " * 20 + b"\xff bad", "a.txt: not UTF-8 text at byte 239"),
], ids=count())  # fmt: skip
def test_bad_files(tmp_path, name, content, named):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        read_documents(tmp_path / name)
    assert named in str(error.value) and "\n" not in str(error.value)


# -- what the package `datasets` reads -----------------------------------------------------------------------

ROWS = datasets.Dataset.from_dict({"id": range(len(DOCUMENTS)), "text": DOCUMENTS})
SPLITS = datasets.DatasetDict(train=ROWS, test=ROWS.select([0]))
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def compressed(compress, content=LINES):
    return lambda path: Path(path).write_bytes(compress(content))


def zip_file(path):
    with ZipFile(path, "w") as file:
        file.writestr("a.jsonl", LINES)


def arrow_file(path):
    ROWS.save_to_disk("saved")
    Path("saved/data-00000-of-00001.arrow").rename(path)


def folder_of_splits(path):
    for name, rows in SPLITS.items():
        rows.to_parquet(f"{path}/{name}.parquet")


FORMS = {  # a file or folder, and how to write DOCUMENTS as such
    "a.csv": ROWS.to_csv,
    "a.tsv": partial(ROWS.to_csv, sep="\t"),
    "a.json": partial(ROWS.to_json, lines=False),
    "a[1].jsonl": ROWS.to_json,
    "a.parquet": ROWS.to_parquet,
    "a.arrow": arrow_file,
    "a.jsonl.gz": compressed(gzip.compress),
    "a.jsonl.bz2": compressed(bz2.compress),
    "a.jsonl.xz": compressed(lzma.compress),
    "a.jsonl.zst": compressed(zstandard.compress),
    "a.zip": zip_file,
    "saved": ROWS.save_to_disk,
    "saved_splits": SPLITS.save_to_disk,
    "splits": folder_of_splits,
}
READ = "data/openwebtext/prepare.py --name=rows --val_fraction=0.25"


def tokens_of(name):
    loaded = load_dataset(f"data/{name}")
    return np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist()


@pytest.mark.parametrize("limit", ["", " --limit=1"])
@pytest.mark.parametrize("name", FORMS)
def test_files_and_folders_of_many_forms(repo, name, limit):
    FORMS[name](name)
    repo(f"{READ} --dataset={name}{limit}")
    assert tokens_of("rows") == [id for document in DOCUMENTS for id in GPT2.encode(END + document)]


@pytest.mark.parametrize("limit", ["", " --limit=1"])
def test_a_file_of_plain_text_is_one_document(repo, limit):
    text = "".join(DOCUMENTS)
    Path("texts").mkdir()
    for name in ("texts/a.txt.zst", "texts/b.txt.zst"):
        compressed(zstandard.compress, text.encode())(name)
    for dataset, documents in (("texts/a.txt.zst", 1), ("texts", 2)):
        repo(f"{READ} --dataset={dataset}{limit}")
        assert tokens_of("rows") == GPT2.encode(END + text) * documents


def test_the_text_program_names_the_command_that_reads_a_table(repo, capsys):
    """... a compressed file, or a folder of these."""
    Path("good.txt").write_text("".join(DOCUMENTS), encoding="utf-8")
    for name, arguments in {
        "a.csv": "a.csv --name=rows",
        "a.jsonl.gz": "good.txt a.jsonl.gz --name=rows --val_fraction=0.25",
        "a.parquet": "good.txt --val=a.parquet --name=rows",
        "saved": "saved --name=rows --tokenizer=bpe",
    }.items():
        FORMS[name](name)
        error = refused(repo, f"data/text/prepare.py {arguments}", capsys)
        command = error.partition("tables and compressed files are read by python ")[2]
        repo(shlex.split(command))
        meta = load_dataset("data/rows").meta
        assert meta["source"] == name and meta["tokenizer"]["kind"] == ("bpe" if "bpe" in arguments else "char")


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


def test_another_dataset_does_not_replace_openwebtext(repo, capsys):
    ROWS.to_csv("a.csv")
    before = contents(Path("data/openwebtext"))
    error = refused(repo, "data/openwebtext/prepare.py --dataset=a.csv", capsys)
    assert "dataset = 'a.csv': choose a --name for it" in error and contents(Path("data/openwebtext")) == before


@pytest.mark.parametrize("arguments, named", [
    ("a.csv --field=body", "a.csv: no text in field 'body'; fields with text: text"),
    ("a.csv --field=id", "a.csv: no text in field 'id'; fields with text: text"),
    ("broken.csv", "broken.csv: cannot be read: ParserError: .*Expected 2 fields in line 3, saw 4"),
    ("val_only", "val_only: cannot be read: .*validation"),
    ("missing", "missing: cannot be read: ConnectionError: .*missing"),
])  # fmt: skip
@pytest.mark.parametrize("limit", ["", " --limit=1"])
def test_bad_datasets(repo, capsys, arguments, named, limit):
    ROWS.to_csv("a.csv")
    Path("broken.csv").write_text('id,text\n1,"one"\n2,"two",three,four\n')
    ROWS.to_parquet("val_only/validation.parquet")
    error = refused(repo, f"{READ} --dataset={arguments}{limit}", capsys)
    assert re.match(f"prepare.py: error: {named}", error), error


def test_without_the_package_datasets(repo, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "not installed: pip install datasets" in refused(repo, READ, capsys)


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
