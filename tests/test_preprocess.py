"""From texts to data folders: data/prepare.py and the scripts."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import data.prepare
import data.shakespeare_char.prepare as shakespeare
from config.runtime.program import UserError, atomic_write, sha256
from conftest import TINY, contents, refused
from data.dataset import load_dataset
from data.prepare import ensure_prepared, prepare
from data.shakespeare_char.prepare import tiny_shakespeare
from data.text.prepare import OTHERS, read_documents, text_files

TEXT = "".join(f"{i} green bottles, hanging on the wall; if {i} fell: 'twas Ünglück 瓶子!\n" for i in range(60))


@pytest.fixture
def folder(tmp_path):
    prepare(tmp_path / "words", TEXT, "bottles")
    return tmp_path / "words"


def test_large_vocabularies_take_four_bytes(tmp_path):
    text = "".join(map(chr, range(0x10000, 0x10000 + 66_000)))
    prepare(tmp_path, text, "everything")
    loaded = load_dataset(tmp_path)
    assert loaded.meta["dtype"] == "uint32" and loaded.splits["val"][-1] == 65_999


@pytest.mark.parametrize("text, options, message", [
    ("", {}, "too short"),
    (TEXT, {"val_fraction": float("nan")}, "val_fraction=nan"),
    (TEXT, {"val_fraction": 1e-9}, "val part has fewer than two tokens"),
    (TEXT, {"val_fraction": 0.9999}, "train part has fewer than two tokens"),
    (TEXT, {"tokenizer": "words"}, "'words'"),
    (TEXT, {"tokenizer": "bpe", "vocab_size": 255}, "vocab_size=255"),
    (TEXT, {"tokenizer": "gpt2", "vocab_size": 300}, "vocab_size=300 works only with tokenizer 'bpe', not with 'gpt2'"),
    (TEXT + "\udc80", {}, "surrogates not allowed"),
])  # fmt: skip
def test_bad_input_changes_nothing(folder, text, options, message):
    before = contents(folder)
    with pytest.raises(ValueError, match=message) as error:
        prepare(folder, text, "bad", **options)
    assert "\n" not in str(error.value)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["meta.json", "train.bin", "val.bin"])
def test_on_a_full_disk_what_was_there_stays(folder, monkeypatch, name):
    def full_disk(path):
        if path.name == name:
            raise OSError(28, "No space left on device", str(path))
        return atomic_write(path)

    before = contents(folder)
    monkeypatch.setattr(data.prepare, "atomic_write", full_disk)
    with pytest.raises(UserError):
        prepare(folder, TEXT, "bottles", tokenizer="bpe", vocab_size=300)
    assert contents(folder) == before


@pytest.mark.parametrize("name", ["words", "new"])
def test_of_two_preparations_at_once_the_second_ends(folder, monkeypatch, name):
    """... and the first one's data are whole, in a folder that holds data and in a new one."""
    target, encode_all = folder.with_name(name), data.prepare.encode_all

    def encode_beside_another(coder, parts):
        monkeypatch.setattr(data.prepare, "encode_all", encode_all)
        with pytest.raises(UserError, match=f"{target}: another program is preparing this dataset: wait until"):
            prepare(target, TEXT.upper(), "the second")
        yield from encode_all(coder, parts)

    monkeypatch.setattr(data.prepare, "encode_all", encode_beside_another)
    prepare(target, TEXT, "the first")
    assert load_dataset(target).meta["source"] == "the first"
    assert sorted(path.name for path in target.iterdir()) == ["meta.json", "train.bin", "val.bin"]
    prepare(target, TEXT, "the third")


def test_shakespeare_is_downloaded_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setattr(shakespeare, "download", lambda url: TEXT.encode())
    monkeypatch.setattr(shakespeare, "SHAKESPEARE_SHA256", sha256(TEXT.encode()))
    assert tiny_shakespeare(tmp_path) == (TEXT, "Tiny Shakespeare")
    monkeypatch.setattr(shakespeare, "download", None)
    assert tiny_shakespeare(tmp_path) == (TEXT, "Tiny Shakespeare")


