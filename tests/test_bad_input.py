"""
Bad input to train.py, sample.py, every prepare.py and the Python API ends in one line that names the culprit.

Each table maps an input to a regular expression for that line. In the tables of damages and of the Python API an
input is Python itself, run as it stands; those of a checkpoint see its parts as variables.
"""

import json
import os
import re
import runpy
import shutil
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import data
from conftest import TEXT, TINY, refused
from data import BPETokenizer, CharTokenizer, Dataset, load, prepare, tokenizer_from_state, train_bpe
from model import GPT, GPTConfig
from sample import CHECKPOINT_PARTS, load_checkpoint, restore_model, restore_tokenizer

TRAIN, LATEST = f"train.py {TINY}", Path("out/run/ckpt.pt")
RESUME = f"{TRAIN} --out_dir=out/run --init_from=resume --max_iters=6"
SAMPLE = "sample.py --checkpoint=latest --num_samples=1 --max_new_tokens=2"

CONFIG = GPTConfig(block_size=8, vocab_size=11, n_layer=1, n_head=2, n_embd=16)
CHARS, PAIRS = CharTokenizer("abc"), train_bpe("hello", 260)


@pytest.fixture(scope="module")
def original(original, tmp_path_factory):
    """The copy of the repository that `repo` copies, here with a run in out/run and data of both tokenizers."""
    folder = tmp_path_factory.mktemp("trained") / "repo"
    shutil.copytree(original, folder)
    prepare(folder / "data" / "shakespeare_bpe", TEXT, "test", "bpe", 300)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "argv", [*TRAIN.split(), "--out_dir=out/run"])
        runpy.run_path("train.py", run_name="__main__")
    return folder


def check(run, command, words, capsys):
    error = refused(run, command, capsys)
    assert re.search(words, error), error


# -- settings ------------------------------------------------------------------------------------------------

HUGE = "1" + 400 * "0"
TRAIN_ARGUMENTS = {
    # names
    "--learning_rat=1": "--learning_rat: .*did you mean learning_rate",
    "--vocab_size=65": "--vocab_size: unknown setting",
    "--step=3": "--step: unknown setting",
    "--help=1": "--help: unknown setting 'help' .*--help lists all",
    "-seed=1": "-seed: .*did you mean seed",
    "--seed 3": "--seed: write it as --seed=value",
    "--overwrite --init_from=resume": "overwrite = True and init_from = 'resume' contradict",
    # types
    "--max_iters=2000x": "--max_iters: a whole number .*'2000x'",
    "--n_layer=": "--n_layer: a whole number is needed, not ''",
    "--n_layer=2.5": "--n_layer: a whole number .*'2.5'",
    "--n_layer=inf": "--n_layer: a whole number .*'inf'",
    f"--n_layer={HUGE}": "--n_layer: a whole number .*'1000",
    "--seed=9223372036854775808": "--seed: a whole number .*'9223372036854775808'",
    "--batch_size=1e19": "--batch_size: a whole number .*'1e19'",
    f"--warmup_iters={HUGE}": "--warmup_iters: a whole number",
    "--learning_rate=": "--learning_rate: a finite number is needed, not ''",
    "--learning_rate=high": "--learning_rate: a finite number .*'high'",
    "--learning_rate=nan": "--learning_rate: a finite number .*'nan'",
    "--rope_theta=inf": "--rope_theta: a finite number .*'inf'",
    "--bias=maybe": "--bias: true or false .*'maybe'",
    "--keep_input=2": "--keep_input: true or false .*'2'",
    "--tie_weights=": "--tie_weights: true or false is needed, not ''",
    # ranges
    "--max_iters=0": "max_iters = 0 .* 1 or more",
    "--batch_size=0": "batch_size = 0 .* 1 or more",
    "--batch_size=-4": "batch_size = -4 .* 1 or more",
    "--grad_accum_steps=0": "grad_accum_steps = 0 .* 1 or more",
    "--block_size=0": "block_size = 0 .* 1 or more",
    "--block_size=100000": "block_size=100000 is too long .*the largest that works is 287",
    "--checkpoint_interval=0": "checkpoint_interval = 0 .* 1 or more",
    "--checkpoint_minutes=-1": "checkpoint_minutes = -1.0 .* 0 or more",
    "--eval_interval=0": "eval_interval = 0 .* 1 or more",
    "--eval_tokens=0": "eval_tokens = 0 .* 1 or more",
    "--log_interval=-1": "log_interval = -1 .* 1 or more",
    "--sample_tokens=-1": "sample_tokens = -1 .* 0 or more",
    "--skip_bad_steps=-1": "skip_bad_steps = -1 .* 0 or more",
    "--warmup_iters=-1": "warmup_iters = -1 .* 0 or more",
    "--learning_rate=-1e-3": "learning_rate = -0.001 .* 0 or more",
    "--min_lr_frac=-0.1": "min_lr_frac = -0.1 .* 0 or more",
    "--weight_decay=-0.1": "weight_decay = -0.1 .* 0 or more",
    "--grad_clip=-1": "grad_clip = -1.0 .* 0 or more",
    "--beta1=-0.1": "beta1 = -0.1 .* 0 or more, below 1",
    "--beta2=1": "beta2 = 1.0 .* 0 or more, below 1",
    "--seed=-1": "seed = -1 .* 0 or more",
    # the model
    "--n_layer=0": "n_layer = 0 .* positive",
    "--n_embd=-16": "n_embd = -16 .* positive",
    "--n_embd=6": "n_head = 2 .* n_embd / n_head is even; n_embd = 6",
    "--n_head=3": "n_head = 3 .* divisor of n_embd = 16",
    "--n_kv_head=7": "n_kv_head = 7 .* divisor of n_head = 2",
    "--n_kv_head=-1": "n_kv_head = -1 .* 0 or more",
    "--n_inner=-1": "n_inner = -1 .* 0 or more",
    "--n_embd=4000000000000": "more memory .*smaller sizes",
    "--n_inner=9000000000000000000": "more memory .*smaller sizes",
    "--dropout=1.5": r"dropout = 1.5 .* \[0, 1\)",
    "--dropout=-0.1": r"dropout = -0.1 .* \[0, 1\)",
    "--rope_theta=0": "rope_theta = 0.0 .* positive",
    "--norm_eps=-1e-5": "norm_eps = -1e-05 .* positive",
    "--norm_eps=1e308": "norm_eps = 1e.308 .* positive",
    "--batch_size=1000000000000": "more memory .*smaller sizes",
    # choices
    "--attention=linear": "attention = 'linear' .*w2",
    "--attention=": "attention = '' .*w2",
    "--residual=m6": "residual = 'm6' .*m4.2",
    "--residual=M1": "residual = 'M1' .*m1",
    "--qk_scale=5.8": "qk_scale = '5.8' .*5.7",
    "--sigma=full": "sigma = 'full' .*diagonal",
    "--optimizer=sgd": "optimizer = 'sgd' .*muon",
    "--lr_decay=step": "lr_decay = 'step' .*cosine",
    "--init_from=gpt2": "init_from = 'gpt2' .*resume",
    "--compile=maybe": "compile = 'maybe' .*auto",
    "--dtype=int8": "dtype = 'int8' .*bfloat16",
    "--device=cuda:99": "device = 'cuda:99' .*this machine has .*cpu",
    "--device=": "device = '' .*this machine has .*cpu",
    "--dataset=shakespear_char": "dataset = 'shakespear_char' .*shakespeare_char",
    "--dataset=": "dataset = '' .*shakespeare_char",
    "--dataset=..": "dataset = '..' .*shakespeare_char",
    "--dataset=/": "dataset = '/' .*shakespeare_char",
    "--dataset=../data/text": "dataset = '../data/text' .*text",
    # out_dir
    "--out_dir=train.py": "out_dir = train.py is a file: name a folder",
    "--out_dir=train.py/run": "train.py/run: Not a directory",
    "--out_dir=/dev/null": "out_dir = /dev/null is a file",
    "--out_dir=/proc/run": "/proc/run: No such file",
    "--out_dir=.": "out_dir = . holds files that are not of a run: name a new folder",
    "--out_dir=data": "out_dir = data holds files that are not of a run",
    "--out_dir=config": "out_dir = config holds files that are not of a run",
    "--out_dir=out": "out_dir = out holds files that are not of a run",
    "--out_dir=" + 300 * "x": "xxx: File name too long",
    "--out_dir=out/run": "out/run already holds a run: --init_from=resume .*--overwrite=true .*--out_dir=FOLDER",
    # config files
    "config/m6_shakespeare.py": "config/m6_shakespeare.py: no such config file .did you mean config/m",
    "m1_shakespeare": "m1_shakespeare: no such config file .did you mean config/m1_shakespeare.py",
    "config": "config: no such config file",
    "train.py": "train.py: is the program itself",
    "sample.py": "sample.py: unknown setting 'checkpoint'",
    "model.py": "model.py: unknown setting 'RESIDUALS'",
    "data/text/prepare.py": "data/text/prepare.py: sets nothing",
    "out/run/ckpt.pt": "out/run/ckpt.pt: not a config file; a run is named by --out_dir=FOLDER",
    "out/run": "out/run: not a config file; a run is named by --out_dir=FOLDER",
    "out/run/log.jsonl": "out/run/log.jsonl: not a config file, whose name would end in .py",
    "/dev/null": "/dev/null: no such config file",
    300 * "x": "xxx: File name too long",
    "": ": no such config file",
    # resuming
    "--init_from=resume": "out/shakespeare_char/ckpt.pt: no such checkpoint",
    "--init_from=resume --out_dir=out/run": "max_iters = 4, but out/run/ckpt.pt has come to step 4: give more",
    **{
        f"--init_from=resume --out_dir=out/run --max_iters=9 --{name}={value}": f"{name} = .*{value}.* trained with"
        for name, value in dict(n_layer=3, learning_rate=1e-05, seed=7, batch_size=3, residual="m1").items()
    },
}


