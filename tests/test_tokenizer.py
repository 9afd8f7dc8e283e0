"""Tokenizers: data/tokenizer.py."""

import doctest
import json
import re

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

import data.tokenizer
from config import UserError
from conftest import BOTTLES
from data.tokenizer import END, SPLIT, BPETokenizer, CharTokenizer, first_tokens, tokenizer_from_state, train_bpe

BPE = train_bpe(BOTTLES, 400)
BYTES = BPETokenizer({bytes([i]): i for i in range(256)}, SPLIT, {END: 256})


def test_the_examples():
    assert doctest.testmod(data.tokenizer).failed == 0


@given(st.text(min_size=1))
def test_char_round_trip(text):
    tokenizer = CharTokenizer(text)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and max(ids) < tokenizer.vocab_size
    assert again(tokenizer).encode(text) == ids


def again(tokenizer):
    """Return the tokenizer that a checkpoint makes of another's state."""
    return tokenizer_from_state(json.loads(json.dumps(tokenizer.state())))


@given(st.text())
@example("<|endoftext|>")  # in a text it is plain text
@example("".join(chr(code) for code in range(0x11000) if not 0xD800 <= code < 0xE000))
def test_bpe_round_trip(text):
    ids = BPE.encode(text)
    assert BPE.decode(ids) == text
    assert again(BPE).encode(text) == BPE.encode_array(text).tolist() == ids


def test_a_special_token_is_text_in_a_text_and_itself_in_a_prompt():
    text = f"a{END}b"
    ids = BYTES.encode_array(text).tolist()
    assert 256 not in ids and BYTES.decode(ids) == text
    assert BYTES.encode(text) == [*b"a", 256, *b"b"] and BYTES.document_start == [256]


@given(st.text())
def test_python_and_tiktoken_split_alike(text):
    assert BPE.encode(text) == [i for piece in re.findall(SPLIT, text) for i in BPE.encode(piece)]


def merge(word, pair, token):
    """Replace every `pair` of neighbors, from the left, by `token`."""
    merged = []
    for i in word:
        merged.append(i)
        if tuple(merged[-2:]) == pair:
            merged[-2:] = [token]
    return merged


def naive_bpe(text, vocab_size):
    """Learn byte pairs as textbooks do: count all pairs again before each merge."""
    words = [list(piece.encode()) for piece in re.findall(SPLIT, text)]
    tokens = [bytes([i]) for i in range(256)]
    while len(tokens) < vocab_size:
        pairs = [pair for word in words for pair in zip(word, word[1:])]
        if not pairs:
            break
        best = min(set(pairs), key=lambda pair: (-pairs.count(pair), pair))
        tokens.append(tokens[best[0]] + tokens[best[1]])
        words = [merge(word, best, len(tokens) - 1) for word in words]
    return tokens


@given(st.text(alphabet="aab b1.é", max_size=60))
@example("")  # no pairs are left
def test_train_bpe_is_textbook_bpe(text):
    assert list(train_bpe(text, 280).ranks) == naive_bpe(text, 280)


def test_broken_utf8_decodes_to_replacement_characters():
    assert BYTES.decode([*"é".encode(), 0xFF]) == "é\ufffd"


@pytest.mark.parametrize("tokenizer, tokens", [
    (BYTES, [10]),
    (CharTokenizer("\tab\n"), [1]),
    (CharTokenizer("ab"), [0]),
])  # fmt: skip
def test_a_text_starts_with_a_newline_if_there_is_one(tokenizer, tokens):
    assert first_tokens(tokenizer) == tokens


def test_gpt2_offline_says_what_works(monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: open("/nowhere"))
    with pytest.raises(UserError, match="--tokenizer=bpe"):
        data.tokenizer.gpt2_tokenizer()