@pytest.mark.parametrize("here, there", [("bpe", "char"), ("char", "bpe")])
def test_shakespeare_is_copied_from_next_door(tmp_path, monkeypatch, here, there):
    """... but no other text is."""
    here, there = tmp_path / f"shakespeare_{here}", tmp_path / f"shakespeare_{there}"
    monkeypatch.setattr(shakespeare, "download", lambda url: b"of a captive portal")
    monkeypatch.setattr(shakespeare, "SHAKESPEARE_SHA256", sha256(TEXT.encode()))
    for folder in (here, there):
        folder.mkdir()
    (there / "input.txt").write_text("somebody's own")
    assert tiny_shakespeare(here)[1].startswith("NOT Tiny Shakespeare")
    (there / "input.txt").write_bytes(TEXT.encode())
    (tmp_path / "shakespeare_0" / "input.txt").mkdir(parents=True)  # cannot be read
    assert tiny_shakespeare(here) == (TEXT, "Tiny Shakespeare")
    assert (here / "input.txt").read_bytes() == TEXT.encode()


@pytest.mark.parametrize("answer", [OSError("no network"), b"of a captive portal"])
def test_shakespeare_offline_is_loudly_something_else(tmp_path, monkeypatch, capsys, answer):
    def download(url):
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(shakespeare, "download", download)
    text, source = tiny_shakespeare(tmp_path)
    assert len(text) > 100_000 and source.startswith("NOT Tiny Shakespeare but ")
    assert source in capsys.readouterr().out
    assert contents(tmp_path) == {}


def test_own_input_is_taken_as_it_is(tmp_path):
    (tmp_path / "input.txt").write_bytes("\ufeffeins\r\nzwö\r".encode())
    assert tiny_shakespeare(tmp_path) == ("eins\r\nzwö\r", f"your own {tmp_path.name}/input.txt")


def test_text_script_takes_files_and_folders(repo):
    for name in ("b.md", "sub/a.txt", "sub/c.dat"):
        Path("texts", name).parent.mkdir(parents=True, exist_ok=True)
        Path("texts", name).write_text(f"{name}: {TEXT}", encoding="utf-8")
    command = "data/text/prepare.py texts/sub/a.txt texts --name=plays --tokenizer=bpe --vocab_size=280"
    assert "to train on it: python train.py --dataset=plays\n" in repo(command)
    loaded = load_dataset("data/plays")
    assert loaded.meta["source"] == "a.txt and 1 more" and loaded.meta["vocab_size"] == 280
    text = "".join(loaded.tokenizer.decode(loaded.splits[split].tolist()) for split in ("train", "val"))
    assert text == f"sub/a.txt: {TEXT}\nb.md: {TEXT}"  # each file once