@pytest.mark.parametrize("arguments", TRAIN_ARGUMENTS)
def test_train(repo, capsys, arguments):
    check(repo, f"{TRAIN} {arguments}", TRAIN_ARGUMENTS[arguments], capsys)


CONFIG_FILES = {
    "": "bad.py: sets nothing; settings are written as name = value",
    "import math": "bad.py: sets nothing",
    "n_layers = 3": "bad.py: unknown setting 'n_layers' .did you mean n_layer",
    "settings = {'n_layer': 3}": "bad.py: unknown setting 'settings'",
    "from math import pi": "bad.py: unknown setting 'pi'",
    "n_layer: int = 'x'": "bad.py: n_layer: a whole number .*'x'",
    "n_layer = 3,": "bad.py: n_layer: a whole number",
    "n_layer = 10**400": "bad.py: n_layer: a whole number .*1000",
    "n_layer = -10**5000": "bad.py: n_layer: ",
    "n_layer = torch = __import__('torch').tensor(3)": "bad.py: n_layer: a whole number .*tensor",
    "learning_rate = 1j": "bad.py: learning_rate: a finite number .*1j",
    "learning_rate = 10**400": "bad.py: learning_rate: a finite number",
    "bias = []": r"bad.py: bias: true or false .*\[\]",
    "out_dir = {}": "bad.py: out_dir: text .*{}",
    "out_dir = 'a\\0b'": "out_dir",
    "out_dir = '\\ud800'": "out_dir",
    "dataset = 'a\\0b'": "dataset = .*shakespeare_char",
    "n_layer == 3": "bad.py, line 1: NameError",
    "n-layer = 3": "bad.py, line 1: SyntaxError",
    "n_layer = 3\n  n_head = 2": "bad.py, line 2: IndentationError",
    "n_layer = (3": "bad.py, line 1: SyntaxError: .*never closed",
    500 * "(": "bad.py, line 1: SyntaxError: too many nested",
    "\x7fELF\2\1\1\0\0\0\0": "bad.py: SyntaxError: .*null bytes",
    "raise MemoryError": "bad.py, line 1: MemoryError",
    "open('nowhere')": "bad.py, line 1: FileNotFoundError: .*nowhere",
    "import sys\nsys.exit('two\\nlines')": "bad.py, line 2: SystemExit: two lines",
    "def f(): f()\nf()": "bad.py, line 1: RecursionError",
    "import runpy\nrunpy.run_path(__file__)": "bad.py, line 2: RecursionError",
}


@pytest.mark.parametrize("text", CONFIG_FILES)
def test_config_file(repo, capsys, text):
    Path("bad.py").write_text(text)
    check(repo, f"{TRAIN} bad.py", CONFIG_FILES[text], capsys)


SAMPLE_ARGUMENTS = {
    "--out_dit=x": "--out_dit: .*did you mean out_dir",
    "--out_dir=out/nowhere": "out/nowhere/ckpt.pt: no such checkpoint",
    "--out_dir=train.py": "train.py/ckpt.pt",
    "--checkpoint=worst": "checkpoint = 'worst' .*best or latest",
    "--start=é☃": "does not know the characters 'é', '☃'",
    "--start=FILE:missing.txt": "missing.txt: No such file",
    "--start=FILE:data": "data: Is a directory",
    "--start=FILE:out/run/ckpt.pt": "out/run/ckpt.pt: not UTF-8 text at byte",
    "--temperature=-1": "temperature = -1.0 .* 0 or more",
    "--temperature=1e300": r"temperature = 1e\+300 .* 0 or more",
    "--temperature=nan": "--temperature: a finite number .*'nan'",
    "--top_p=0": r"top_p = 0.0 .*\(0, 1\]",
    "--top_p=2": r"top_p = 2.0 .*\(0, 1\]",
    "--top_k=-3": "top_k = -3 .* 0 or more",
    "--top_k=1.5": "--top_k: a whole number .*'1.5'",
    "--num_samples=0": "num_samples = 0 .* 1 or more",
    "--max_new_tokens=-1": "max_new_tokens = -1 .* 1 or more",
    f"--max_new_tokens={HUGE}": "--max_new_tokens: a whole number .*'1000",
    "--seed=-1": "seed = -1 .* 0 or more",
    "--device=tpu": "device = 'tpu' .*this machine has .*cpu",
    "config/m1_shakespeare.py": "config/m1_shakespeare.py: unknown setting",
}


