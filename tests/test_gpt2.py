"""GPT-2's own vocabulary, where tiktoken has it already: in TIKTOKEN_CACHE_DIR, or where it keeps what it downloads."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import tiktoken

from config.runtime.program import sha256
from conftest import ROOT
from data.shakespeare_char.prepare import SHAKESPEARE_SHA256
from data.tokenizer import gpt2_tokenizer

CACHE = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache"))
NAMES = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")  # tiktoken's own
if not all((CACHE / name).exists() for name in NAMES):
    pytest.skip("tiktoken would have to download GPT-2's vocabulary", allow_module_level=True)

SHAKESPEARE = ROOT / "data" / "shakespeare_char" / "input.txt"
TEXTS = [
    "<|endoftext|>To be<|endoftext|>, or not<|endoftext",
    "Grüße, ἀρχή, 你好世界, שלום, 🦊🇩🇪, e\u0301, \u200b\ufeff",
    "  two  spaces\t\ttabs\r\n\n\n   \u00a0\u3000 end   ",
    "it's we'LL 3.14159 10,000 -- 'twas... \x00\x7f",
]


def test_tiny_shakespeare_has_the_tokens_that_nanogpt_publishes(repo):
    if not SHAKESPEARE.exists() or sha256(SHAKESPEARE.read_bytes()) != SHAKESPEARE_SHA256:
        pytest.skip("Tiny Shakespeare is not here")
    shutil.copy(SHAKESPEARE, "data/shakespeare_bpe/input.txt")
    repo("data/shakespeare_bpe/prepare.py --tokenizer=gpt2")
    assert json.loads(Path("data/shakespeare_bpe/meta.json").read_text())["tokens"] == {"train": 301_966, "val": 36_059}


def test_texts_are_encoded_as_tiktoken_does():
    """A special token is plain text in a text, and itself in a prompt."""
    ours, gpt2 = gpt2_tokenizer(), tiktoken.get_encoding("gpt2")
    for text in TEXTS:
        ids = ours.encode_array(text).tolist()
        assert ids == gpt2.encode(text, disallowed_special=()) and gpt2.eot_token not in ids
        assert ours.encode(text) == gpt2.encode(text, allowed_special="all")
        assert ours.decode(ids) == text
    assert ours.vocab_size == 50_257 and ours.document_start == [50_256]
