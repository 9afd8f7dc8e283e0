"""GPT-2's own vocabulary, where tiktoken has it already: in TIKTOKEN_CACHE_DIR, or where it keeps what it downloads."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
import tiktoken

from data.dataset import load_dataset
from data.tokenizer import gpt2_tokenizer
from test_preprocess import GENUINE

CACHE = Path(os.environ.get("TIKTOKEN_CACHE_DIR") or Path(tempfile.gettempdir(), "data-gym-cache"))
NAMES = ("6d1cbeee0f20b3d9449abfede4726ed8212e3aee", "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6")  # tiktoken's own
if not all((CACHE / name).exists() for name in NAMES):
    pytest.skip("tiktoken would have to download GPT-2's vocabulary", allow_module_level=True)

TEXTS = [
    "<|endoftext|>To be<|endoftext|>, or not<|endoftext",
    "Grüße, ἀρχή, 你好世界, שלום, 🦊🇩🇪, e\u0301, \u200b\ufeff",
    "  two  spaces\t\ttabs\r\n\n\n   \u00a0\u3000 end   ",
    "it's we'LL 3.14159 10,000 -- 'twas... \x00\x7f",
]


@pytest.mark.skipif(not GENUINE, reason="Tiny Shakespeare is in neither of its folders")
def test_tiny_shakespeare_has_the_tokens_that_nanogpt_publishes(repo):
    shutil.copy(GENUINE[0], "data/shakespeare_bpe/input.txt")
    repo("data/shakespeare_bpe/prepare.py --tokenizer=gpt2")
    meta = load_dataset("data/shakespeare_bpe").meta
    assert meta["tokens"] == {"train": 301_966, "val": 36_059}
    assert [meta["sha256"][split][:8] for split in ("train", "val")] == ["502a2bdc", "68a53422"]


def test_texts_are_encoded_as_tiktoken_does():
    """A special token is plain text in a text, and itself in a prompt."""
    ours, gpt2 = gpt2_tokenizer(), tiktoken.get_encoding("gpt2")
    for text in TEXTS:
        ids = ours.encode_array(text).tolist()
        assert ids == gpt2.encode(text, disallowed_special=()) and gpt2.eot_token not in ids
        assert ours.encode(text) == gpt2.encode(text, allowed_special="all")
        assert ours.decode(ids) == text
    assert ours.vocab_size == 50_257 and ours.document_start == [50_256]