@pytest.mark.parametrize("arguments", SAMPLE_ARGUMENTS)
def test_sample(repo, capsys, arguments):
    check(repo, f"sample.py {arguments}", SAMPLE_ARGUMENTS[arguments], capsys)


def test_sample_without_a_run(repo, capsys):
    shutil.rmtree("out")
    check(repo, "sample.py", "out/ holds no run .*train one first", capsys)


# -- texts ---------------------------------------------------------------------------------------------------

TEXTS = {
    "good.txt": TEXT.encode(),
    "utf16.txt": TEXT.encode("utf-16"),
    "cut.txt": b"caf\xc3",
    "surrogate.txt": b"\xed\xa0\x80",
    "mark.txt": b"\xef\xbb\xbf",
    "same.txt": b"aaaaaaaaaaaaaaaaaaaa",
    "short.txt": b"ab",
    "folder/latin.md": b"caf\xe9",
}
PREPARE = {
    "text good.txt missing.txt": "missing.txt: No such file",
    "text train.py/x": "train.py/x: Not a directory",
    "text config": "config: no .txt, .md, .* files below this folder",
    "text folder": "folder/latin.md: not UTF-8 text at byte 3",
    "text utf16.txt": "utf16.txt: not UTF-8 text at byte 0",
    "text cut.txt": "cut.txt: not UTF-8 text at byte 3",
    "text surrogate.txt": "surrogate.txt: not UTF-8 text at byte 0",
    "text mark.txt": "mark.txt: fewer than two distinct characters.* give a longer text",
    "text same.txt": "same.txt: fewer than two distinct characters.* give a longer text",
    "text short.txt": "short.txt: the text is too short.* give a longer one",
    "text good.txt --tokenizer": "--tokenizer: expected one argument",
    "text good.txt --tokenizer=BPE": "unknown tokenizer 'BPE'.*'bpe'",
    "text good.txt --vocab_size=300": "vocab_size=300 goes with tokenizer 'bpe', not with 'char'",
    "text good.txt --vocab_size=300 --tokenizer=gpt2": "vocab_size=300 goes with tokenizer 'bpe', not with 'gpt2'",
    "text good.txt --vocab_size=300.5 --tokenizer=bpe": "--vocab_size: .*'300.5'",
    "text good.txt --vocab_size= --tokenizer=bpe": "--vocab_size: .*''",
    "text good.txt --vocab_size=-300 --tokenizer=bpe": "vocab_size=-300 .*256",
    f"text good.txt --vocab_size={HUGE} --tokenizer=bpe": "vocab_size=1000.*256",
    "text good.txt --val_fraction=0": "val_fraction=0.0 is not between 0 and 1",
    "text good.txt --val_fraction=-0.1": "val_fraction=-0.1 is not between 0 and 1",
    "text good.txt --val_fraction=nan": "val_fraction=nan is not between 0 and 1",
    "text good.txt --val_fraction=1e-320": "val part has fewer than two tokens at val_fraction=1e-320",
    "text good.txt --val_fraction=0.9999": "train part has fewer than two tokens at val_fraction=0.9999",
    "text good.txt --val_fraction=tenth": "--val_fraction: .*'tenth'",
    "text good.txt --n_layer=3": "--n_layer=3",
    "shakespeare_char good.txt": "good.txt",
    "shakespeare_char --tokenizer=bpe": "--tokenizer=bpe",
    "shakespeare_bpe --vocab_size=8": "vocab_size=8 .*256",
    "shakespeare_bpe --vocab_size=1e3": "--vocab_size: .*'1e3'",
    "shakespeare_bpe --tokenizer=gpt2 --vocab_size=300": "vocab_size=300 goes with tokenizer 'bpe', not with 'gpt2'",
}


@pytest.mark.parametrize("arguments", PREPARE)
def test_prepare(repo, monkeypatch, capsys, arguments):
    monkeypatch.setattr(sys, "path", sys.path[:])
    for name, content in TEXTS.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)
    name, _, rest = arguments.partition(" ")
    check(repo, f"data/{name}/prepare.py {rest}".split(" "), PREPARE[arguments], capsys)


INPUTS = {
    b"": "input.txt: fewer than two distinct",
    b"ab": "input.txt: the text is too short",
    b"\xff": "input.txt: not UTF-8",
}


@pytest.mark.parametrize("name", ["shakespeare_char", "shakespeare_bpe"])
@pytest.mark.parametrize("content", INPUTS)
def test_prepare_own_input(repo, monkeypatch, capsys, name, content):
    monkeypatch.setattr(sys, "path", sys.path[:])
    Path(f"data/{name}/input.txt").write_bytes(content)
    check(repo, f"data/{name}/prepare.py", INPUTS[content], capsys)


# -- data ----------------------------------------------------------------------------------------------------

CHAR, BPE = Path("data/shakespeare_char"), Path("data/shakespeare_bpe")


def edit(folder=CHAR, **changes):
    """Changes meta.json; what is changed to ... is removed."""
    meta = json.loads((folder / "meta.json").read_bytes()) | changes
    (folder / "meta.json").write_text(json.dumps({name: value for name, value in meta.items() if value is not ...}))


def turn(path, change):
    """Makes the bytes of a file change(bytes)."""
    path.write_bytes(change(path.read_bytes()))


def turn_ranks(change):
    """Changes the ranks of the BPE tokenizer, and their hash with them."""
    turn(BPE / "tokenizer.tiktoken", change)
    edit_tokenizer(sha256=data.sha256((BPE / "tokenizer.tiktoken").read_bytes()))


def edit_tokenizer(**changes):
    edit(BPE, tokenizer=json.loads((BPE / "meta.json").read_bytes())["tokenizer"] | changes)


