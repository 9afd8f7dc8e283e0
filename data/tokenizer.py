"""Tokenizers: text -> token ids and back. Characters, byte pairs learned from a text or GPT-2's, and Hugging Face's.

All have the same methods. A tokenizer is plain data (`state`), so that a checkpoint can carry its own and be sampled
from without the data it was trained on.
"""

import base64
import codecs
import heapq
import re
from collections import Counter, defaultdict

import numpy as np
import tiktoken

END = "<|endoftext|>"  # by the name that GPT-2 gave it


class TokenizerError(ValueError):
    """A text that a tokenizer cannot encode, or a tokenizer that cannot be made: what is wrong, and what would work."""


class CharTokenizer:
    """One token per character: the distinct characters of `text`, in the order of their code points.

    >>> tokenizer = CharTokenizer("hello")
    >>> tokenizer.chars, tokenizer.encode("hole"), tokenizer.decode([1, 0, 2])
    ('ehlo', [1, 3, 2, 0], 'hel')
    """

    document_start = []  # the tokens that tell a document from the one before it

    def __init__(self, text):
        self.chars = "".join(sorted(set(text)))
        self.codes = code_points(self.chars)
        self.vocab_size = len(self.chars)

    def encode(self, text) -> list[int]:
        return self.encode_array(text).tolist()

    def encode_array(self, text) -> np.ndarray:
        codes = code_points(text)
        known = np.isin(codes, self.codes)
        if not known.all():
            strange = list(dict.fromkeys(map(chr, codes[~known])))
            some = ", ".join(map(repr, strange[:5])) + (" ..." if len(strange) > 5 else "")
            raise TokenizerError(f"the model does not know the character{'s' * (len(strange) > 1)} {some}")
        return np.searchsorted(self.codes, codes)

    def decode(self, ids) -> str:
        return "".join(self.chars[i] for i in checked_ids(ids, self.vocab_size))

    def decode_bytes(self, ids) -> bytes:
        return self.decode(ids).encode()

    def decode_stream(self, ids, prompt=()):
        """Yields the text of each of `ids` as it comes."""
        return (self.decode([i]) for i in ids)

    def state(self) -> dict:
        """All there is to know about the tokenizer, as JSON; `tokenizer_from_state` reads it."""
        return {"kind": "char", "characters": self.chars}


def code_points(text):
    # Half surrogate pairs get through here so that `encode` can name them like any other unknown character.
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


class BPETokenizer:
    """Byte-pair encoding, run by tiktoken. `ranks` maps the bytes of a token to its id, earlier merges first.

    Text that looks like a special token is encoded as the plain text it is.
    """

    def __init__(self, ranks: dict[bytes, int], pattern: str, special_tokens: dict[str, int]):
        self.ranks, self.pattern, self.special_tokens = ranks, pattern, special_tokens
        self.vocab_size = len(ranks) + len(special_tokens)
        self.document_start = [special_tokens[END]] if END in special_tokens else []
        # tiktoken takes twice the time if there are no special tokens; one that no text is encoded to mends that
        special_tokens = special_tokens or {END: len(ranks)}
        try:
            self.encoding = tiktoken.Encoding(
                "bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except ValueError:  # in several lines
            raise TokenizerError("the tokenizer's split pattern is not one that tiktoken takes") from None

    def encode(self, text) -> list[int]:
        return self.encoding.encode(text, disallowed_special=())

    def encode_array(self, text) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids) -> str:
        """The text of `ids`, with a replacement character for bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids) -> bytes:
        """The bytes of `ids`: a character may be spread over several tokens, so joining is for bytes, not text."""
        return self.encoding.decode_bytes(checked_ids(ids, self.vocab_size))

    def decode_stream(self, ids, prompt=()):
        """Yields the text of `ids` as they come: a character when the last of its tokens is there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            yield decoder.decode(self.decode_bytes([i]))
        yield decoder.decode(b"", final=True)

    def state(self) -> dict:
        """All there is to know about the tokenizer, as JSON; `tokenizer_from_state` reads it."""
        ranks = ranks_to_text(self.ranks)
        return {"kind": "bpe", "pattern": self.pattern, "special_tokens": self.special_tokens, "ranks": ranks}