def test_folders_are_read_through_links_but_without_hidden_files(tmp_path):
    for name in ("texts/b.TXT", "texts/c.png", "texts/._b.txt", "texts/.checkpoints/b.txt", "elsewhere/c.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "texts" / "a").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "texts")
    assert text_files(tmp_path / "link") == [tmp_path / "link" / name for name in ("a/c.md", "b.TXT")]


@pytest.mark.parametrize("suffix", [*OTHERS, ".CSV"])
def test_tables_and_compressed_files_are_refused(tmp_path, capsys, suffix):
    """... also as all that a folder holds. In a folder of texts they are left out, and that is said."""
    (tmp_path / f"a{suffix}").touch()
    for path in (tmp_path / f"a{suffix}", tmp_path):
        with pytest.raises(UserError, match=f"{path}: .*tables and compressed files are read by"):
            text_files(path)
    (tmp_path / "b.txt").touch()
    assert text_files(tmp_path) == [tmp_path / "b.txt"]
    assert capsys.readouterr().out.startswith(f"NOTE    {tmp_path}: left out a{suffix}: a folder stands for its .txt,")


def test_the_files_that_a_folder_does_not_stand_for_are_named(tmp_path, capsys):
    for name in ("README.txt", "ca01", "more/ca02", ".hidden"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert text_files(tmp_path) == [tmp_path / "README.txt"]
    assert f"NOTE    {tmp_path}: left out ca01 and 1 more: " in capsys.readouterr().out


def test_a_text_of_its_own_to_validate_on(repo):
    """... also if it is in the folder to train on, and with any tokenizer."""
    Path("texts/held").mkdir(parents=True)
    for name in ("texts/a.txt", "texts/b.txt", "texts/held/val.txt"):
        Path(name).write_text(f"{name}: {TEXT}", encoding="utf-8")
    for val in ("texts/held/val.txt", "texts/held"):
        for tokenizer in ("char", "bpe"):
            repo(f"data/text/prepare.py texts --val={val} --tokenizer={tokenizer}")
            loaded = load_dataset("data/text")
            train, held = (loaded.tokenizer.decode(loaded.splits[split].tolist()) for split in ("train", "val"))
            assert train == f"texts/a.txt: {TEXT}\ntexts/b.txt: {TEXT}" and held == f"\ntexts/held/val.txt: {TEXT}"
            assert loaded.meta["source"] == f"a.txt and 1 more, validated on {val}"


def test_standard_input(repo):
    command = [sys.executable, "data/text/prepare.py", "-", "--name=piped"]
    subprocess.run(command, input=TEXT.encode(), check=True, stdout=subprocess.DEVNULL)
    loaded = load_dataset("data/piped")
    assert sum(loaded.meta["bytes"].values()) == len(TEXT.encode())


@pytest.mark.parametrize("value", ["5", "0", "false", "[]"])
def test_of_json_lines_only_null_and_empty_texts_are_left_out(tmp_path, value):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": null}\n{"text": ""}\n\n{"text": "good"}\n')
    assert read_documents(path) == ["good"]
    path.write_text(f'{{"text": "good"}}\n{{"text": {value}}}\n')
    with pytest.raises(UserError, match="a.jsonl: line 2 is not JSON with a text in field 'text'"):
        read_documents(path)


@pytest.mark.parametrize("name", ["a.ndjson", "a.JSONLINES", "- --field=text", "<(cat a.ndjson) --field=text"])
def test_json_lines_by_other_names(repo, name):
    """... and from standard input or a pipe, which have no name: there --field tells."""
    lines = "".join(f"{json.dumps({'text': line})}\n" for line in TEXT.splitlines())
    for path in ("a.ndjson", "a.JSONLINES"):
        Path(path).write_text(lines)
    command = f"{sys.executable} data/text/prepare.py {name} --name=chat < a.ndjson"
    subprocess.run(["bash", "-c", command], check=True, stdout=subprocess.DEVNULL)
    loaded = load_dataset("data/chat")
    assert loaded.tokenizer.decode(loaded.splits["train"]) == TEXT[: len(loaded.splits["train"])]


def test_a_text_is_prepared_without_pytorch(repo):
    """... which takes seconds to import."""
    Path("torch.py").write_text("1 / 0")
    subprocess.run([sys.executable, "data/shakespeare_bpe/prepare.py"], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("command, named", [
    ("text", "nothing to train on: give files or folders"),
    ("text good.txt missing.txt", "missing.txt: No such file"),
    ("text latin.txt", "latin.txt: not UTF-8 text at byte 3"),
    ("text good.txt bad.jsonl", "bad.jsonl: line 3 is not JSON with a text in field 'text'"),
    ("text bad.jsonl --field=title", "bad.jsonl: line 1 is not JSON with a text in field 'title'"),
    ("text cut.jsonl", "cut.jsonl: line 1 is not JSON with a text in field 'text'"),
    ("text good.txt --field=text", "field = 'text' has no effect: it needs a .jsonl file or standard input"),
    ("text lines.jsonl --separator=x", "separator = 'x' has no effect on .jsonl files"),
    ("text config/runtime", "no .txt, .md or .jsonl files below this folder; other text files are read if named one"),
    ("text good.txt --name=..", "name = '..' is invalid: use letters, digits"),
    ("text good.txt --name=", "name = '' is invalid: use letters, digits"),
    ("text good.txt --name=shakespeare_char", "data/shakespeare_char has its own prepare.py"),
    ("openwebtext --name=text", "data/text has its own prepare.py"),
    ("openwebtext --dataset=a.csv", "dataset = 'a.csv': choose a --name for it"),
    ("openwebtext --limit=-1", "limit = -1.0 is invalid: it must be at least 0"),
    ("openwebtext --dataset= --name=rows", "dataset = '' is invalid: it must be a dataset on the hub, a file or a f"),
    ("text  good.txt", "'' is invalid: it must be a file or a folder"),  # an unset variable in quotes
    ("text good.txt --val=good.txt", "nothing to train on"),
    ("text good.txt --val=empty.txt", "val part has fewer than two tokens"),
])  # fmt: skip
def test_script_errors_are_one_line_and_change_nothing(repo, capsys, command, named):
    Path("good.txt").write_text(TEXT, encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("bad.jsonl").write_text('{"text": "good"}\n\n{"text": 3}')
    Path("cut.jsonl").write_text('{"text": "good')
    Path("empty.txt").touch()
    Path("lines.jsonl").write_text(json.dumps({"text": TEXT}))
    name, _, arguments = command.partition(" ")
    error = refused(repo, f"data/{name}/prepare.py {arguments}".strip(), capsys)
    assert error.startswith("prepare.py: error: ") and re.search(named, error)


def test_a_changed_input_is_an_error_that_gives_the_command(repo, capsys):
    repo("data/shakespeare_bpe/prepare.py --vocab_size=300")
    load_dataset("data/shakespeare_bpe")
    Path("data/shakespeare_bpe/input.txt").write_text(TEXT, encoding="utf-8")
    error = refused(repo, f"train.py {TINY} --dataset=shakespeare_bpe", capsys)
    cure = f"run python {repo.folder}/data/shakespeare_bpe/prepare.py, with the options of before"
    assert error.endswith(f"input.txt has changed since it was prepared: {cure}\n")
    repo("data/shakespeare_bpe/prepare.py --vocab_size=300")
    assert load_dataset("data/shakespeare_bpe").meta["vocab_size"] == 300


def test_data_may_be_anywhere(repo):
    Path("my.txt").write_text(TEXT, encoding="utf-8")
    assert "--dataset=./plays" in repo("data/text/prepare.py my.txt --name=./plays")
    assert sorted(path.name for path in Path("plays").iterdir()) == ["meta.json", "train.bin", "val.bin"]
    repo(f"train.py {TINY} --dataset=./plays")
    assert list(Path("out").glob("plays-*/ckpt.pt"))


@pytest.mark.parametrize("name", ["", "shakespeare", "tokenizer.py", "./data", "elsewhere/plays"])
def test_what_is_no_dataset_is_refused(repo, name):
    with pytest.raises(UserError, match=f"dataset = '{name}' is invalid: it must be one of openwebtext, .*, or your"):
        ensure_prepared(name)


def test_the_dataset_of_your_own_text_is_offered_once_it_is_prepared(repo, capsys):
    train = f"train.py {TINY} --dataset"
    assert "openwebtext, shakespeare_bpe, shakespeare_char, or your own" in refused(repo, f"{train}=foo", capsys)
    cure = "dataset = 'text' is not prepared yet: run python data/text/prepare.py my.txt\n"
    for path in ("text", "./data/text", f"{repo.folder}/data/text"):
        assert refused(repo, f"{train}={path}", capsys) == f"train.py: error: {cure}"
    prepare("data/text", TEXT, "my.txt")
    assert ", shakespeare_char, text, or your own" in refused(repo, f"{train}=foo", capsys)
    assert ensure_prepared("text") == repo.folder / "data/text"