AGAIN = "; run python data/shakespeare_char/prepare.py again"
CHAR_DATA = {
    **{
        f"edit({name}=...)": f"meta.json: {name} is missing or damaged{AGAIN}"
        for name in "tokenizer vocab_size dtype source warning text_sha256 sha256 tokens bytes".split()
    },
    "edit(version=...)": f"meta.json: version None is not 1.*{AGAIN}",
    "edit(version='1')": f"meta.json: version '1' is not 1.*{AGAIN}",
    "edit(vocab_size=31.0)": f"meta.json: vocab_size is missing or damaged{AGAIN}",
    "edit(vocab_size=10**12)": f"meta.json: vocab_size is 1000000000000, the tokenizer has 31 tokens{AGAIN}",
    "edit(dtype='uint32')": f"train.bin: not of the size that meta.json says{AGAIN}",
    "edit(dtype=['uint16'])": f"meta.json: dtype is missing or damaged{AGAIN}",
    "edit(tokens=[2592, 288])": f"meta.json: tokens is missing or damaged{AGAIN}",
    "edit(tokens={'train': 2592.0, 'val': 288})": f"meta.json: tokens is missing or damaged{AGAIN}",
    "edit(tokens={'train': -2592, 'val': 288})": f"meta.json: tokens is missing or damaged{AGAIN}",
    "edit(tokens={'train': 10**15, 'val': 288})": f"train.bin: not of the size that meta.json says{AGAIN}",
    "edit(bytes={'train': 0, 'val': 1})": f"meta.json: bytes is missing or damaged{AGAIN}",
    "edit(bytes={'train': 1, 'val': 10**400})": f"meta.json: bytes is missing or damaged{AGAIN}",
    "edit(sha256={'train': 'x', 'val': 'x'})": f"meta.json: sha256 is missing or damaged{AGAIN}",
    "edit(tokenizer={})": f"meta.json: unknown kind of tokenizer None.*{AGAIN}",
    "edit(tokenizer={'kind': 'bpe'})": f"tokenizer.tiktoken: No such file or directory{AGAIN}",
    "edit(tokenizer={'kind': 'char', 'characters': 31})": f"meta.json: the tokenizer's characters are missing{AGAIN}",
    "edit(tokenizer={'kind': 'char', 'characters': 'ab'})": f"meta.json: .*the tokenizer has 2 tokens{AGAIN}",
    "turn(CHAR / 'meta.json', lambda old: b'')": f"meta.json: .*{AGAIN}",
    "turn(CHAR / 'meta.json', lambda old: old[:-9])": f"meta.json: .*{AGAIN}",
    "turn(CHAR / 'meta.json', lambda old: b'[]')": f"meta.json: not a table{AGAIN}",
    "turn(CHAR / 'meta.json', lambda old: b'NaN')": f"meta.json: not a table{AGAIN}",
    "turn(CHAR / 'meta.json', lambda old: b'{\"version\": 1' + 5000 * b'0')": f"meta.json: .*{AGAIN}",
    "turn(CHAR / 'meta.json', lambda old: 10**5 * b'{\"a\":')": f"meta.json: .*{AGAIN}",
    "turn(CHAR / 'train.bin', lambda old: old + b'x')": f"train.bin: not of the size that meta.json says{AGAIN}",
    "turn(CHAR / 'train.bin', lambda old: old + old)": f"train.bin: not of the size that meta.json says{AGAIN}",
    "turn(CHAR / 'train.bin', lambda old: old[:-2])": f"train.bin: not of the size that meta.json says{AGAIN}",
    "turn(CHAR / 'train.bin', lambda old: len(old) * b'\\xff')": "train.bin .*run its prepare.py again",
    "turn(CHAR / 'val.bin', lambda old: old[:-2] + old[:2])": "val.bin .*run its prepare.py again",
    "shutil.rmtree(CHAR)": "dataset = 'shakespeare_char' .* one of openwebtext, shakespeare_bpe, text",
    "shutil.rmtree('data')": "dataset = 'shakespeare_char' ",
}
BPE_DATA = {
    "turn(BPE / 'tokenizer.tiktoken', lambda old: old[:-1])": "tokenizer.tiktoken: not the file that meta.json ",
    "turn_ranks(lambda old: b'\\xff' + old)": "tokenizer.tiktoken: 'utf-8' codec",
    "turn_ranks(lambda old: b'\\0')": "tokenizer.tiktoken: line 1 of the tokenizer's ranks is damaged",
    "turn_ranks(lambda old: old.replace(b' 97', b' -97'))": "tokenizer.tiktoken: .*gaps or repeats",
    "turn_ranks(lambda old: old.replace(b' 97', b' 97.0'))": "tokenizer.tiktoken: line 98 .*damaged",
    "turn_ranks(lambda old: old.replace(b' 97', b' ' + 5000 * b'9'))": "tokenizer.tiktoken: line 98 .*damaged",
    "edit_tokenizer(special_tokens={'x': -1})": "tokenizer.tiktoken: .*gaps or repeats",
    "edit_tokenizer(special_tokens={'x': True})": "tokenizer.tiktoken: .*special tokens",
    "edit_tokenizer(special_tokens={'': 300})": "tokenizer.tiktoken: .*special tokens",
    "edit_tokenizer(pattern='')": "tokenizer.tiktoken: .*split pattern",
    "edit_tokenizer(pattern='(?:a{999}){999}')": "tokenizer.tiktoken: .*split pattern",
    "edit_tokenizer(pattern='|')": "tokenizer.tiktoken: .*split pattern",
}


@pytest.mark.parametrize("damage", CHAR_DATA)
def test_char_data(repo, capsys, damage):
    eval(damage)
    check(repo, TRAIN, CHAR_DATA[damage], capsys)


@pytest.mark.parametrize("damage", BPE_DATA)
def test_bpe_data(repo, capsys, damage):
    eval(damage)
    check(repo, f"{TRAIN} --dataset=shakespeare_bpe", BPE_DATA[damage], capsys)


# -- checkpoints ---------------------------------------------------------------------------------------------


class Call:
    """What is a call of a function to whoever unpickles it."""

    def __init__(self, *function_and_arguments):
        self.function, *self.arguments = function_and_arguments

    def __reduce__(self):
        return self.function, tuple(self.arguments)


def save_deflated():
    """The checkpoint as a zip bomb: a little longer, and another 100 megabytes once it is unpacked."""
    with zipfile.ZipFile(LATEST, "a", zipfile.ZIP_DEFLATED) as parts, parts.open("archive/data/99", "w") as part:
        for _ in range(100):
            part.write(bytes(10**6))


def save_legacy(ending=b""):
    """The checkpoint in PyTorch's format before 1.6, which is no zip file."""
    torch.save(torch.load(LATEST, weights_only=True), LATEST, _use_new_zipfile_serialization=False)
    turn(LATEST, lambda old: old + ending)


def save_disguised():
    """A bomb as DATA.PKL, which is data.pkl to PyTorch, though not to Python, and beside it a harmless decoy."""
    rewrite("bomb = Call(bytearray, 10)")
    turn(LATEST, lambda old: old.replace(b"/data.pkl", b"/DATA.PKL"))
    with zipfile.ZipFile(LATEST, "a") as parts:
        parts.writestr("ckpt/xdata.pkl", b".")


def rewrite(damage):
    """Runs `damage` with the parts of the checkpoint as its variables, and saves what it leaves of them."""
    saved = torch.load(LATEST, weights_only=True)
    exec(damage, globals(), saved)
    torch.save(saved, LATEST)