class HFTokenizer:
    """A Hugging Face tokenizer: the text of its tokenizer.json, run by its package `tokenizers`.

    Text that looks like a special token becomes that token, as it does with transformers.
    """

    def __init__(self, json_text):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise TokenizerError("a Hugging Face tokenizer needs tokenizers: pip install tokenizers") from None
        try:
            self.tokenizer = Tokenizer.from_str(json_text)
        except Exception as error:  # it has no type of its own
            raise TokenizerError(f"not a tokenizer.json that `tokenizers` reads: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        plain, marked = self.run("a", add_special_tokens=False), self.run("a", add_special_tokens=True)
        # what it puts before every text, and what tells documents apart, in GPT-2 and its kin another token
        self.prompt_start = marked[: marked.index(plain[0])] if plain and plain[0] in marked else []
        self.document_start = self.prompt_start or ([vocabulary[END]] if END in vocabulary else [])

    def run(self, text, add_special_tokens) -> list[int]:
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # it has no type of its own; of half surrogate pairs it says that they are no str
            raise TokenizerError(f"the tokenizer cannot encode this text: {error}") from None

    def encode(self, text) -> list[int]:
        """The tokens of a text to continue, after those that the model expects first."""
        return self.prompt_start + self.run(text, add_special_tokens=False)

    def encode_array(self, text) -> np.ndarray:
        return np.array(self.run(text, add_special_tokens=False), np.uint32)

    def decode(self, ids) -> str:
        return self.tokenizer.decode(checked_ids(ids, self.vocab_size), skip_special_tokens=False)

    def decode_bytes(self, ids) -> bytes:
        return self.decode(ids).encode()

    def decode_stream(self, ids, prompt=()):
        """Yields the text of `ids`, which follow the tokens of a `prompt`, as they come: what a token reads as may
        depend on those before it, and a character may take several."""
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=list(prompt[-8:]), skip_special_tokens=False)
        for i in ids:
            try:
                text = stream.step(self.tokenizer, i)
            except Exception:  # it gives up after bytes that are no character, which some models say: begin anew
                stream = DecodeStream(skip_special_tokens=False)
                text = stream.step(self.tokenizer, i)
            yield text or ""

    def state(self) -> dict:
        """All there is to know about the tokenizer, as JSON; `tokenizer_from_state` reads it."""
        return {"kind": "hf", "json": self.tokenizer.to_str()}


def checked_ids(ids, vocab_size) -> list[int]:
    """`ids` as a list of ints; ValueError for one that is no token of the vocabulary."""
    ids = [int(i) for i in ids]
    for i in ids:
        if not 0 <= i < vocab_size:
            raise ValueError(f"token {i} is outside the vocabulary of {vocab_size}")
    return ids


# -- by name, and from a checkpoint --------------------------------------------------------------------------


def make_tokenizer(name, vocab_size, alphabet, sample):
    """The tokenizer of that name: "char" of the characters in alphabet(), "bpe" of `vocab_size` tokens learned from
    sample(), "gpt2", "hf:" and the folder or hub name of a Hugging Face model, or "run:" and the folder of a run."""
    if vocab_size is not None and name != "bpe":
        raise TokenizerError(f"vocab_size={vocab_size} goes with tokenizer 'bpe', not with {name!r}")
    if name == "char":
        return CharTokenizer(alphabet())
    if name == "bpe":
        return train_bpe(sample(), 1024 if vocab_size is None else vocab_size)
    if name == "gpt2":
        return gpt2_tokenizer()
    if name.startswith("hf:"):
        from data.huggingface import hf_tokenizer

        return hf_tokenizer(name.removeprefix("hf:"))
    if name.startswith("run:"):
        from config.runtime.checkpoint import run_tokenizer

        return run_tokenizer(name.removeprefix("run:"))
    raise TokenizerError(f"unknown tokenizer {name!r}; choose from 'char', 'bpe', 'gpt2', 'hf:NAME', 'run:FOLDER'")


