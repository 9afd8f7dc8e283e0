"""Large corpora: parts of texts, of all formats, that come to the same as the whole. data/corpus.py."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from itertools import count

import datasets
import numpy as np
import pytest
from hypothesis import given, strategies as st

import data.tokenizer
from data import BPETokenizer, corpus, file_lock, load_dataset, train_bpe
from data.console import UserError
from data.corpus import parts_of_dataset, parts_of_file, prepare_corpus, text_files
from data.preprocess import write_dataset
from data.tokenizer import END, SPLIT

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
def small_parts(monkeypatch, tmp_path):
    monkeypatch.setattr(corpus, "PART", 64)
    monkeypatch.setattr(corpus, "ROWS", 4)
    monkeypatch.setattr(data.tokenizer, "gpt2_tokenizer", lambda: GPT2)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def tokens_of(folder):
    loaded = load_dataset(folder)
    return np.concatenate([loaded.splits["train"], loaded.splits["val"]]).tolist(), loaded


def run(folder, paths, *how, workers=1, **options):
    parts = [part for path in paths for part in parts_of_file(path, **options)]
    prepare_corpus(folder, parts, "test", *how, workers=workers)
    assert sorted(path.name for path in folder.iterdir() if path.suffix not in (".json", ".tiktoken")) == ["train.bin", "val.bin"]
    return tokens_of(folder)


# -- cutting -------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(WORDS), st.sampled_from(GAPS)), min_size=60, max_size=120), st.sampled_from([OURS, GPT2]))
def test_parts_give_the_tokens_of_the_whole(tmp_path, words, tokenizer):
    text = "".join(word + gap for word, gap in words)
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    parts = parts_of_file(path)
    assert len(parts) > 2
    pieces = [piece for part in parts for _, piece in part.pieces()]
    assert [token for piece in pieces for token in tokenizer.encode(piece)] == tokenizer.encode(text)


@given(st.text(min_size=100, max_size=300))
def test_no_character_is_lost_wherever_a_text_is_cut(tmp_path, text):
    text = "a" + text  # no mark of an editor's in front
    path = tmp_path / "text.txt"
    path.write_bytes(text.encode())
    parts = parts_of_file(path)
    assert "".join(piece for part in parts for _, piece in part.pieces()) == text
    assert [begins for part in parts for begins, _ in part.pieces()] == [True] + [False] * (len(parts) - 1)


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
    parts = parts_of_dataset(str(tmp_path / "dataset"))
    assert [part.start for part in parts] == list(range(0, len(DOCUMENTS), 4))
    prepare_corpus(tmp_path / "data", parts, "test", workers=1)
    ids, loaded = tokens_of(tmp_path / "data")
    assert loaded.tokenizer.decode(ids) == "\n".join(DOCUMENTS[0::2] + DOCUMENTS[1::2])


def test_a_dataset_of_several_configurations(tmp_path):
    names = "---\nconfigs:\n" + "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in "ab") + "---\n"
    (tmp_path / "README.md").write_text(names)
    for name in "ab":
        write(tmp_path / f"{name}.jsonl", [f"{name}, {text}" for text in DOCUMENTS])
    for name in "ab":
        (part, *_) = parts_of_dataset(f"{tmp_path}:{name}")
        assert [text for _, text in part.pieces()] == [f"{name}, {text}" for text in DOCUMENTS][: part.stop]
    with pytest.raises(UserError, match=r"cannot be loaded: .*config.* \['a', 'b'\]"):
        parts_of_dataset(str(tmp_path))


def test_openwebtext_script(repo, tmp_path):
    (tmp_path / "dataset").mkdir()
    write(tmp_path / "dataset" / "train.parquet", DOCUMENTS * 4)
    options = [f"--dataset={tmp_path / 'dataset'}", "--tokenizer=char", "--val_fraction=0.25", "--workers=1"]
    repo(["data/openwebtext/prepare.py", *options])
    ids, loaded = tokens_of("data/openwebtext")
    assert loaded.tokenizer.decode(ids) == "\n".join(DOCUMENTS * 4)
    assert len(loaded.splits["val"]) / len(ids) == pytest.approx(0.25, abs=0.01)


def test_splits_and_sizes(tmp_path):
    text = "Ünglück, 瓶子 und mehr davon. " * 60
    (tmp_path / "text.txt").write_bytes(text.encode())
    for tokenizer in ("char", "bpe", "gpt2"):
        ids, loaded = run(tmp_path / "data", [tmp_path / "text.txt"], tokenizer, None, 0.3)
        assert loaded.tokenizer.decode(ids).removeprefix(END) == text
        assert len(loaded.splits["train"]) == int(0.7 * len(ids))
        for split, tokens in loaded.splits.items():
            part = loaded.tokenizer.decode_bytes([i for i in tokens if i not in loaded.tokenizer.document_start])
            assert loaded.meta["bytes"][split] == len(part)


def test_a_file_may_be_given_twice(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(f"{name} text, {name * 70}")
    ids, loaded = run(tmp_path / "data", [tmp_path / name for name in "baaba"])
    assert loaded.tokenizer.decode(ids) == "\n".join(f"{name} text, {name * 70}" for name in "baaba")


def test_byte_pairs_are_learned_from_all_over_what_is_trained_on(tmp_path, monkeypatch):
    files = [tmp_path / f"{i}.txt" for i in range(10)]
    for i, path in enumerate(files):
        path.write_text(f"{i} {chr(97 + i) * 20} " * 6000)
    monkeypatch.setattr(corpus, "PART", 10**6)
    parts = [part for path in files for part in parts_of_file(path)]
    assert corpus.sample_of(parts) == "\n".join(path.read_text() for path in files)
    monkeypatch.setattr(corpus, "SAMPLE", 200_000)
    sample = corpus.sample_of(parts)
    assert len(sample) == 200_000 and len(set(sample) & set("abcdefghij")) == 4
    assert sorted(set(sample) & set("abcdefghij")) == [letter for letter in dict.fromkeys(sample) if letter.isalpha()]
    monkeypatch.undo()
    _, loaded = run(tmp_path / "data", files, "bpe", 280)
    assert not any(b"jj" in token for token in loaded.tokenizer.ranks)


# -- processes and interruptions -----------------------------------------------------------------------------


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def files(tmp_path):
    paths = [write(tmp_path / "a.jsonl", DOCUMENTS), tmp_path / "b.txt"]
    paths[1].write_text("the quick brown fox " * 30)
    return paths


def test_processes_do_what_one_does(tmp_path, files):
    run(tmp_path / "one", files, "gpt2")
    run(tmp_path / "two", files, "gpt2", workers=2)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_interrupted_run_goes_on(tmp_path, files, monkeypatch, capsys):
    run(tmp_path / "whole", files, "bpe")
    tokenize, calls = corpus.tokenize, []

    def interrupted(*job):
        calls.append(job)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return tokenize(*job)

    monkeypatch.setattr(corpus, "tokenize", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", files, "bpe")
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["parts"]
    (tmp_path / "data" / "parts" / "0.bin.1234.tmp").write_text("what a killed process leaves")
    capsys.readouterr()
    run(tmp_path / "data", files, "bpe")
    count = len(parts_of_file(files[0]) + parts_of_file(files[1]))
    assert f"5 of {count} parts are there already" in capsys.readouterr().out
    assert len(calls) == count + 1
    assert contents(tmp_path / "whole") == contents(tmp_path / "data")


def test_a_run_interrupted_at_the_very_end_goes_on(tmp_path, files, monkeypatch, capsys):
    def interrupted(*how):
        raise KeyboardInterrupt

    monkeypatch.setattr(corpus, "write_dataset", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", files, "gpt2")
    monkeypatch.setattr(corpus, "write_dataset", write_dataset)
    run(tmp_path / "data", files, "gpt2", workers=2)
    count = len(parts_of_file(files[0]) + parts_of_file(files[1]))
    assert f"{count} of {count} parts are there already" in capsys.readouterr().out


def test_parts_of_other_content_are_not_taken(tmp_path, files, monkeypatch):
    tokenize = corpus.tokenize

    def until_the_last(tokenizer, part, *job):
        if part.path == str(files[1]):
            raise KeyboardInterrupt
        return tokenize(tokenizer, part, *job)

    monkeypatch.setattr(corpus, "tokenize", until_the_last)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "data", files, "gpt2")
    monkeypatch.setattr(corpus, "tokenize", tokenize)
    write(files[0], [document.upper() for document in DOCUMENTS])
    ids, loaded = run(tmp_path / "data", files, "gpt2")
    assert DOCUMENTS[0].upper() in loaded.tokenizer.decode(ids) and DOCUMENTS[0] not in loaded.tokenizer.decode(ids)


def test_a_killed_run_goes_on(repo, tmp_path, monkeypatch):
    text, kept = tmp_path / "text.txt", repo.folder / "data" / "text" / "parts"
    text.write_text("".join(f"{i} green bottles, hanging on the wall\n" for i in range(240_000)))  # three parts
    command = [sys.executable, "data/text/prepare.py", text, "--tokenizer=bpe", "--vocab_size=260", "--workers=2"]
    process = subprocess.Popen(command)
    while not list(kept.glob("*.json")):
        assert process.poll() is None
        time.sleep(0.01)
    process.kill()
    process.wait()
    assert not (kept.parent / "meta.json").exists()
    result = subprocess.run([*command, "--workers=1"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "of 3 parts are there already" in result.stdout
    ids, loaded = tokens_of(kept.parent)
    assert loaded.tokenizer.decode(ids) == text.read_text()


def end_itself(*job):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_is_ended_says_so():
    with pytest.raises(UserError, match="a process has been ended.*fewer --workers"):
        list(corpus.parallel_map(end_itself, [(1,), (2,)], workers=2))


def test_two_at_once_are_refused(tmp_path, files):
    (tmp_path / "data" / "parts").mkdir(parents=True)
    with open(tmp_path / "data" / "parts" / "lock", "w") as file:
        file_lock(file)
        with pytest.raises(UserError, match="another prepare.py is at work there"):
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
    ("a.txt.gz", gzip.compress(b"plain text"), "a.txt.gz: only files of rows, such as .jsonl.gz, can be read compressed"),
    ("a.parquet", b"plain text", "a.parquet: cannot be loaded"),
    ("a.csv", b"id,title\n1,good", "a.csv: no text in field 'text'; --field may be: title"),
    ("a.txt", b"good text and then " + b"more of it " * 20 + b"\xff bad", "a.txt: not UTF-8 text at byte 239"),
], ids=count())  # fmt: skip
def test_bad_files(tmp_path, name, content, named):
    path = tmp_path / name
    path.write_bytes(content)
    for tokenizer in ("char", "bpe"):
        with pytest.raises(UserError) as error:
            run(tmp_path / "data", [path], tokenizer)
        assert named in str(error.value) and "\n" not in str(error.value)
        assert not (tmp_path / "data" / "train.bin").exists()


def test_a_dataset_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="missing: cannot be loaded"):
        parts_of_dataset(str(tmp_path / "missing"))


def test_what_needs_datasets_says_so(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", DOCUMENTS)
    monkeypatch.setitem(sys.modules, "datasets", None)
    for parts_of, name in ((parts_of_file, path), (parts_of_dataset, "some/where")):
        with pytest.raises(UserError, match=f"{name} is read by a package that is not here: pip install datasets"):
            parts_of(name)


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


def test_sizes_are_never_empty(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n' * 10 + '{"text": "ab"}\n')
    _, loaded = run(tmp_path / "data", [tmp_path / "a.jsonl"], "gpt2", None, 0.5)
    assert min(loaded.meta["bytes"].values()) == 1