NO_CHECKPOINT = "ckpt.pt: damaged, or not a checkpoint of train.py"
FILES = {
    "turn(LATEST, lambda old: b'')": NO_CHECKPOINT,
    "turn(LATEST, lambda old: b'not a checkpoint')": NO_CHECKPOINT,
    "turn(LATEST, lambda old: old[:5000])": NO_CHECKPOINT,
    "turn(LATEST, lambda old: old[:-1])": NO_CHECKPOINT,
    "turn(LATEST, lambda old: bytes(len(old)))": NO_CHECKPOINT,
    "turn(LATEST, lambda old: old.replace(b'config', b'confug'))": "ckpt.pt: damaged",
    "turn(LATEST, lambda old: b'#!' + old)": NO_CHECKPOINT,
    "turn(LATEST, lambda old: b'PK\\5\\6' + bytes(18))": NO_CHECKPOINT,
    "LATEST.unlink(), LATEST.mkdir()": NO_CHECKPOINT,
    "save_deflated()": NO_CHECKPOINT,
    "save_disguised()": NO_CHECKPOINT,
    "turn(LATEST, lambda old: old + old)": NO_CHECKPOINT,
    "save_legacy()": NO_CHECKPOINT,
    "save_legacy(b'PK\\5\\6' + bytes(18))": NO_CHECKPOINT,
    "torch.save([1, 2], LATEST)": "ckpt.pt: a checkpoint of version None; this program reads 4",
    "torch.save(torch.ones(3), LATEST)": "ckpt.pt: a checkpoint of version None; this program reads 4",
    "torch.save(GPT(CONFIG).state_dict(), LATEST)": "ckpt.pt: a checkpoint of version None; this program reads 4",
    "torch.save(GPT(CONFIG), LATEST)": NO_CHECKPOINT,
    "torch.save(Call(os.system, 'touch marker'), LATEST)": NO_CHECKPOINT,
    "torch.save(Call(exec, 'open(\"marker\", \"w\")'), LATEST)": NO_CHECKPOINT,
}
FIT = "ckpt.pt: damaged: the weights do not fit the config saved with them: "
PARTS = {
    "model['bomb'] = Call(os.system, 'touch marker')": NO_CHECKPOINT,
    "bomb = Call(bytearray, 10)": NO_CHECKPOINT,  # 10 or 10**10, in as small a file
    "bomb = Call(torch.Tensor, 10)": NO_CHECKPOINT,
    "del version": "ckpt.pt: a checkpoint of version None; this program reads 4",
    "version = 2": "ckpt.pt: a checkpoint of version 2; this program reads 4",
    "version = '4'": "ckpt.pt: a checkpoint of version '4'; this program reads 4",
    "version = torch.ones(2)": "ckpt.pt: a checkpoint of version",
    **{f"del {part}": f"ckpt.pt: damaged: its '{part}' is missing" for part in CHECKPOINT_PARTS},
    "step = '4'": "ckpt.pt: damaged: its 'step'",
    "step = -1": "ckpt.pt: damaged: its 'step'",
    "bad_steps = None": "ckpt.pt: damaged: its 'bad_steps'",
    "val_loss = 3": "ckpt.pt: damaged: its 'val_loss'",
    "machine = b'abacus'": NO_CHECKPOINT,
    "machine = 31": "ckpt.pt: damaged: its 'machine'",
    "optimizers = {}": "ckpt.pt: damaged: its 'optimizers'",
    "data['source'] = 5": "ckpt.pt: damaged: its data lacks 'source'",
    "del data['warning']": "ckpt.pt: damaged: its data lacks 'warning'",
    "data['sha256'] = None": "ckpt.pt: damaged: its data lacks 'sha256'",
    "model.clear()": FIT + "too few weights",
    "del model['norm.weight']": FIT + "'norm.weight' is missing or unknown",
    "model['wings'] = torch.ones(16)": FIT + "'wings' is missing or unknown",
    "model[3] = torch.ones(16)": FIT + "3 is missing or unknown",
    "model['norm.weight'] = torch.ones(3)": FIT + r"norm.weight is \(3,\) .*not \(16,\)",
    "model['norm.weight'] = torch.ones(())": FIT + r"norm.weight is \(\) .*not \(16,\)",
    "model['norm.weight'] = torch.ones(16).double()": NO_CHECKPOINT,
    "model['norm.weight'] = torch.ones(16).long()": NO_CHECKPOINT,
    "model['norm.weight'] = torch.ones(16).cfloat()": NO_CHECKPOINT,
    "model['norm.weight'] = [1.0] * 16": FIT + "norm.weight is not a tensor",
    "model['norm.weight'] = None": FIT + "norm.weight is not a tensor",
    "model['norm.weight'] = torch.full((16,), torch.nan)": FIT + "norm.weight has numbers that are not finite",
    "model['norm.weight'] = torch.full((16,), torch.inf)": FIT + "norm.weight has numbers that are not finite",
    "model['norm.weight'] = torch.ones(1).expand(16)": FIT + "norm.weight has .*not all that its shape needs",
    "model['norm.weight'] = torch.ones(16).to_sparse()": NO_CHECKPOINT,
    "model['norm.weight'] = torch.ones(16, device='meta')": NO_CHECKPOINT,
    "model['embed.weight'] = model['embed.weight'].T.contiguous().T": FIT + "embed.weight has ",
}
CONFIGS = {  # of the model, where sample.py believes them; train.py has settings to compare with
    "config.clear()": FIT,
    "config['wings'] = 2": FIT + ".*'wings'",
    "config[3] = 2": FIT + "keywords must be strings",
    "config['n_layer'] = 10**9": FIT + "too few weights for n_layer = 1000000000",
    "config['n_layer'] = 1": FIT + "'blocks.1",
    "config['n_layer'] = torch.ones(2)": FIT + "n_layer = tensor",
    "config['n_embd'] = 10**9": FIT + r"embed.weight is \(31, 16\)",
    "config['n_embd'] = 2**62": FIT + "Storage size calculation overflowed",
    "config['n_embd'] = '16'": FIT + "n_embd = '16'",
    "config['n_inner'] = 10**12": FIT + "blocks.0.mlp.gate.weight is ",
    "config['n_head'] = 7": FIT + "n_head = 7 .*divisor of n_embd = 16",
    "config['vocab_size'] = 10**12": FIT + r"embed.weight is \(31, 16\) .*not \(1000000000000, 16\)",
    "config['vocab_size'] = 10**6; model['embed.weight'] = torch.ones(1).expand(10**6, 16)": FIT + "embed.weight ",
    "config['block_size'] = 0": FIT + "block_size = 0",
    "config['dropout'] = torch.nan": FIT + "dropout = nan",
    "config['attention'] = 'linear'": FIT + "attention = 'linear'",
    "config['attention'] = 'w2'": FIT + "'blocks.0.attn.log_tau' is missing",
    "config['residual'] = 'm3.2'": FIT + "'blocks.1.mix' is missing",
    "config['bias'] = True": FIT + "'blocks.0.attn.k.bias' is missing",
    "tokenizer.clear()": "ckpt.pt: damaged: unknown kind of tokenizer None",
    "tokenizer['kind'] = torch.ones(2)": "ckpt.pt: damaged: unknown kind of tokenizer tensor",
    "tokenizer['characters'] = 'ab'": "ckpt.pt: damaged: its tokenizer has 2 tokens, its model does not",
    "tokenizer['characters'] = 'ba'": "ckpt.pt: damaged: the tokenizer's characters are not distinct and in order",
    "tokenizer['characters'] = torch.ones(31)": "ckpt.pt: damaged: the tokenizer's characters are missing",
    "tokenizer = PAIRS.state()": "ckpt.pt: damaged: its tokenizer has 260 tokens, its model does not",
}
STATE = "ckpt.pt: damaged: its training state does not fit: "
TRAINING = {  # what resuming needs and sampling does not
    "config['dropout'] = 0.5": "ckpt.pt: damaged: its config and its settings are not of one model",
    "config['n_layer'] = torch.ones(2)": "ckpt.pt: damaged",
    "settings.clear()": "seed = 1337, but out/run/ckpt.pt was trained with None",
    "settings['dropout'] = torch.ones(2)": "ckpt.pt",
    "data['sha256'].clear()": "data/shakespeare_char is not what out/run/ckpt.pt was trained on",
    "step = 10**30": "max_iters = 6, but out/run/ckpt.pt has come to step 1000000000000000000000000000000",
    "optimizers = []": STATE,
    "optimizers = [{}, {}]": STATE,
    "optimizers = [None]": STATE,
    "optimizers[0] = [1]": STATE,
    "optimizers[0][0] = None": STATE,
    "optimizers[0].clear()": STATE,
    "optimizers[0].pop(0)": STATE + r"\(0, 'exp_avg'\) is missing",
    "optimizers[0][99] = optimizers[0][0]": STATE + r"\(99, 'exp_avg'\) is missing or unknown",
    "optimizers[0]['0'] = optimizers[0].pop(0)": STATE + r"\('0', 'exp_avg'\) is missing or unknown",
    "del optimizers[0][0]['exp_avg_sq']": STATE + r"\(0, 'exp_avg_sq'\) is missing",
    "optimizers[0][0]['wings'] = torch.ones(3)": STATE + r"\(0, 'wings'\) is missing or unknown",
    "optimizers[0][0]['exp_avg'] = torch.ones(3)": STATE + r"\(0, 'exp_avg'\) is \(3,\)",
    "optimizers[0][0]['exp_avg'] = 0": STATE + r"\(0, 'exp_avg'\) is not a tensor",
    "optimizers[0][0]['exp_avg'] = torch.ones(1).expand(31, 16)": STATE + r"\(0, 'exp_avg'\) has .*its shape needs",
    "optimizers[0][0]['exp_avg'].fill_(torch.nan)": STATE + r"\(0, 'exp_avg'\) has numbers that are not finite",
    "optimizers[0][0]['step'] = 4": STATE + r"\(0, 'step'\) is not a tensor",
    "optimizers[0][0]['step'] = torch.ones(1)": STATE + r"\(0, 'step'\) is \(1,\)",
    "optimizers[0][0]['step'].fill_(torch.inf)": STATE + r"\(0, 'step'\) has numbers that are not finite",
    "scaler['scale'] = 'x'": STATE + "its scaler is not made of numbers",
    "scaler['scale'] = torch.ones(1)": STATE + "its scaler is not made of numbers",
}


def check_quickly(run, command, words, capsys):
    start = time.perf_counter()
    check(run, command, words, capsys)
    assert time.perf_counter() - start < 10


@pytest.mark.parametrize("damage", FILES)
def test_checkpoint_file(repo, capsys, damage):
    eval(damage)
    for command in (SAMPLE, RESUME):
        check_quickly(repo, command, FILES[damage], capsys)


def test_best_checkpoint_file(repo, capsys):
    turn(Path("out/run/best.pt"), lambda old: old[:-1])
    for command in ("sample.py", RESUME):
        check_quickly(repo, command, "best.pt: damaged, or not a checkpoint of train.py", capsys)


@pytest.mark.parametrize("damage", PARTS)
def test_part_of_a_checkpoint(repo, capsys, damage):
    rewrite(damage)
    for command in (SAMPLE, RESUME):
        check_quickly(repo, command, PARTS[damage], capsys)


@pytest.mark.parametrize("damage", CONFIGS)
def test_config_of_a_checkpoint(repo, capsys, damage):
    rewrite(damage)
    check_quickly(repo, SAMPLE, CONFIGS[damage], capsys)


@pytest.mark.parametrize("damage", TRAINING)
def test_training_state_of_a_checkpoint(repo, capsys, damage):
    rewrite(damage)
    check_quickly(repo, RESUME, TRAINING[damage], capsys)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(place=st.floats(0, 1), length=st.integers(0, 99) | st.just(10**9), new=st.binary(max_size=9))
def test_any_bytes_for_a_checkpoint(original, tmp_path, place, length, new):
    path, whole = tmp_path / "ckpt.pt", (original / LATEST).read_bytes()
    start = int(place * len(whole))
    path.write_bytes(whole[:start] + new + whole[start + length :])
    try:
        saved = load_checkpoint(path)
        restore_model(saved, path)
        restore_tokenizer(saved, path)
    except ValueError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)


SCALARS = st.none() | st.booleans() | st.integers(-9, 9) | st.floats() | st.text(max_size=5)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(SCALARS, SCALARS, max_size=2)
VALUES |= st.sampled_from([torch.ones(2), torch.tensor(1), torch.ones(16).to_sparse(), b"x", 10**400])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=50)
@given(choice=st.data())
def test_any_part_of_a_checkpoint(original, repo, capsys, choice):
    """Sampling and resuming work, or are refused in a line."""
    shutil.copytree(original / "out", "out", dirs_exist_ok=True)
    table = torch.load(LATEST, weights_only=True)
    saved, key = table, choice.draw(st.sampled_from(sorted(table)))
    while isinstance(table[key], (dict, list)) and table[key] and choice.draw(st.booleans()):
        table = table[key]
        key = choice.draw(st.sampled_from(sorted(table, key=str) if isinstance(table, dict) else range(len(table))))
    table[key] = choice.draw(VALUES)
    torch.save(saved, LATEST)
    for command in (SAMPLE, RESUME):
        try:
            repo(command)
        except SystemExit as end:
            assert end.code == 2 and capsys.readouterr().err.count("\n") == 1


# -- the Python API ------------------------------------------------------------------------------------------

MODEL = GPT(CONFIG).eval()
IDX = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
LLAMA, NORM = MODEL.to_llama(), "model.norm.weight"
SPLITS = dict.fromkeys(data.SPLITS, np.arange(99, dtype=np.uint16) % 11)
NUMBERS = Dataset({"vocab_size": 11}, None, SPLITS, Path("numbers"), {})

FIELDS = {
    **dict.fromkeys(("block_size", "vocab_size", "n_layer", "n_head", "n_embd"), (True, "8", 2**63, [], torch.nan)),
    **dict.fromkeys(("n_kv_head", "n_inner"), (False, "8", 2.5, 2**63, b"8")),
    **dict.fromkeys(("dropout", "rope_theta", "norm_eps"), (None, True, "x", torch.inf, 10**400, 1j)),
    **dict.fromkeys(("bias", "keep_input", "tie_weights"), (0, 1, "true", [])),
    **dict.fromkeys(("attention", "qk_scale", "sigma", "residual"), ("", True, {}, torch.ones(2))),
}
BAD_FIELDS = [(field, value) for field, values in FIELDS.items() for value in values]


@pytest.mark.parametrize("field, value", BAD_FIELDS, ids=lambda part: repr(part)[:30])
def test_fields_of_a_config(field, value):
    with pytest.raises(ValueError, match=re.escape(f"{field} = {value!r} does not work: it must be ")):
        GPTConfig(**{field: value})


CALLS = {
    # a model
    "GPT(None)": "made from a GPTConfig, got NoneType",
    "GPT(GPTConfig)": "made from a GPTConfig, got type",
    "GPT(vars(CONFIG))": "made from a GPTConfig, got dict",
    "MODEL(None)": "idx must be .* got NoneType",
    "MODEL([[1, 2]])": "idx must be .* got list",
    "MODEL('hello')": "idx must be .* got str",
    "MODEL(IDX.numpy())": "idx must be .* got ndarray",
    "MODEL(IDX.bool())": "idx must be .* got .* of torch.bool",
    "MODEL(IDX.byte())": "idx must be .* got .* of torch.uint8",
    "MODEL(IDX.cfloat())": "idx must be .* got .* of torch.complex64",
    "MODEL(torch.tensor(1))": r"idx must be .* got \(\) of torch.int64",
    "MODEL(IDX.to_sparse())": "idx must be ",
    "MODEL(IDX + 7)": "idx has tokens from 8 to 15; they must be 0 to 10",
    "MODEL(IDX - 2)": "idx has tokens from -1 to 6; they must be 0 to 10",
    "MODEL(IDX + 2**62)": "idx has tokens from 46116.* they must be 0 to 10",
    "MODEL(IDX, [[1, 2]])": "targets must be .* got list",
    "MODEL(IDX, 3)": "targets must be .* got int",
    "MODEL(IDX, IDX.numpy())": "targets must be .* got ndarray",
    "MODEL(IDX, IDX.float())": "targets must be .* got .* of torch.float32",
    "MODEL(IDX, IDX[0])": r"targets must be .* got \(4,\)",
    "MODEL(IDX, IDX.T)": r"targets have shape \(4, 2\), idx has \(2, 4\)",
    "MODEL(IDX, IDX[:1])": r"targets have shape \(1, 4\), idx has \(2, 4\)",
    "MODEL(IDX, IDX + 7)": "targets has tokens from 8 to 15; they must be -1 to 10",
    "MODEL(IDX, IDX - 3)": "targets has tokens from -2 to 5; they must be -1 to 10",
    "MODEL(IDX, 0 * IDX - 100)": "targets has tokens from -100 to -100; they must be -1 to 10",
    "MODEL.crop_block_size(None)": "block_size = None .* from 1 to 8",
    "MODEL.crop_block_size(4.0)": "block_size = 4.0 .* from 1 to 8",
    "MODEL.crop_block_size(True)": "block_size = True .* from 1 to 8",
    # its text
    "MODEL.generate(None, 2)": "idx must be .* got NoneType",
    "MODEL.generate([[1, 2]], 2)": "idx must be .* got list",
    "MODEL.generate(IDX.float(), 2)": "idx must be .* got .* of torch.float32",
    "MODEL.generate(IDX[0], 2)": r"idx must be .* got \(4,\)",
    "MODEL.generate(IDX + 7, 2)": "idx has tokens from 8 to 15; they must be 0 to 10",
    "MODEL.generate(-IDX, 2)": "idx has tokens from -8 to -1; they must be 0 to 10",
    "MODEL.generate(IDX, None)": "max_new_tokens = None .* 0 or more",
    "MODEL.generate(IDX, -1)": "max_new_tokens = -1 .* 0 or more",
    "MODEL.generate(IDX, 2.0)": "max_new_tokens = 2.0 .* 0 or more",
    "MODEL.generate(IDX, True)": "max_new_tokens = True .* 0 or more",
    "MODEL.generate(IDX, 2**63)": "max_new_tokens = 9223372036854775808 ",
    "MODEL.generate(IDX, 2, temperature=None)": "temperature = None .* 0 or more",
    "MODEL.generate(IDX, 2, temperature='1')": "temperature = '1' .* 0 or more",
    "MODEL.generate(IDX, 2, temperature=True)": "temperature = True .* 0 or more",
    "MODEL.generate(IDX, 2, temperature=torch.inf)": "temperature = inf .* 0 or more",
    "MODEL.generate(IDX, 2, temperature=torch.ones(1))": "temperature = tensor.* 0 or more",
    "MODEL.generate(IDX, 2, top_k=-1)": "top_k = -1 .* positive",
    "MODEL.generate(IDX, 2, top_k=2.0)": "top_k = 2.0 .* positive",
    "MODEL.generate(IDX, 2, top_k='2')": "top_k = '2' .* positive",
    "MODEL.generate(IDX, 2, top_k=True)": "top_k = True .* positive",
    "MODEL.generate(IDX, 2, top_p=-0.5)": r"top_p = -0.5 .*\(0, 1\]",
    "MODEL.generate(IDX, 2, top_p=torch.nan)": r"top_p = nan .*\(0, 1\]",
    "MODEL.generate(IDX, 2, top_p='0.9')": r"top_p = '0.9' .*\(0, 1\]",
    "MODEL.generate(IDX, 2, top_p=True)": r"top_p = True .*\(0, 1\]",
    "next(MODEL.stream(IDX, 2, temperature=-1e-320))": "temperature = -1e-320 .* 0 or more",
    "next(MODEL.stream(IDX, '2'))": "max_new_tokens = '2' .* 0 or more",
    # Llama's weights
    "GPT.from_llama(None, CONFIG)": "a table .* got NoneType",
    "GPT.from_llama(LLAMA, None)": "made from a GPTConfig, got NoneType",
    "GPT.from_llama({}, CONFIG)": "lacks model.embed_tokens.weight",
    "GPT.from_llama({**LLAMA, 3: LLAMA[NORM]}, CONFIG)": "has 3, for which this config has no place",
    "GPT.from_llama({**LLAMA, NORM: None}, CONFIG)": "lacks model.norm.weight",
    "GPT.from_llama({**LLAMA, NORM: [1.0] * 16}, CONFIG)": "model.norm.weight is not a tensor of floating",
    "GPT.from_llama({**LLAMA, NORM: LLAMA[NORM].numpy()}, CONFIG)": "model.norm.weight is not a tensor of floating",
    "GPT.from_llama({**LLAMA, NORM: LLAMA[NORM].long()}, CONFIG)": "model.norm.weight is not a tensor of floating",
    "GPT.from_llama({**LLAMA, NORM: LLAMA[NORM].cfloat()}, CONFIG)": "model.norm.weight is not a tensor of floating",
    "GPT.from_llama({**LLAMA, NORM: LLAMA[NORM].to_sparse()}, CONFIG)": "model.norm.weight",
    "GPT.from_llama({**LLAMA, NORM: LLAMA[NORM].to('meta')}, CONFIG)": "model.norm.weight",
    "GPT.from_llama(LLAMA, replace(CONFIG, tie_weights=True))": "lm_head.weight differs .*set tie_weights = False",
    # texts and tokenizers
    "prepare('folder', None, 'x')": "text is needed, not NoneType",
    "prepare('folder', TEXT.encode(), 'x')": "text is needed, not bytes",
    "prepare('folder', TEXT, None)": "text is needed, not NoneType",
    "prepare('folder', TEXT, 'x', warning=3)": "text is needed, not int",
    "prepare('folder', TEXT, 'x', tokenizer=None)": "unknown tokenizer None; choose from 'char'",
    "prepare('folder', TEXT, 'x', tokenizer=['bpe'])": r"unknown tokenizer \['bpe'\]; choose from 'char'",
    "prepare('folder', TEXT, 'x', 'bpe', '300')": "vocab_size=.*300.* is not a whole number from 256",
    "prepare('folder', TEXT, 'x', 'bpe', True)": "vocab_size=True is not a whole number from 256",
    "prepare('folder', TEXT, 'x', val_fraction=None)": "val_fraction=None is not between 0 and 1",
    "prepare('folder', TEXT, 'x', val_fraction='0.1')": "val_fraction=.*0.1.* is not between 0 and 1",
    "prepare('folder', TEXT, 'x', val_fraction=True)": "val_fraction=True is not between 0 and 1",
    "load('file')": "file: no such data",
    "load('a\\0b')": "no such data",
    "CharTokenizer(None)": "text is needed, not NoneType",
    "CharTokenizer(b'abc')": "text is needed, not bytes",
    "CHARS.encode(None)": "text is needed, not NoneType",
    "CHARS.encode(b'a')": "text is needed, not bytes",
    "CHARS.encode_array(['a'])": "text is needed, not list",
    "CHARS.decode('ab')": "token 'a' is ",
    "CHARS.decode([-1])": "token -1 is outside the vocabulary of 3",
    "CHARS.decode([3])": "token 3 is outside the vocabulary of 3",
    "CHARS.decode([1.0])": "token 1.0 is ",
    "CHARS.decode_bytes([None])": "token None is ",
    "PAIRS.encode(None)": "text is needed, not NoneType",
    "PAIRS.encode_array(b'a')": "text is needed, not bytes",
    "PAIRS.decode([-1])": "token -1 is outside the vocabulary of 260",
    "PAIRS.decode_bytes([2**70])": "token 11805.* is outside the vocabulary of 260",
    "PAIRS.decode([1.5])": "token 1.5 is ",
    "train_bpe(None, 300)": "text is needed, not NoneType",
    "train_bpe(b'abc', 300)": "text is needed, not bytes",
    "train_bpe(TEXT, None)": "vocab_size=None is not a whole number from 256",
    "train_bpe(TEXT, 255)": "vocab_size=255 is not a whole number from 256",
    "train_bpe(TEXT, -300)": "vocab_size=-300 is not a whole number from 256",
    "train_bpe(TEXT, 300.0)": "vocab_size=300.0 is not a whole number from 256",
    "BPETokenizer({b'a': 0}, '(', {})": "pattern|parenthesis",
    "tokenizer_from_state(b'char')": "unknown kind of tokenizer None",
    "tokenizer_from_state({'kind': None})": "unknown kind of tokenizer None; choose from 'char'",
    "tokenizer_from_state({'kind': 'char', 'characters': b'ab'})": "the tokenizer's characters are missing",
    # batches
    "NUMBERS.batch(None, 0, 0, 2, 4)": "seed=None",
    "NUMBERS.batch(1.5, 0, 0, 2, 4)": "seed=1.5",
    "NUMBERS.batch(0, None, 0, 2, 4)": "step=None",
    "NUMBERS.batch(0, -1, 0, 2, 4)": "step=-1",
    "NUMBERS.batch(0, 2**64, 0, 2, 4)": "step=18446744073709551616",
    "NUMBERS.batch(0, 0, -1, 2, 4)": "shard=-1",
    "NUMBERS.batch(0, 0, 2, 2, 4, 2)": "shard=2 of shards=2",
    "NUMBERS.batch(0, 0, 0, 2, 4, None)": "shards=None",
    "NUMBERS.batch(0, 0, 0, 0, 4)": "batch_size=0 is not a whole number from 1 up",
    "NUMBERS.batch(0, 0, 0, None, 4)": "batch_size=None is not a whole number from 1 up",
    "NUMBERS.batch(0, 0, 0, 2.0, 4)": "batch_size=2.0 is not a whole number from 1 up",
    "NUMBERS.batch(0, 0, 0, 10**30, 4)": "batch_size=1000",
    "NUMBERS.batch(0, 0, 0, 2, -4)": "block_size=-4 is not a whole number from 1 up",
    "NUMBERS.batch(0, 0, 0, 2, True)": "block_size=True is not a whole number from 1 up",
    "NUMBERS.batch(0, 0, 0, 2, '4')": "block_size='4' is not a whole number from 1 up",
    "next(NUMBERS.windows('test', 2, 4, 9))": "split='test' is not one of train, val",
    "next(NUMBERS.windows(None, 2, 4, 9))": "split=None is not one of train, val",
    "next(NUMBERS.windows('val', 2, 4, None))": "max_tokens=None is not a whole number from 1 up",
    "next(NUMBERS.windows('val', 2, 4, 1.5))": "max_tokens=1.5 is not a whole number from 1 up",
    "next(NUMBERS.windows('val', -2, 4, 9))": "batch_size=-2 is not a whole number from 1 up",
    # checkpoints
    "load_checkpoint(Path('file'))": "file: damaged, or not a checkpoint",
    "load_checkpoint(Path('folder'))": "folder: no such checkpoint",
}


