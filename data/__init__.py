"""Data: text -> tokens on disk -> batches.

`prepare` turns a text into a folder of train.bin, val.bin (token ids, one after another) and meta.json;
`load` reads such a folder back as a Dataset, which cuts batches out of it. Tokenizers are plain data
(`state`), so that a checkpoint can carry its own and be sampled from without the folder.
"""

import base64
import codecs
import hashlib
import heapq
import http.client
import json
import operator
import os
import re
import urllib.request
from collections import Counter, defaultdict
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import torch

VERSION = 1  # of the layout of a data folder
SPLITS = ("train", "val")
END = "<|endoftext|>"  # by the name that GPT-2 gave it
LARGE = {"bpe": ("ranks", "tokenizer.tiktoken"), "hf": ("json", "tokenizer.json")}


@contextmanager
def replace_file(path):
    """A binary file to write that takes the place of `path` at the end, whole, or not at all if anything fails."""
    path = Path(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(path)
        raise
    with suppress(OSError):  # the rename itself reaches the disk; not every system can sync a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def clear_leftovers(folder):
    """Remove what killed processes have left of `replace_file`; only if no living one can be at work in there."""
    for leftover in Path(folder).glob("*.*.[0-9]*.tmp"):
        leftover.unlink(missing_ok=True)


def lock(file, wait=False) -> bool:
    """Whether the open `file` is now this process's own: of all that ask for it, one holds it at a time.

    The system takes a lock away from a process that ends, however it ends. Where there are no locks, all get it.
    """
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except (ImportError, OSError):  # Windows; a file system without locks
        pass
    return True


# -- tokenizers ----------------------------------------------------------------------------------------------


class CharTokenizer:
    """One token per character: the distinct characters of `text`, in the order of their code points.

    >>> tokenizer = CharTokenizer("hello")
    >>> tokenizer.chars, tokenizer.encode("hole"), tokenizer.decode([1, 0, 2])
    ('ehlo', [1, 3, 2, 0], 'hel')
    """

    document_start = []  # the tokens that tell a document from the one before it

    def __init__(self, text):
        check_text(text)
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
            raise ValueError(f"the model does not know the character{'s' * (len(strange) > 1)} {some}")
        return np.searchsorted(self.codes, codes)

    def decode(self, ids) -> str:
        return "".join(self.chars[i] for i in token_ids(ids, self.vocab_size))

    def decode_bytes(self, ids) -> bytes:
        return self.decode(ids).encode()

    def decode_stream(self, ids, prompt=()):
        """Yields the text of each of `ids` as it comes."""
        return (self.decode([i]) for i in ids)

    def state(self) -> dict:
        """All there is to know about the tokenizer, as JSON; `tokenizer_from_state` reads it."""
        return {"kind": "char", "characters": self.chars}


def code_points(text):
    check_text(text)
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
        self.encoding = tiktoken.Encoding(
            "bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
        )

    def encode(self, text) -> list[int]:
        check_text(text)
        return self.encoding.encode(text, disallowed_special=())

    def encode_array(self, text) -> np.ndarray:
        check_text(text)
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def decode(self, ids) -> str:
        """The text of `ids`, with a replacement character for bytes that are not UTF-8."""
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def decode_bytes(self, ids) -> bytes:
        """The bytes of `ids`: a character may be spread over several tokens, so joining is for bytes, not text."""
        return self.encoding.decode_bytes(token_ids(ids, self.vocab_size))

    def decode_stream(self, ids, prompt=()):
        """Yields the text of `ids` as they come: a character when the last of its tokens is there."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        for i in ids:
            yield decoder.decode(self.decode_bytes([i]))
        yield decoder.decode(b"", final=True)

    def state(self) -> dict:
        """All there is to know about the tokenizer, as JSON; `tokenizer_from_state` reads it."""
        return {
            "kind": "bpe",
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "ranks": ranks_to_text(self.ranks),
        }


class HFTokenizer:
    """A Hugging Face tokenizer: the text of its tokenizer.json, run by `tokenizers`, which comes with transformers.

    Text that looks like a special token becomes that token, as it does with transformers.
    """

    def __init__(self, json_text):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise ValueError("a Hugging Face tokenizer needs transformers: pip install 'transformers>=5'") from None
        try:
            self.tokenizer = Tokenizer.from_str(json_text)
        except Exception as error:  # it has no type of its own
            raise ValueError(f"not a tokenizer.json that `tokenizers` reads: {error}") from None
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab()
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        plain, marked = self.encode_array("a").tolist(), self.run("a", add_special_tokens=True)
        # what it puts before every text, and what tells documents apart, in GPT-2 and its kin another token
        self.prompt_start = marked[: marked.index(plain[0])] if plain and plain[0] in marked else []
        self.document_start = self.prompt_start or ([vocabulary[END]] if END in vocabulary else [])

    def run(self, text, add_special_tokens) -> list[int]:
        check_text(text)
        check_unicode(text)
        try:
            return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        except Exception as error:  # it has no type of its own
            raise ValueError(f"the tokenizer cannot encode this text: {error}") from None

    def encode(self, text) -> list[int]:
        """The tokens of a text to continue, after those that the model expects first."""
        return self.prompt_start + self.run(text, add_special_tokens=False)

    def encode_array(self, text) -> np.ndarray:
        return np.array(self.run(text, add_special_tokens=False), np.uint32)

    def decode(self, ids) -> str:
        return self.tokenizer.decode(token_ids(ids, self.vocab_size), skip_special_tokens=False)

    def decode_bytes(self, ids) -> bytes:
        return self.decode(ids).encode()

    def decode_stream(self, ids, prompt=()):
        """Yields the text of `ids`, which follow the tokens of a `prompt`, as they come: what a token reads as may
        depend on those before it, and a character may take several."""
        tokens = list(prompt[-8:])
        start, shown = 0, len(tokens)  # the text of tokens[:shown] is out; tokens are decoded from `start` on

        def text(stop=None):
            return self.tokenizer.decode(tokens[start:stop], skip_special_tokens=False)

        for i in ids:
            tokens.append(i)
            new = text()[len(text(shown)) :]
            if new.endswith("\ufffd"):  # a part of a character
                yield ""
            else:
                yield new
                start, shown = shown, len(tokens)
        yield text()[len(text(shown)) :]

    def state(self) -> dict:
        """All there is to know about the tokenizer, as JSON; `tokenizer_from_state` reads it."""
        return {"kind": "hf", "json": self.tokenizer.to_str()}

    def save_pretrained(self, folder):
        """Writes what transformers' AutoTokenizer reads."""
        from transformers import PreTrainedTokenizerFast

        first = {"bos_token": self.tokenizer.id_to_token(self.prompt_start[0])} if self.prompt_start else {}
        PreTrainedTokenizerFast(tokenizer_object=self.tokenizer, **first).save_pretrained(folder)


def check_text(text):
    if not isinstance(text, str):
        raise ValueError(f"text is needed, not {type(text).__name__}")


def token_ids(ids, vocab_size) -> list[int]:
    """`ids` as a list of ints; ValueError for what is no token of the vocabulary."""
    checked = []
    for i in ids:
        if not hasattr(i, "__index__") or not 0 <= i < vocab_size:
            raise ValueError(f"token {i!r} is outside the vocabulary of {vocab_size}")
        checked.append(operator.index(i))
    return checked


def tokenizer_from_state(state):
    """The tokenizer whose `state()` this is; ValueError, in one line, if it can be none's."""
    kind = state.get("kind") if isinstance(state, dict) else None
    if kind == "char":
        chars = state.get("characters")
        if not isinstance(chars, str) or not chars:
            raise ValueError("the tokenizer's characters are missing")
        tokenizer = CharTokenizer(chars)
        if tokenizer.chars != chars:
            raise ValueError("the tokenizer's characters are not distinct and in order")
        check_unicode(chars)
        return tokenizer
    if kind == "bpe":
        pattern, special_tokens = state.get("pattern"), state.get("special_tokens")
        if not isinstance(pattern, str) or not pattern:
            raise ValueError("the tokenizer's split pattern is missing")
        with suppress(re.error):  # not every pattern of tiktoken's is one of Python's
            if re.match(pattern, ""):
                raise ValueError("the tokenizer's split pattern matches the empty text, on which tiktoken crashes")
        if not isinstance(special_tokens, dict) or not all(
            token and type(i) is int for token, i in special_tokens.items()
        ):
            raise ValueError("the tokenizer's special tokens are not a table of names and ids")
        ranks = ranks_from_text(state.get("ranks"))
        ids = [*ranks.values(), *special_tokens.values()]
        if sorted(ids) != list(range(len(ids))):  # a gap would be an id that the model can say and nobody can decode
            raise ValueError("the tokenizer's ids do not count from 0 without gaps or repeats")
        if not all(bytes([value]) in ranks for value in range(256)):
            raise ValueError("the tokenizer's ranks lack some of the 256 byte values")
        try:
            return BPETokenizer(ranks, pattern, special_tokens)
        except ValueError:  # in several lines
            raise ValueError("the tokenizer's split pattern or special tokens are not what tiktoken takes") from None
    if kind == "hf":
        json_text = state.get("json")
        if not isinstance(json_text, str):
            raise ValueError("the tokenizer's tokenizer.json is missing")
        return HFTokenizer(json_text)
    raise ValueError(f"unknown kind of tokenizer {kind!r}; choose from 'char', 'bpe', 'hf'")


def first_tokens(tokenizer) -> list[int]:
    """What to start a text from when none is given: what the model expects first, if anything, or a new line, or the
    lowest character of a text that has no lines."""
    try:
        return tokenizer.encode("") or tokenizer.encode("\n") or [0]
    except ValueError:
        return [0]


def ranks_to_text(ranks) -> str:
    """The usual form of a .tiktoken file: a line per token, its bytes in base64, a space, its rank."""
    return "".join(f"{base64.b64encode(token).decode()} {rank}\n" for token, rank in ranks.items())


def ranks_from_text(text) -> dict[bytes, int]:
    if not isinstance(text, str):
        raise ValueError("the tokenizer's ranks are missing")
    ranks = {}
    for number, line in enumerate(text.splitlines(), 1):
        try:
            encoded, rank = line.split(" ")
            token = base64.b64decode(encoded, validate=True)
            rank = int(rank)
        except ValueError:
            raise ValueError(f"line {number} of the tokenizer's ranks is damaged") from None
        if not token or token in ranks:
            raise ValueError(f"line {number} of the tokenizer's ranks is empty or a repeat")
        ranks[token] = rank
    return ranks


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
    check_text(text)
    if not is_count(vocab_size, least=256):
        raise ValueError(f"vocab_size={vocab_size!r} is not a whole number from 256 (the byte values) up")
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
    """`word` with every `pair` of neighbours, from the left, replaced by `token`."""
    merged, i = [], 0
    while i < len(word):
        if i + 1 < len(word) and (word[i], word[i + 1]) == pair:
            merged.append(token)
            i += 2
        else:
            merged.append(word[i])
            i += 1
    return merged


def gpt2_tokenizer() -> BPETokenizer:
    """GPT-2's 50,257 tokens, which tiktoken downloads at first use and keeps."""
    try:
        encoding = tiktoken.get_encoding("gpt2")
    except (OSError, ValueError) as error:  # no network, or something else than the vocabulary came over it
        raise ValueError(
            f"GPT-2's vocabulary could not be downloaded ({type(error).__name__}); "
            "--tokenizer=bpe trains one on the text instead"
        ) from None
    return BPETokenizer(encoding._mergeable_ranks, encoding._pat_str, encoding._special_tokens)


def hf_tokenizer(name) -> HFTokenizer:
    """The tokenizer of a Hugging Face model: of a folder or, by its name, of the hub."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ValueError("a Hugging Face tokenizer needs transformers: pip install 'transformers>=5'") from None
    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(name).backend_tokenizer.to_str())
    except Exception as error:  # of transformers and the hub, with types of their own
        where = "" if Path(name).is_dir() else "no folder here, and on the hub: "
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{name}: has no tokenizer that can be read: {where}{reason}") from None


# -- preparing -----------------------------------------------------------------------------------------------


def prepare(folder, text, source, tokenizer="char", vocab_size=None, val_fraction=0.1, warning=""):
    """Write train.bin, val.bin and meta.json to `folder`: the last `val_fraction` of `text` is for validation.

    `tokenizer` is "char", "bpe" (of `vocab_size` tokens, 1024 unless given, trained on the training part), "gpt2" or
    "hf:NAME" (see `make_tokenizer`). `source` and `warning` say where the text comes from; whoever shows a loss
    should show them. Bad input is a ValueError, raised before anything is written. `corpus.py` does the same to
    texts that do not fit into memory.
    """
    check_fraction(val_fraction)
    check_text(source)
    check_text(warning)
    check_text(text)
    check_unicode(text)
    check_worth(text, source)
    cut = int(len(text) * (1 - val_fraction))
    parts = dict(zip(SPLITS, (text[:cut], text[cut:])))
    coder = make_tokenizer(tokenizer, vocab_size, alphabet=lambda: text, sample=lambda: parts["train"])
    ids = {split: coder.encode_array(part) for split, part in parts.items()}
    check_lengths({split: len(ids[split]) for split in SPLITS}, source, val_fraction)
    sizes = {split: len(part.encode()) for split, part in parts.items()}
    write_data(folder, coder, {split: [ids[split]] for split in SPLITS}, sizes, source, warning, sha256(text.encode()))


def make_tokenizer(name, vocab_size, alphabet, sample):
    """The tokenizer of that name: "char" of the characters in alphabet(), "bpe" of `vocab_size` tokens learned from
    sample(), "gpt2", or "hf:" and the folder or hub name of a Hugging Face model."""
    if vocab_size is not None and name != "bpe":
        raise ValueError(f"vocab_size={vocab_size} goes with tokenizer 'bpe', not with {name!r}")
    if name == "char":
        return CharTokenizer(alphabet())
    if name == "bpe":
        return train_bpe(sample(), 1024 if vocab_size is None else vocab_size)
    if name == "gpt2":
        return gpt2_tokenizer()
    if isinstance(name, str) and name.startswith("hf:"):
        return hf_tokenizer(name.removeprefix("hf:"))
    raise ValueError(f"unknown tokenizer {name!r}; choose from 'char', 'bpe', 'gpt2', 'hf:NAME'")


def check_fraction(val_fraction):
    if not isinstance(val_fraction, float) or not 0 < val_fraction < 1:
        raise ValueError(f"val_fraction={val_fraction!r} is not between 0 and 1")


def check_worth(text, source):
    if len(set(text)) < 2:
        raise ValueError(f"{source}: fewer than two distinct characters, so nothing to learn; give a longer text")


def check_lengths(tokens, source, val_fraction):
    for split in SPLITS:
        if tokens[split] < 2:
            part = f"its {split} part has fewer than two tokens at val_fraction={val_fraction}"
            raise ValueError(f"{source}: the text is too short: {part}; give a longer one")


def token_dtype(tokenizer):
    return np.dtype("uint16" if tokenizer.vocab_size < 65_536 else "uint32")


def write_tokens(file, arrays, dtype):
    """Write arrays of tokens, one after another; how many they are, and the SHA-256 of what is written."""
    count, digest = 0, hashlib.sha256()
    for ids in arrays:
        content = ids.astype(dtype).tobytes()
        file.write(content)
        digest.update(content)
        count += len(ids)
    return count, digest.hexdigest()


def write_data(folder, tokenizer, tokens, sizes, source, warning, text_sha256):
    """Write a data folder: for each split arrays of `tokens`, one after another, that come of `sizes` bytes of text."""
    folder = Path(folder)
    dtype = token_dtype(tokenizer)
    state = tokenizer.state()
    large = LARGE.get(state["kind"])  # a part of the state that has a file of its own: its name in there, the file's
    content = state.pop(large[0]).encode() if large else b""
    if large:
        state["sha256"] = sha256(content)

    folder.mkdir(parents=True, exist_ok=True)
    clear_leftovers(folder)
    with ExitStack() as stack:  # at its end the files take their places, the last opened first
        files = {"meta.json": stack.enter_context(replace_file(folder / "meta.json"))}
        if large:
            files[large[1]] = stack.enter_context(replace_file(folder / large[1]))
            files[large[1]].write(content)
        counts, hashes = {}, {}
        for split in SPLITS:
            files[f"{split}.bin"] = file = stack.enter_context(replace_file(folder / f"{split}.bin"))
            counts[split], hashes[split] = write_tokens(file, tokens[split], dtype)
        meta = {
            "version": VERSION,
            "tokenizer": state,
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name,
            "source": source,
            "warning": warning,
            "text_sha256": text_sha256,
            "tokens": counts,
            "bytes": sizes,
            "sha256": hashes,  # of the .bin files
        }
        files["meta.json"].write(json.dumps(meta, indent=1).encode())
        for file in files.values():
            file.flush()
        # until here what was in the folder is whole; from here on nothing is, until there is a meta.json again
        (folder / "meta.json").unlink(missing_ok=True)
    for _, name in LARGE.values():
        if name not in files:
            (folder / name).unlink(missing_ok=True)

    size = sum(sizes.values())
    print(f"{folder}: {source}, {size:,} bytes")
    print(f"{counts['train']:,} tokens to train on and {counts['val']:,} to validate on, {dtype}")
    print(f"{tokenizer.vocab_size:,} different tokens ({state['kind']}), {sum(counts.values()) / size:.3f} tokens per byte")


def check_unicode(text):
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"character {error.start} of the text is half a surrogate pair, not Unicode") from None


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def read_text(path) -> str:
    """A UTF-8 file as it is: line ends stay, so that the same bytes are the same text on every system."""
    try:
        return Path(path).read_bytes().decode("utf-8").removeprefix("\ufeff")  # the mark some editors put in front
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text at byte {error.start}") from None


SHAKESPEARE_URL = "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt"
SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def tiny_shakespeare(folder) -> tuple[str, str, str]:
    """The text, its source and a warning: `folder`/input.txt, else a download, else Python's own English.

    The last needs no network, so that everything runs everywhere, but it is another text: its losses compare with
    no one else's, which is what the warning says.
    """
    path = Path(folder) / "input.txt"
    if not path.exists():
        try:
            content = download(SHAKESPEARE_URL)
        except (OSError, http.client.HTTPException) as error:
            return stand_in(path, f"could not be downloaded ({error})")
        if sha256(content) != SHAKESPEARE_SHA256:
            return stand_in(path, "came over the network damaged")
        with replace_file(path) as file:
            file.write(content)
    text = read_text(path)
    genuine = sha256(text.encode()) == SHAKESPEARE_SHA256
    return text, "Tiny Shakespeare" if genuine else f"your own {path.parent.name}/input.txt", ""


def download(url) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as response:
        return response.read()


def stand_in(path, why):
    """What `tiny_shakespeare` gives without Shakespeare. It is not kept: a later run may have a network."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # left out of some small installations
        raise ValueError(f"Tiny Shakespeare {why}; put a text of your own at {path}") from None
    source = "English of Python's built-in help (pydoc_data.topics)"
    print("!" * 80)
    print(f"NOT SHAKESPEARE: Tiny Shakespeare {why}.")
    print(f"IN ITS PLACE: {source}.")
    print(f"LOSSES DO NOT COMPARE with Tiny Shakespeare's. Put that text at {path} to get them.")
    print("!" * 80)
    text = "\n".join(topics[name] for name in sorted(topics))
    return text, source, f"not Tiny Shakespeare but {source}: losses do not compare"


# -- reading -------------------------------------------------------------------------------------------------


def load(folder) -> "Dataset":
    """The data that `prepare` wrote to `folder`; ValueError, naming file and cure, if it is not whole."""
    folder = Path(folder)
    if not folder.is_dir():
        names = ", ".join(sorted(path.parent.name for path in folder.parent.glob("*/prepare.py")))
        raise ValueError(f"{folder}: no such data; {folder.parent} has {names or 'none'}")
    path = folder / "meta.json"
    try:
        stamps = {path.name: file_stamp(path)}
        meta = json.loads(path.read_bytes())
        check_meta(meta)
        state = dict(meta["tokenizer"])
        large = LARGE.get(str(state.get("kind")))
        if large:
            path = folder / large[1]
            content = path.read_bytes()
            if sha256(content) != state.get("sha256"):
                raise ValueError("not the file that meta.json was written with")
            state[large[0]] = content.decode()
        tokenizer = tokenizer_from_state(state)
        if tokenizer.vocab_size != meta["vocab_size"]:
            raise ValueError(f"vocab_size is {meta['vocab_size']}, the tokenizer has {tokenizer.vocab_size} tokens")
        splits = {}
        for split in SPLITS:
            path = folder / f"{split}.bin"
            stamps[path.name] = file_stamp(path)
            if path.stat().st_size != meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize:
                raise ValueError("not of the size that meta.json says")
            splits[split] = np.memmap(path, dtype=meta["dtype"], mode="r")
    except (OSError, ValueError, RecursionError) as error:  # json gives up on deep nesting with the last
        what = error.strerror or error if isinstance(error, OSError) else error
        raise ValueError(f"{path}: {what}; run python data/{folder.name}/prepare.py again") from None
    return Dataset(meta, tokenizer, splits, folder, stamps)


def file_stamp(path):
    """What tells a file from another one of the same name, and from itself before it was last written to."""
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def check_meta(meta):
    """ValueError unless meta.json says everything that `prepare` writes, in the right types."""
    if not isinstance(meta, dict):
        raise ValueError("not a table")
    if meta.get("version") != VERSION:
        raise ValueError(f"version {meta.get('version')!r} is not {VERSION}, the one this program reads")
    good = {
        "tokenizer": lambda value: isinstance(value, dict),
        "vocab_size": lambda value: is_count(value, least=1),
        "dtype": lambda value: value in ("uint16", "uint32"),
        "source": lambda value: isinstance(value, str),
        "warning": lambda value: isinstance(value, str),
        "text_sha256": is_hash,
        "tokens": lambda value: of_splits(value, lambda count: is_count(count, least=2)),
        "bytes": lambda value: of_splits(value, lambda count: is_count(count, least=1)),
        "sha256": lambda value: of_splits(value, is_hash),
    }
    for name, fits in good.items():
        if not fits(meta.get(name)):
            raise ValueError(f"{name} is missing or damaged")


def mix(*numbers) -> int:
    """One seed out of several numbers, 0 or more: 32 bits that differ, but for chance, wherever a number does."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


def shuffled(places, count, *key):
    """Which numbers stand at some `places` (an array) of a seeded order of 0..count-1, found without making it.

    A Feistel network, which permutes the numbers of 2h bits, is walked until it comes to one below `count`.
    """
    h = np.uint64(max((count - 1).bit_length() + 1, 2) // 2)
    round_keys = np.random.SeedSequence(key).generate_state(4, np.uint64)
    numbers = places.astype(np.uint64)
    outside = np.ones(len(numbers), bool)
    while outside.any():
        left, right = numbers[outside] >> h, numbers[outside] & (np.uint64(1) << h) - np.uint64(1)
        for round_key in round_keys:
            x = (right + round_key) * np.uint64(0xBF58476D1CE4E5B9)  # of a product, the high bits are the mixed ones
            x = (x ^ x >> np.uint64(32)) * np.uint64(0x94D049BB133111EB)
            left, right = right, left ^ x >> np.uint64(64) - h
        numbers[outside] = left << h | right
        outside = numbers >= count
    return numbers.astype(np.int64)


def is_count(value, least):
    return type(value) is int and least <= value < 2**63


def is_hash(value):
    return isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value)


def of_splits(value, fits):
    return isinstance(value, dict) and set(value) == set(SPLITS) and all(map(fits, value.values()))


@dataclass
class Dataset:
    """Token ids of two splits, "train" and "val", with what it takes to read them."""

    meta: dict
    tokenizer: CharTokenizer | BPETokenizer | HFTokenizer
    splits: dict[str, np.ndarray]
    folder: Path
    stamps: dict[str, tuple]  # of the files, when they were loaded

    def check_unchanged(self):
        """ValueError if a file has been replaced or written to since it was loaded. Cheap: reads no tokens."""
        for name, stamp in self.stamps.items():
            path = self.folder / name
            if not path.exists() or file_stamp(path) != stamp:
                raise ValueError(f"{path} has changed since it was loaded")

    def check_content(self):
        """ValueError if the tokens on disk are not those that `prepare` wrote. Reads them all."""
        for split, tokens in self.splits.items():
            if sha256(tokens) != self.meta["sha256"][split]:
                raise ValueError(
                    f"{self.folder / split}.bin is not what prepare.py wrote: damaged; run its prepare.py again"
                )

    def check_sizes(self, batch_size, block_size):
        """ValueError unless there are windows of `block_size` tokens, and the token after, in both splits."""
        for name, value in {"batch_size": batch_size, "block_size": block_size}.items():
            if not is_count(value, least=1):
                raise ValueError(f"{name}={value!r} is not a whole number from 1 up")
        split = min(SPLITS, key=lambda name: len(self.splits[name]))
        tokens = len(self.splits[split])
        if block_size >= tokens:
            raise ValueError(
                f"block_size={block_size} is too long for the {split} split of {tokens} tokens; "
                f"the largest that works is {tokens - 1}"
            )

    def check_ids(self, ids, split):
        """ValueError for a token outside the vocabulary, which only a damaged file has; a GPU would just crash."""
        if ids.max() >= self.meta["vocab_size"]:
            outside = f"token {ids.max()}, outside the vocabulary of {self.meta['vocab_size']}"
            raise ValueError(f"{split}.bin has {outside}: damaged; run its prepare.py again")

    def batch(self, seed, step, shard, batch_size, block_size, shards=1):
        """Windows of the train split: x and, one token on, y, both (batch_size, block_size) int64.

        A pure function: the same arguments give the same windows, whatever was drawn before. That makes a resumed
        run continue as if it had never stopped. A step has `shards` parts (of processes and their micro-steps), of
        which `shard` is one. An epoch visits each of its windows once, in an order of its own; they lie side by
        side, from a first place that is its own too. Nothing is kept for that: the memory is that of the batch.
        """
        self.check_sizes(batch_size, block_size)
        if type(seed) is not int:
            raise ValueError(f"seed={seed!r} is not a whole number")
        for name, value in {"step": step, "shard": shard}.items():
            if not is_count(value, least=0):
                raise ValueError(f"{name}={value!r} is not a whole number from 0 up")
        if not is_count(shards, least=1) or shard >= shards:
            raise ValueError(f"shard={shard} of shards={shards!r} is none: they count from 0")
        data, seed = self.splits["train"], seed % 2**64
        per_epoch = max(len(data) - block_size, block_size) // block_size
        rows = np.empty((batch_size, block_size + 1), np.int64)
        done, first = 0, (step * shards + shard) * batch_size  # in the sequence of all windows of all epochs
        while done < batch_size:
            epoch, place = divmod(first + done, per_epoch)
            places = np.arange(place, min(place + batch_size - done, per_epoch))
            start = mix(seed, epoch) % (len(data) - block_size * per_epoch)
            starts = start + block_size * shuffled(places, per_epoch, seed, epoch)
            rows[done : done + len(places)] = data[starts[:, None] + np.arange(block_size + 1)]
            done += len(places)
        rows = torch.from_numpy(rows)
        self.check_ids(rows, "train")
        return rows[:, :-1].contiguous(), rows[:, 1:].contiguous()

    def windows(self, split, batch_size, block_size, max_tokens, rank=0, world=1):
        """Fixed windows to evaluate on, as (x, y): at most `max_tokens` targets, spread evenly over the split.

        A split of no more targets than that is walked from end to end, each target counted once. Positions to leave
        out have target -1 (and token 0); they also fill the last batch, so that all batches have one shape. The
        targets are the same for every batch_size: add their losses up and divide by their number. Of `world`
        processes each, by its rank, gets a share of them in as many batches as any other, one of which may have none.
        """
        self.check_sizes(batch_size, block_size)
        if split not in self.splits:
            raise ValueError(f"split={split!r} is not one of {', '.join(self.splits)}")
        if not is_count(max_tokens, least=1):
            raise ValueError(f"max_tokens={max_tokens!r} is not a whole number from 1 up")
        data = self.splits[split]
        targets = len(data) - 1
        if targets <= max_tokens:
            starts = np.arange(0, targets, block_size)
            ends = np.minimum(starts + block_size, targets)
        else:
            length = min(block_size, max_tokens)
            count = max_tokens // length
            starts = np.arange(count) * (targets - length) // max(count - 1, 1)
            ends = starts + length

        batch_size = min(batch_size, -(-len(starts) // world))
        missing = -len(starts) % (batch_size * world)
        starts, ends = (np.pad(places, (0, missing))[rank::world] for places in (starts, ends))
        for first in range(0, len(starts), batch_size):
            rows = slice(first, first + batch_size)
            positions = starts[rows, None] + np.arange(block_size)
            wanted = positions < ends[rows, None]
            positions = np.where(wanted, positions, 0)
            x = np.where(wanted, data[positions], 0).astype(np.int64)
            y = np.where(wanted, data[positions + 1].astype(np.int64), -1)
            x, y = torch.from_numpy(x), torch.from_numpy(y)
            self.check_ids(x, split)
            self.check_ids(y, split)
            yield x, y