def gpt2_tokenizer() -> BPETokenizer:
    """GPT-2's 50,257 tokens, which tiktoken downloads at first use and keeps."""
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network, or something else than the vocabulary came over it
        raise TokenizerError(
            f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}); "
            "--tokenizer=bpe trains one on the text instead"
        ) from None
    return BPETokenizer(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def tokenizer_from_state(state):
    """The tokenizer whose `state()` this is; TokenizerError if it can be none's."""
    makers = {
        "char": lambda: CharTokenizer(state["characters"]),
        "bpe": lambda: BPETokenizer(ranks_from_text(state["ranks"]), state["pattern"], state["special_tokens"]),
        "hf": lambda: HFTokenizer(state["json"]),
    }
    kind = state.get("kind")
    if kind not in makers:
        raise TokenizerError(f"unknown kind of tokenizer {kind!r}; choose from {', '.join(map(repr, makers))}")
    try:
        return makers[kind]()
    except KeyError as missing:
        raise TokenizerError(f"the tokenizer's {missing} is missing") from None


def first_tokens(tokenizer) -> list[int]:
    """What to start a text from when none is given: what the model expects first, if anything, or a new line, or the
    lowest character of a text that has no lines."""
    try:
        return tokenizer.encode("") or tokenizer.encode("\n") or [0]
    except TokenizerError:
        return [0]


def ranks_to_text(ranks) -> str:
    """The usual form of a .tiktoken file: a line per token, its bytes in base64, a space, its rank."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def ranks_from_text(text) -> dict[bytes, int]:
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            token, rank = line.split(" ")
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise TokenizerError(f"line {number} of the tokenizer's ranks is damaged") from None
    return ranks


# -- learning byte pairs -------------------------------------------------------------------------------------

# Where BPE may not merge across. Python's `re` and tiktoken's Rust regex read this pattern alike, because it
# names no Unicode classes (the two disagree on \w and \s), and it matches every character (tiktoken drops what
# no branch matches). No piece is longer than 33 characters, which keeps training and encoding linear on any text.
SPLIT = "|".join(
    [
        r"[ ']?[A-Za-z\x80-\u2e7f]{1,32}",  # a word; all that is not ASCII counts as letters
        r"[\u2e80-\U0010ffff]{1,8}",  # a phrase, in scripts that put no spaces between words
        r" ?[0-9]{1,3}",
        r" ?[!-/:-@\[-`{-~]{1,32}",  # punctuation
        r"[\x00-\x20\x7f]{1,32}",  # spaces, line ends and control characters
    ]
)


def train_bpe(text, vocab_size) -> BPETokenizer:
    """Byte-level BPE: 256 bytes, then the most frequent neighbours merged into a new token, again and again.

    Of equally frequent pairs the one with the lowest ids wins. There are fewer than `vocab_size` tokens if the
    text runs out of pairs.

    >>> list(train_bpe("aaab aaab", 259).ranks)[256:]
    [b'aa', b'ab', b'aaab']
    """
    if vocab_size < 256:
        raise TokenizerError(f"vocab_size={vocab_size} is not a whole number from 256 (the byte values) up")
    pieces = Counter(match.group() for match in re.finditer(SPLIT, text))
    words = [list(piece.encode()) for piece in pieces]  # a text repeats its words: each is merged once, and counted
    counts = list(pieces.values())
    tokens = [bytes([value]) for value in range(256)]

    pairs = Counter()  # how often a pair of tokens occurs
    places = defaultdict(set)  # in which words
    for i, word in enumerate(words):
        for pair in zip(word, word[1:]):
            pairs[pair] += counts[i]
            places[pair].add(i)
    queue = [(-count, pair) for pair, count in pairs.items()]
    heapq.heapify(queue)

    while len(tokens) < vocab_size and queue:
        count, pair = heapq.heappop(queue)
        if -count != pairs[pair]:  # the count has changed since, and a newer entry says so
            continue
        tokens.append(tokens[pair[0]] + tokens[pair[1]])  # new bytes: merges reach the same bytes in one way only

        changed = set()
        for i in places.pop(pair):
            old, new = words[i], merge(words[i], pair, len(tokens) - 1)
            words[i] = new
            for other in zip(old, old[1:]):
                pairs[other] -= counts[i]
                changed.add(other)
            for other in zip(new, new[1:]):
                pairs[other] += counts[i]
                places[other].add(i)
                changed.add(other)
        for other in changed:
            if pairs[other]:
                heapq.heappush(queue, (-pairs[other], other))
            else:
                del pairs[other]
    return BPETokenizer({token: rank for rank, token in enumerate(tokens)}, SPLIT, {})


def merge(word, pair, token):
    """`word` with every `pair` of neighbours, from the left, replaced by `token`.

    >>> merge([1, 1, 1, 2], (1, 1), 9)
    [9, 1, 2]
    """
    merged, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(token)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged
