"""From texts to data folders: data/prepare.py and the scripts."""

import json
import resource
import shutil
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from unittest.mock import Mock

import pytest

import data.shakespeare_char.prepare as shakespeare
from config import UserError
from conftest import BOTTLES, ROOT, TINY, contents, prepare, refused
from data.dataset import load_dataset
from data.prepare import ensure_prepared, sha256

INPUTS = (ROOT / "data").glob("shakespeare_*/input.txt")
GENUINE = [path for path in INPUTS if sha256(path.read_bytes()) == shakespeare.SHA256]


def texts_of(folder):
    """Return the text to train on and the text to validate on."""
    loaded = load_dataset(folder)
    return [loaded.tokenizer.decode(loaded.splits[split].tolist()) for split in ("train", "val")]


@pytest.mark.parametrize("size", [100, 3000])  # too small for meta.json and for train.bin
def test_on_a_full_disk_what_was_there_stays(repo, size):
    """... here where no file may grow beyond `size`, which shows when the last bytes are written."""
    prepare("data/plays", BOTTLES, "bottles")
    Path("my.txt").write_text(BOTTLES[:2000], encoding="utf-8")
    before = contents(repo.folder)
    command = [sys.executable, "-B", "data/text/prepare.py", "my.txt", "--name=plays"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    end = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert end.returncode == 2 and end.stderr.count("\n") == 1 and "data/plays/" in end.stderr
    assert contents(repo.folder) == before


# -- Tiny Shakespeare ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("own, next_door, network, source", [
    ("my own\r\n", BOTTLES, BOTTLES, "your own shakespeare_bpe/input.txt"),
    (BOTTLES, None, None, "Tiny Shakespeare"),
    (None, BOTTLES, None, "Tiny Shakespeare"),
    (None, "somebody's own", BOTTLES, "Tiny Shakespeare"),
    (None, "somebody's own", None, "NOT Tiny Shakespeare"),  # there is no network
    (None, None, "of a captive portal", "NOT Tiny Shakespeare"),
])  # fmt: skip
def test_where_tiny_shakespeare_comes_from(tmp_path, monkeypatch, capsys, own, next_door, network, source):
    """input.txt, else the genuine text next door, else the download, else text of Python, with a note that says so."""
    answer = OSError("no network") if network is None else BytesIO(network.encode())
    monkeypatch.setattr(urllib.request, "urlopen", Mock(side_effect=[answer]))
    monkeypatch.setattr(shakespeare, "SHA256", sha256(BOTTLES.encode()))
    for name, text in (("shakespeare_bpe", own), ("shakespeare_char", next_door)):
        (tmp_path / name).mkdir()
        if text is not None:
            (tmp_path / name / "input.txt").write_bytes(text.encode())
    path = tmp_path / "shakespeare_bpe" / "input.txt"
    folder, train, val, found = shakespeare.tiny_shakespeare(path.with_name("prepare.py"))
    text = "".join(train + val)
    assert folder == path.parent and found.startswith(source)
    if source.startswith("NOT"):
        assert len(text) > 100_000 and found in capsys.readouterr().out and not path.exists()
    else:
        assert text == (own or BOTTLES) and path.read_bytes().decode() == text


@pytest.mark.skipif(not GENUINE, reason="Tiny Shakespeare is in neither of its folders")
@pytest.mark.parametrize("name, train, val", [
    ("shakespeare_char", "6ec30560", "d37d30cc"),
    ("shakespeare_bpe", "983ee60c", "06506c49"),
])  # fmt: skip
def test_tiny_shakespeare_has_the_same_tokens_for_ever(repo, name, train, val):
    shutil.copy(GENUINE[0], f"data/{name}/input.txt")
    repo(f"data/{name}/prepare.py")
    meta = load_dataset(f"data/{name}").meta
    assert [meta["sha256"][split][:8] for split in ("train", "val")] == [train, val]


def test_a_changed_input_is_an_error(repo, capsys):
    repo("data/shakespeare_bpe/prepare.py --vocab_size=300")
    load_dataset("data/shakespeare_bpe")
    Path("data/shakespeare_bpe/input.txt").write_text(BOTTLES, encoding="utf-8")
    assert "shakespeare_bpe/input.txt" in refused(repo, f"train.py {TINY} --dataset=shakespeare_bpe", capsys)
    repo("data/shakespeare_bpe/prepare.py --vocab_size=300")
    assert load_dataset("data/shakespeare_bpe").meta["vocab_size"] == 300


# -- data/text/prepare.py ------------------------------------------------------------------------------------


def test_files_and_folders_are_read_each_once(repo):
    """... through links and without hidden files. What is left out is said."""
    for name in ("texts/b.MD", "texts/sub/a.txt", "texts/sub/c[1].dat", "texts/.git/d.txt", "elsewhere/e.txt"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"{name}: {BOTTLES}", encoding="utf-8")
    Path("texts/link").symlink_to(Path("elsewhere").absolute())
    shown = repo("data/text/prepare.py texts/sub/a.txt texts elsewhere/e.txt --name=plays --tokenizer=bpe")
    assert "texts: left out 1 file" in shown and "python train.py --dataset=plays\n" in shown
    names = ("texts/sub/a.txt", "texts/b.MD", "elsewhere/e.txt")
    assert "".join(texts_of("data/plays")) == "\n".join(f"{name}: {BOTTLES}" for name in names)


@pytest.mark.parametrize("tokenizer", ["char", "bpe"])
@pytest.mark.parametrize("val", ["texts/held/val.txt", "texts/held"])
def test_a_text_of_its_own_to_validate_on(repo, val, tokenizer):
    """... also if it is in the folder to train on."""
    Path("texts/held").mkdir(parents=True)
    for name in ("texts/a.txt", "texts/b.txt", "texts/held/val.txt"):
        Path(name).write_text(f"{name}: {BOTTLES}", encoding="utf-8")
    repo(f"data/text/prepare.py texts --val={val} --tokenizer={tokenizer}")
    train = f"texts/a.txt: {BOTTLES}\ntexts/b.txt: {BOTTLES}"
    assert texts_of("data/text") == [train, f"texts/held/val.txt: {BOTTLES}"]


def test_lines_of_json_are_documents(repo):
    """... of which null and empty texts are left out; half a character becomes a question mark."""
    documents = [None, "one", "", "two\nlines", "\ud83d"] * 5
    lines = [json.dumps({"id": i, "body": document}) for i, document in enumerate(documents)]
    for name in ("a.jsonl", "val.jsonl"):
        Path(name).write_text("\n\n".join(lines))
    repo("data/text/prepare.py a.jsonl --field=body --val=val.jsonl")
    assert texts_of("data/text") == ["\n".join(["one", "two\nlines", "?"] * 5)] * 2


def test_a_separator_ends_documents_and_its_line(repo):
    for name in ("a.txt", "val.txt"):
        Path(name).write_bytes(b"<|endoftext|>\none\n<|endoftext|>\r\ntwo<|endoftext|>\n three\n<|endoftext|>")
    repo("data/text/prepare.py a.txt --separator=<|endoftext|> --val=val.txt")
    assert texts_of("data/text") == ["one\ntwo\n three"] * 2


def test_standard_input(repo):
    command = [sys.executable, "data/text/prepare.py", "-", "--name=piped"]
    subprocess.run(command, input=BOTTLES.encode(), check=True, stdout=subprocess.DEVNULL)
    assert "".join(texts_of("data/piped")) == BOTTLES


@pytest.mark.parametrize("command, named", [
    ("text good.txt missing.txt", "missing.txt"),
    ("text latin.txt", "latin.txt"),
    ("text good.txt --val good.txt", "--val=VALUE"),
    ("text good.txt --separator=|", "separator = '|'"),
    ("text good.txt bad.jsonl", "bad.jsonl: line 3"),
    ("text bad.jsonl --field=title", "bad.jsonl: line 1 is not JSON with a text in field 'title'"),
    ("text table.csv", "data/openwebtext/prepare.py --dataset=table.csv"),
    ("text good.txt --name=", "name = ''"),
    ("text good.txt --name=shakespeare_char", "name = 'shakespeare_char'"),
    ("text good.txt --val=good.txt", "my.txt"),
    ("text good.txt --val=empty.txt --name=new", "val"),
    ("text good.txt --val_fraction=0", "val_fraction = 0"),
    ("text good.txt --val_fraction=0.9999", "train"),
    ("text good.txt --tokenizer=words", "'words'"),
    ("text good.txt --tokenizer=bpe --vocab_size=255", "vocab_size=255"),
    ("text ", "my.txt"),  # an unset variable in quotes
    ("openwebtext --name=text", "name = 'text'"),
    ("openwebtext --dataset=table.csv", "dataset = 'table.csv'"),
])  # fmt: skip
def test_script_errors_are_one_line_and_change_nothing(repo, capsys, command, named):
    prepare("data/text", BOTTLES, "bottles")
    Path("good.txt").write_text(BOTTLES, encoding="utf-8")
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("bad.jsonl").write_text('{"text": "good"}\n\n{"text": 3}')
    Path("empty.txt").touch()
    Path("table.csv").write_text("text\none\ntwo")
    name, _, arguments = command.partition(" ")
    assert named in refused(repo, f"data/{name}/prepare.py {arguments}", capsys)


# -- what train.py asks for ----------------------------------------------------------------------------------


def test_data_may_be_anywhere(repo):
    Path("my.txt").write_text(BOTTLES, encoding="utf-8")
    assert "--dataset=./plays" in repo("data/text/prepare.py my.txt --name=./plays")
    assert sorted(path.name for path in Path("plays").iterdir()) == ["meta.json", "train.bin", "val.bin"]
    repo(f"train.py {TINY} --dataset=./plays")
    assert list(Path("out").glob("*plays*/ckpt.pt"))


@pytest.mark.parametrize("name", ["", "shakespeare", "tokenizer.py", "text", "./data", "elsewhere/plays"])
def test_what_is_no_dataset_is_refused(repo, name):
    with pytest.raises(UserError, match=f"dataset = '{name}' .*openwebtext, shakespeare_bpe, shakespeare_char, or run"):
        ensure_prepared(name)


def test_a_dataset_is_prepared_when_it_is_asked_for(repo, monkeypatch):
    """... by one of the runs that ask at once."""
    Path("data/shakespeare_bpe/input.txt").write_bytes(b"\xff")
    with pytest.raises(SystemExit) as end:  # its program has printed why
        ensure_prepared("shakespeare_bpe")
    assert end.value.code == 2 and not Path("data/shakespeare_bpe/meta.json").exists()
    Path("data/shakespeare_bpe/input.txt").write_text(BOTTLES, encoding="utf-8")
    run = Mock(side_effect=subprocess.run)
    monkeypatch.setattr(subprocess, "run", run)
    with ThreadPoolExecutor() as pool:
        folder, _ = pool.map(ensure_prepared, ["shakespeare_bpe"] * 2)
    run.assert_called_once()
    assert load_dataset(folder).meta["vocab_size"] > 256
