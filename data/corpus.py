"""Large corpora: texts of any size -> train.bin and val.bin, by all cores, in little memory.

The texts are cut into parts of some megabytes before anything of them is read. Each part is tokenized by itself and
kept in a file of its own, so that an interrupted run goes on with the parts that are missing; then they are joined.
A text is cut where no token could have spanned the cut, so that its parts give the tokens that the whole would give:
after a line's end or before a space. (Where a megabyte has none it is cut between any two characters, and a tokenizer
that puts a space before every text, as Llama 2's does, puts one there too.)

Plain text and .jsonl are read here; whatever else has rows is for the package `datasets` to read.
"""

import glob
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path

import numpy as np

from data.console import UserError, file_errors, print0
from data.files import atomic_write, clear_leftovers, file_lock, sha256
from data.preprocess import SPLITS, check_fraction, check_lengths, check_worth, token_dtype, write_dataset
from data.tokenizer import TokenizerError, make_tokenizer

PART = 4 * 2**20  # bytes of text, about
ROWS = 1000  # of a dataset, in a part
SAMPLE = 16 * 2**20  # characters to learn byte pairs from, at most

# the arguments of `datasets.load_dataset` for files of rows, by suffix, after which there may be a compression's
FORMATS = {
    ".json": {"path": "json"},
    ".jsonl": {"path": "json"},
    ".parquet": {"path": "parquet"},
    ".csv": {"path": "csv"},
    ".tsv": {"path": "csv", "sep": "\t"},
}
COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")


# -- parts of texts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What lies between two places of a file, in bytes, or of a dataset, in rows."""

    kind: str  # text, jsonl, rows
    path: str  # or the name of a dataset on the hub
    start: int
    stop: int
    field: str

    def pieces(self):
        """Yields (whether a document begins here, text)."""
        for begins, text in READERS[self.kind](self):
            if text is not None:  # a table's way to say that there is none
                yield begins, text.encode(errors="replace").decode()  # JSON can hold half a surrogate pair

    def version(self):
        """What changes with the content."""
        if self.kind == "rows":
            return load_rows(self.path)._fingerprint
        stat = os.stat(self.path)
        return stat.st_size, stat.st_mtime_ns


def text_files(path):
    """`path` itself, or all texts below it, in the order of their names, if it is a folder."""
    path = Path(path)
    if not path.is_dir():
        return [path]
    suffixes = (".txt", ".md", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".json.gz", ".parquet")
    files = sorted(file for file in path.rglob("*") if file.name.lower().endswith(suffixes) and file.is_file())
    if not files:
        raise UserError(f"{path}: no {', '.join(suffixes)} files below this folder")
    return files


@file_errors()
def parts_of_file(path, field="text"):
    """The parts of a file; its suffix tells whether it has rows, of which `field` is the text, or is plain text."""
    size = os.stat(path).st_size
    suffix, compressed = suffix_of(path)
    if suffix in FORMATS and (compressed or suffix != ".jsonl"):
        return parts_of_dataset(path, field)
    if compressed:
        raise UserError(f"{path}: only files of rows, such as .jsonl.gz, can be read compressed: decompress it first")
    kind = "jsonl" if suffix == ".jsonl" else "text"
    return [Part(kind, str(path), start, min(start + PART, size), field) for start in range(0, size, PART)]


def suffix_of(path):
    """The suffix of a file, but for a compression's, and whether there is one of those."""
    path = Path(str(path).lower())
    compressed = path.suffix in COMPRESSIONS
    return Path(path.stem).suffix if compressed else path.suffix, compressed


def parts_of_dataset(name, field="text"):
    """The parts of a dataset's train split: of a file or a folder of rows, or of one on the Hugging Face hub."""
    count = len(load_rows(str(name)))
    return [Part("rows", str(name), start, min(start + ROWS, count), field) for start in range(0, count, ROWS)]


def read_text(part):
    size = os.stat(part.path).st_size
    with open(part.path, "rb") as file:
        start, stop = (cut_near(file, place, size) for place in (part.start, part.stop))
        file.seek(start)
        content = file.read(stop - start)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{part.path}: not UTF-8 text at byte {start + error.start}") from None
    yield part.start == 0, text.removeprefix("\ufeff") if part.start == 0 else text


# After a line's end or before a space, where each stands alone between visible characters.
CUT = re.compile(rb"[!-~\x80-\xff]\n(?=[!-~\x80-\xff])|[!-~\x80-\xff](?= [!-~\x80-\xff])")


def cut_near(file, place, size):
    """The first byte from `place` on where no tokenizer's piece of text goes on, or at least no character."""
    if place in (0, size):
        return place
    file.seek(place)
    ahead = file.read(2**20)
    if cut := CUT.search(ahead):
        return place + cut.end()
    if place + len(ahead) == size:
        return size
    return place + re.search(rb"[\x00-\x7f\xc0-\xff]|\Z", ahead).start()


