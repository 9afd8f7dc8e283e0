"""Documents: split, separated, encoded in threads, and read by `datasets`: data/prepare.py."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import datasets
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from conftest import hear_signals, refused
from data import prepare as preparing
from data.dataset import load_dataset
from data.prepare import prepare, split_end
from data.tokenizer import END, SPLIT, BPETokenizer

DOCUMENTS = ["One line.", "Two\nlines of text, a little longer\n", "Ünglück und 瓶子", "  spaces  ", "the end"] * 5
GPT2 = BPETokenizer({bytes([i]): i for i in range(256)}, SPLIT, {END: 256})


@pytest.fixture(autouse=True)
def small_tokenizer(monkeypatch, tmp_path):
    monkeypatch.setattr(preparing, "gpt2_tokenizer", lambda: GPT2)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)


@given(st.lists(st.text(alphabet="ab \n", max_size=300)), st.floats(0.01, 0.99))
@example(["ab", "abab"], 0.5)  # cut inside a document
def test_the_last_characters_validate(documents, val_fraction):
    train, val = split_end(documents, val_fraction)
    assert "".join(train + val) == "".join(documents) and len(train + val) <= len(documents) + 1
    assert len("".join(train)) == int(len("".join(documents)) * (1 - val_fraction))


@pytest.mark.parametrize("tokenizer", ["char", "bpe", "gpt2"])
def test_between_documents_stands_a_token_that_counts_as_one_byte(tmp_path, tokenizer):
    """... so that bits per byte are comparable: a newline, or the token that begins a document."""
    prepare(tmp_path, [None, *DOCUMENTS, ""], DOCUMENTS[:2], "test", tokenizer)
    loaded = load_dataset(tmp_path)
    for split, documents in (("train", DOCUMENTS), ("val", DOCUMENTS[:2])):
        ids = loaded.splits[split].tolist()
        assert loaded.tokenizer.decode(ids) == (END if tokenizer == "gpt2" else "\n").join(documents)
        assert loaded.meta["bytes"][split] == len("\n".join(documents).encode())
        assert tokenizer != "gpt2" or ids.count(256) == len(documents) - 1


@pytest.mark.parametrize("documents", [1, 10, 1000])
def test_byte_pairs_are_learned_from_all_over_what_is_trained_on(tmp_path, monkeypatch, capsys, documents):
    monkeypatch.setattr(preparing, "SAMPLE", 30_000)
    text = "".join(letter * 200_000 for letter in "abcdefghij")
    size = len(text) // documents
    texts = [text[start : start + size] for start in range(0, len(text), size)]
    prepare(tmp_path, *split_end(texts, 0.1), "test", "bpe", 400)
    found = b"".join(load_dataset(tmp_path).tokenizer.ranks).decode("latin-1")
    assert all(letter * 2 in found for letter in "abcdefghi") and "jj" not in found
    learned_from = int(capsys.readouterr().out.split("from ")[1].split(" ")[0].replace(",", ""))
    assert 20_000 < learned_from < 50_000


# -- what the package `datasets` reads -----------------------------------------------------------------------

ROWS = datasets.Dataset.from_dict({"id": [None, *range(len(DOCUMENTS))], "text": ["", *DOCUMENTS]})
FORMS = {"a[1].csv": ROWS.to_csv, "a.parquet": ROWS.to_parquet, "a.jsonl.gz": ROWS.to_json}
READ = "data/openwebtext/prepare.py --name=rows --val_fraction=0.25"


@pytest.mark.parametrize("limit", ["", " --limit=1"])
@pytest.mark.parametrize("name", FORMS)
def test_tables(repo, name, limit):
    Path("a1.csv").write_text("text\nwhat a[1].csv is as a pattern\n")
    FORMS[name](name)
    repo(f"{READ} --dataset={name}{limit} --tokenizer=gpt2")
    loaded = load_dataset("data/rows")
    train, val = (loaded.tokenizer.decode(ids).split(END) for ids in loaded.splits.values())
    assert sorted(train + val) == sorted(DOCUMENTS) and len(train) > len(val) > 5
    assert val != DOCUMENTS[-len(val) :]  # but drawn at random


@pytest.mark.parametrize("limit", ["", " --limit=1"])
def test_words_for_missing_values_are_texts(repo, limit):
    words = ["null", "NA", "nan", "N/A", "None", "007", "text"]
    Path("a.csv").write_text("id,text\n" + "".join(f"{i if i % 2 else ''},{word}\n" for i, word in enumerate(words)))
    repo(f"{READ} --dataset=a.csv{limit} --tokenizer=char")
    loaded = load_dataset("data/rows")
    assert {word for ids in loaded.splits.values() for word in loaded.tokenizer.decode(ids).split("\n")} == {*words}


def test_a_limit_streams_that_much_and_no_more(repo, tmp_path):
    rows = datasets.Dataset.from_dict({"text": [None, *(f"{i:04}" + "x" * 96 for i in range(100))]})
    rows.to_parquet("dataset/train-0.parquet")
    Path("dataset/train-1.parquet").write_text("not read")
    repo(f"{READ} --dataset=dataset --limit=3e-6 --tokenizer=char")
    meta = load_dataset("data/rows").meta
    assert meta["source"] == "3e-06 GB of dataset" and 3000 < sum(meta["bytes"].values()) < 64 * 101
    assert not list(tmp_path.rglob("*.arrow"))


@pytest.mark.parametrize("limit", ["", " --limit=1"])
@pytest.mark.parametrize("dataset", ["a.csv --field=body", "a.parquet --field=body", "broken.csv", "nowhere"])
def test_bad_datasets(repo, capsys, dataset, limit):
    ROWS.to_csv("a.csv")
    ROWS.to_parquet("a.parquet")
    Path("broken.csv").write_text('id,text\n1,"one"\n2,"two",three,four\n')
    error = refused(repo, f"{READ} --dataset={dataset}{limit}", capsys)
    assert dataset.split(" ")[0] in error and "body" in error or "field" not in dataset


def test_without_datasets_the_error_says_what_to_install(repo, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert "pip install datasets" in refused(repo, READ, capsys)


# -- programs that end before their time ---------------------------------------------------------------------

PLAYS = Path("data/plays")


@pytest.fixture
def writing(repo, tmp_path):
    """Return a process that has begun to write PLAYS, which hold other data."""
    prepare(PLAYS, DOCUMENTS, DOCUMENTS, "test")
    (tmp_path / "text.txt").write_text("|".join(f"{i} green bottles, hanging on the wall" for i in range(50_000)))
    command = [sys.executable, "data/text/prepare.py", tmp_path / "text.txt", "--name=plays", "--separator=|"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, preexec_fn=hear_signals)
    unfinished = PLAYS / "train.bin.tmp"
    while not (unfinished.exists() and unfinished.stat().st_size):
        assert process.poll() is None
        time.sleep(0.001)
    yield process
    process.kill()


def whole(source):
    names = {path.name for path in PLAYS.iterdir()}
    return load_dataset(PLAYS).meta["source"] == source and names == {"meta.json", "train.bin", "val.bin"}


def test_an_interrupted_program_ends_and_leaves_what_was_there(writing):
    writing.send_signal(signal.SIGINT)
    assert writing.communicate(timeout=120)[1] == b"" and writing.returncode == 130
    assert whole("test")


def test_a_killed_program_leaves_what_was_there_and_is_no_obstacle(writing):
    writing.kill()
    writing.wait()
    assert load_dataset(PLAYS).meta["source"] == "test"
    prepare(PLAYS, DOCUMENTS, DOCUMENTS, "the next")
    assert whole("the next")


def test_of_two_programs_at_once_the_second_waits_for_the_first(writing):
    prepare(PLAYS, DOCUMENTS, DOCUMENTS, "the second")
    assert writing.wait() == 0
    assert whole("the second")