@pytest.mark.parametrize("call", CALLS)
def test_call(tmp_path, monkeypatch, call):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("neither data nor a checkpoint")
    with pytest.raises(ValueError, match=CALLS[call]) as error:
        eval(call)
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


LLAMAS = {
    "(folder / 'config.json').unlink()": "Unrecognized model in .*llama",
    "turn(folder / 'config.json', lambda old: b'{')": "llama: not a model",
    "turn(folder / 'config.json', lambda old: b'[]')": "llama",
    "turn(folder / 'config.json', lambda old: old.replace(b'\"llama\"', b'\"wings\"'))": "wings",
    "turn(folder / 'config.json', lambda old: old.replace(b'_size\": 16', b'_size\": 32'))": "head_dim = 8; only 16",
    "turn(folder / 'config.json', lambda old: old.replace(b'_size\": 16', b'_size\": []'))": "llama",
    "turn(folder / 'model.safetensors', lambda old: old[:500])": "llama",
    "(folder / 'model.safetensors').unlink()": "llama",
    "options.update(n_layer=7)": "lacks model.layers.1.input_layernorm.weight",
    "options.update(n_embd=None)": "n_embd = None",
    "options.update({3: 4})": "override_args has 3",
    "shutil.rmtree(folder)": "llama: not a model",
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder with a Llama of transformers."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("whole") / "llama"
    sizes = dict(vocab_size=11, hidden_size=16, intermediate_size=32, max_position_embeddings=8)
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("damage", LLAMAS)
def test_pretrained_folder(llama, tmp_path, damage):
    folder, options = tmp_path / "llama", {}
    shutil.copytree(llama, folder)
    eval(damage)
    with pytest.raises(ValueError, match=LLAMAS[damage]) as error:
        GPT.from_pretrained(str(folder), options)
    assert "\n" not in str(error.value)


LEGAL = [
    "MODEL(IDX, IDX.int())",
    "MODEL(IDX.int(), IDX)",
    "MODEL(IDX, 0 * IDX - 1)",
    "MODEL(IDX[:0])",
    "MODEL.generate(IDX[:0], 2)",
    "MODEL.generate(IDX, 2, temperature=1e-320)",
    "MODEL.generate(IDX, 2, temperature=-0.0)",
    "MODEL.generate(IDX, 2, temperature=1e299)",
    "MODEL.generate(IDX, 2, top_k=2**62)",
    "MODEL.generate(IDX, 2, top_p=1e-320)",
    "MODEL.generate(IDX, 2, top_p=1)",
    "MODEL.generate(IDX, 20, top_k=1, top_p=1e-320, temperature=1e-5)",
    "GPT(replace(CONFIG, block_size=10**12)).generate(IDX, 2)",
    "GPT(replace(CONFIG, norm_eps=1e-300, rope_theta=1e299))(IDX)",
    "CHARS.decode(torch.tensor([0, 2]))",
    "PAIRS.decode(np.array([104, 256]))",
    "CHARS.encode('')",
]


@pytest.mark.parametrize("call", LEGAL)
def test_extreme_but_legal(call):
    eval(call)