def read_jsonl(part):
    with open(part.path, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the line that begins in the part before
        while (place := file.tell()) < part.stop and (line := file.readline()):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UserError(f"{part.path}: line at byte {place}: not JSON") from None
            row = row if isinstance(row, dict) else {}
            if not isinstance(row.get(part.field, 0), str | None):
                texts = [name for name, value in row.items() if isinstance(value, str)]
                raise no_text(f"{part.path}: line at byte {place}", part.field, texts)
            yield True, row[part.field]


def read_rows(part):
    rows = load_rows(part.path)
    texts = [name for name, value in rows.features.items() if getattr(value, "dtype", "") in ("string", "large_string")]
    if part.field not in texts:
        raise no_text(part.path, part.field, texts)
    rows = rows.select_columns(part.field)
    for i in range(part.start, part.stop):
        yield True, rows[i][part.field]


READERS = {"text": read_text, "jsonl": read_jsonl, "rows": read_rows}


@lru_cache(maxsize=4)
def load_rows(name):
    """The train split of a dataset, NAME or NAME:CONFIGURATION. What it downloads or converts, `datasets` keeps in its
    own folder."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise UserError(f"{name} is read by a package that is not here: pip install datasets") from None
    try:
        if os.path.isfile(name) and suffix_of(name)[0] in FORMATS:
            return load_dataset(**FORMATS[suffix_of(name)[0]], data_files=glob.escape(name), split="train")
        path, _, configuration = (name, "", "") if os.path.exists(name) else name.partition(":")
        return load_dataset(path, configuration or None, split="train")
    except Exception as error:  # of the hub and of many formats, with types of their own
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise UserError(f"{name}: cannot be loaded: {reason}") from None


def no_text(where, field, texts):
    return UserError(f"{where}: no text in field {field!r}; --field may be: {', '.join(texts) or 'none'}")


# -- what is done to a part ----------------------------------------------------------------------------------


def alphabet(part):
    """The characters of a part, and how many documents begin in it."""
    characters, documents = set(), 0
    for begins, text in part.pieces():
        characters |= set(text)
        documents += begins
    return characters, documents


def tokenize(tokenizer, part, is_first, path):
    """Writes the tokens of a part to `path`.bin, and then what is to be known of them to `path`.json.

    Documents are told apart by the tokens that the tokenizer has for that, or else by a line's end.
    """
    dtype, digest, tokens, size = token_dtype(tokenizer), hashlib.sha256(), 0, 0
    marks = tokenizer.document_start
    with atomic_write(path.with_suffix(".bin")) as file:
        for i, (begins, text) in enumerate(part.pieces()):
            if begins and not marks and not (is_first and i == 0):
                text = "\n" + text
            content = text.encode()
            try:
                ids = tokenizer.encode_array(text)
            except TokenizerError as error:  # of a tokenizer that was not made for this text
                raise UserError(f"{part.path}: {error}") from None
            if begins and marks:
                ids = np.concatenate((marks, ids))
            file.write(ids.astype(dtype).tobytes())
            digest.update(content)
            tokens += len(ids)
            size += len(content)
    facts = {"tokens": tokens, "bytes": size, "sha256": digest.hexdigest()}
    with atomic_write(path.with_suffix(".json")) as file:
        file.write(json.dumps(facts).encode())
    return facts


def parallel_map(work, jobs, workers):
    """Yields work(*job) for all jobs as they get done, by several processes if there are several jobs."""
    if min(len(jobs), workers) <= 1:
        yield from (work(*job) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # what has threads cannot fork
    with ProcessPoolExecutor(min(len(jobs), workers), spawn, start_worker, (work,)) as pool:
        try:
            on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the workers, which finish their parts
            futures = [pool.submit(do_job, *job) for job in jobs]
            signal.signal(signal.SIGINT, on_interrupt)
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            cure = "the same command goes on from here, with fewer --workers in less memory"
            raise UserError(f"a process has been ended, perhaps for want of memory: {cure}") from None
        finally:
            pool.shutdown(cancel_futures=True)


worker = {}  # of this process: its work


def start_worker(work):
    """Keeps `work` for `do_job`: it may hold a large tokenizer, which then is sent to a process once."""
    worker["work"] = work
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel enough


def do_job(*job):
    return worker["work"](*job)


def end_with_parent():
    """Ends this process, another's worker, when that one ends, however it does."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


# -- all of it -----------------------------------------------------------------------------------------------


@file_errors()
def prepare_corpus(folder, parts, source, tokenizer="char", vocab_size=None, val_fraction=0.1, workers=None):
    """What `prepare` does, to a text that comes as a list of Parts: the last `val_fraction` of the tokens validate.

    Bad input is a UserError. An interrupted run leaves `folder`/parts, and the same call goes on from there.
    """
    check_fraction(val_fraction)
    workers = workers or os.cpu_count()

    def all_characters():
        found, documents = zip(*parallel_map(alphabet, [(part,) for part in parts], workers))
        characters = set().union(*found)
        check_worth(characters, source)
        return "".join(characters | set("\n" if sum(documents) > 1 else ""))

    def sample():
        text = sample_of(parts)
        check_worth(text, source)
        return text[: int(len(text) * (1 - val_fraction))]

    if not parts:
        check_worth("", source)
    coder = make_tokenizer(tokenizer, vocab_size, all_characters, sample)
    kept = Path(folder) / "parts"
    kept.mkdir(parents=True, exist_ok=True)
    with open(kept / "lock", "w") as file:
        if not file_lock(file):
            raise UserError(f"{folder}: another prepare.py is at work there: wait for it")
        try:
            clear_leftovers(kept)
            facts = tokenize_all(parts, coder, kept, workers)
            total = sum(fact["tokens"] for _, fact in facts)
            cut = int(total * (1 - val_fraction))
            check_lengths({"train": cut, "val": total - cut}, source, val_fraction)
            sizes = dict(zip(SPLITS, bytes_around(facts, cut, coder)))
            tokens = {"train": tokens_between(facts, 0, cut, coder), "val": tokens_between(facts, cut, total, coder)}
            digest = sha256("".join(fact["sha256"] for _, fact in facts).encode())
            write_dataset(folder, coder, tokens, sizes, source, digest)
        except BaseException:
            if len(parts) == 1 or not any(kept.glob("*.json")):  # nothing to go on from
                shutil.rmtree(kept)
            raise
    shutil.rmtree(kept)


def sample_of(parts):
    """SAMPLE characters of text from all over the parts, in their order; all of it if it is not longer."""
    share, texts, left = max(2**16, SAMPLE // len(parts)), {}, SAMPLE
    for i in np.random.default_rng(0).permutation(len(parts)).tolist():
        share, text = min(share, left), ""
        for begins, piece in parts[i].pieces():
            text += "\n" * (begins and i + len(text) > 0) + piece
            if len(text) >= share:
                break
        texts[i] = text[:share]
        left -= len(texts[i])
        if not left:
            break
    return "".join(texts[i] for i in sorted(texts))


def tokenize_all(parts, tokenizer, kept, workers):
    """Tokenizes the parts that are not among the `kept`; [(path, facts)] of all, in their order."""
    state = sha256(json.dumps(tokenizer.state()).encode())
    paths = []
    for i, part in enumerate(parts):
        identity = json.dumps([asdict(part), part.version(), state, i == 0])
        paths.append(kept / sha256(identity.encode())[:32])
    there = {path for path in paths if path.with_suffix(".json").exists()}
    if there:
        print0(f"{len(there)} of {len(set(paths))} parts are there already")
    jobs = {path: (part, i == 0, path) for i, (part, path) in enumerate(zip(parts, paths)) if path not in there}
    began, size = time.time(), 0
    for count, fact in enumerate(parallel_map(partial(tokenize, tokenizer), list(jobs.values()), workers), 1):
        size += fact["bytes"]
        show_progress(count, len(jobs), size / 1e6, time.time() - began)
    return [(path, json.loads(path.with_suffix(".json").read_bytes())) for path in paths]


def show_progress(count, total, megabytes, seconds):
    """A line that changes on a terminal, elsewhere ten lines; nothing for a text of one part."""
    terminal = sys.stdout.isatty()
    if total > 1 and (terminal or count * 10 // total > (count - 1) * 10 // total):
        left = seconds / count * (total - count)
        line = f"{count}/{total} parts, {megabytes:,.0f} MB, {megabytes / seconds:.1f} MB/s, {left:,.0f} s left"
        with suppress(OSError):  # a closed terminal
            print(f"\r\x1b[K{line}" if terminal else line, end="" if terminal and count < total else "\n", flush=True)


def tokens_between(facts, start, stop, tokenizer):
    """Yields the tokens from `start` to `stop` of all parts joined, as arrays."""
    for path, fact in facts:
        low, high = max(start, 0), min(stop, fact["tokens"])
        if low < high:
            yield np.memmap(path.with_suffix(".bin"), token_dtype(tokenizer), "r")[low:high]
        start, stop = start - fact["tokens"], stop - fact["tokens"]


def bytes_around(facts, cut, tokenizer):
    """How many bytes of text are before and after the token `cut`; of Hugging Face's tokenizers about as many."""
    before, total = 0, max(2, sum(fact["bytes"] for _, fact in facts))
    for path, fact in facts:
        if cut < fact["tokens"]:
            for ids in tokens_between([(path, fact)], 0, cut, tokenizer):
                text = tokenizer.decode_bytes(ids[~np.isin(ids, tokenizer.document_start)])
                before += min(len(text), fact["bytes"])
            break
        before += fact["bytes"]
        cut -= fact["tokens"]
    before = min(max(before, 1), total - 1)
    return before, total - before
