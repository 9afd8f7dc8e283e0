"""Tokenizers: text -> token ids and back. Characters, and byte pairs: learned from a text, or GPT-2's."""

import base64
import heapq
import re
import sys
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import tiktoken

from config import UserError

END = "<|endoftext|>"  # by the name that GPT-2 gave it


class Tokenizer:
    """The base of all. Each has `vocab_size`, `encode_array`, `decode` and `state`, plain data for a checkpoint."""

    document_start = []  # the token that begins a document, if there is one for that

    def encode(self, text) -> list[int]:
        """Return the tokens of a prompt. Special tokens count as such here, and as plain text in `encode_array`."""
        return self.encode_array(text).tolist()


class CharTokenizer(Tokenizer):
    """One token per character: the distinct characters of `text`, in the order of their code points.

    >>> tokenizer = CharTokenizer("hello")
    >>> tokenizer.chars, tokenizer.encode("hole"), tokenizer.decode([1, 0, 2])
    ('ehlo', [1, 3, 2, 0], 'hel')
    """

    def __init__(self, text):
        self.chars = "".join(sorted(set(text)))
        self.vocab_size = len(self.chars)
        self.ids = np.full(0x110000, -1, np.int32)  # by code point
        self.ids[code_points(self.chars)] = np.arange(self.vocab_size)

    def encode_array(self, text) -> np.ndarray:
        codes = code_points(text)
        ids = self.ids[codes]
        if ids.min(initial=0) < 0:
            strange = ", ".join(f"{char!r} (U+{ord(char):04X})" for char in dict.fromkeys(map(chr, codes[ids < 0])))
            raise UserError(f"this tokenizer knows only the characters of its own text, not {strange:.70}")
        return ids

    def decode(self, ids) -> str:
        return "".join(self.chars[i] for i in ids)

    def state(self) -> dict:
        return {"kind": "char", "characters": self.chars}


def code_points(text):
    # bytes of a command line that are not UTF-8 come as surrogates, which no tokenizer knows
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class BPETokenizer(Tokenizer):
    """Byte-pair encoding, run by tiktoken."""

    def __init__(self, ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]):
        self.ranks, self.pattern, self.special_tokens = ranks, pattern, special_tokens
        self.vocab_size = len(ranks) + len(special_tokens)
        self.document_start = [special_tokens[END]] if END in special_tokens else []
        # without any special token tiktoken takes twice the time, so it gets one that no text is encoded to
        special = special_tokens or {END: len(ranks)}
        self.encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special)

    def encode(self, text) -> list[int]:
        return self.encoding.encode(text, allowed_special={*self.special_tokens}, disallowed_special=())

    def encode_array(self, text) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids) -> str:
        return self.encoding.decode_bytes(list(ids)).decode("utf-8", "replace")

    def state(self) -> dict:
        # as in a .tiktoken file: a line per token, its bytes in base64, a space, its rank
        ranks = "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in self.ranks.items())
        return {"kind": "bpe", "pattern": self.pattern, "special_tokens": self.special_tokens, "ranks": ranks}


def gpt2_tokenizer() -> BPETokenizer:
    """Return the tokenizer of GPT-2's 50,257 tokens, which tiktoken downloads at first use and keeps."""
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError):  # no network, or something else than the vocabulary came over it
        raise UserError("GPT-2's vocabulary cannot be downloaded: use --tokenizer=bpe instead") from None
    return BPETokenizer(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def tokenizer_from_state(state) -> Tokenizer:
    if state["kind"] == "char":
        return CharTokenizer(state["characters"])
    ranks = {base64.b64decode(token): int(rank) for token, rank in map(str.split, state["ranks"].splitlines())}
    return BPETokenizer(ranks, state["pattern"], state["special_tokens"])


def first_tokens(tokenizer) -> list[int]:
    """Return the prompt when none is given and no token begins a document: a newline, or token 0 if there is none."""
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


# BPE never merges across these pieces. They are short, so it is linear on any text. Python's `re` and tiktoken read
# this pattern the same way: it has no \w or \s, on which they differ, and matches any character (tiktoken drops others)
SPLIT = (
    r"[ ']?[A-Za-z\x80-\u2e7f]{1,32}|"  # a word; all that is not ASCII counts as letters
    r"[\u2e80-\U0010ffff]{1,8}|"  # a phrase, in scripts that put no spaces between words
    r" ?[0-9]{1,3}|"
    r" ?[!-/:-@\[-`{-~]{1,32}|"  # punctuation
    r"[\x00-\x20\x7f]{1,32}"  # spaces, line ends and control characters
)


def train_bpe(text, vocab_size) -> BPETokenizer:
    """Return byte-level BPE: 256 bytes, then the most frequent neighbors merged into a new token, again and again.

    Of equally frequent pairs, the one with the lowest ids wins. A text without more pairs gives fewer tokens.

    >>> list(train_bpe("aaab aaab", 259).ranks)[256:]
    [b'aa', b'ab', b'aaab']
    """
    if vocab_size < 256:
        raise UserError(f"vocab_size={vocab_size} is invalid: it must be 256 (the byte values) or more")
    pieces = Counter(match.group() for match in re.finditer(SPLIT, text))
    counts = list(pieces.values())  # a text repeats its words: each is merged once, and counted
    # in a word, chr(i) stands for token i, so str.replace merges each occurrence of a pair, from the left
    words = [piece.encode().decode("latin-1") for piece in pieces]
    tokens = [bytes([value]) for value in range(256)]
    pairs = Counter()  # how often a pair of tokens occurs
    places = defaultdict(set)  # in which words
    for i, word in enumerate(words):
        for pair in map("".join, pairwise(word)):
            pairs[pair] += counts[i]
            places[pair].add(i)
    queue = sorted((-count, pair) for pair, count in pairs.items())  # a heap, as every sorted list

    while len(tokens) < vocab_size and queue:
        count, pair = heapq.heappop(queue)
        if -count != pairs[pair]:  # the count has changed since, and a newer entry says so
            continue
        new = chr(len(tokens))
        tokens.append(tokens[ord(pair[0])] + tokens[ord(pair[1])])  # merges reach the same bytes in one way only
        if sys.stderr.isatty():
            print(f"{len(tokens):,} of {vocab_size:,} tokens", end=" \r", file=sys.stderr, flush=True)
        changed = set()
        for i in places.pop(pair):
            words[i] = words[i].replace(pair, new)
            for left, right in pairwise(words[i]):
                if new in (left, right):
                    before = (pair[1] if left == new else left) + (pair[0] if right == new else right)
                    pairs[before] -= counts[i]
                    pairs[left + right] += counts[i]
                    places[left + right].add(i)
                    changed.update((before, left + right))
        del pairs[pair]
        for other in filter(pairs.get, changed):  # those that still occur
            heapq.heappush(queue, (-pairs[other], other))
    return BPETokenizer({token: rank for rank, token in enumerate(tokens)}, SPLIT, {})
