"""Large corpora: texts of any size -> train.bin and val.bin, by all cores, in little memory.

The texts are cut into parts of some megabytes before anything of them is read. Each part is tokenized by itself and
kept in a file of its own, so that an interrupted run goes on with the parts that are missing; then they are joined.
A text is cut where no token could have spanned the cut, so that its parts give the tokens that the whole would give:
after a line's end or before a space. (Where a megabyte has none it is cut between any two characters, and a tokenizer
that puts a space before every text, as Llama 2's does, puts one there too.)
"""

import gzip
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
import zlib
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np

from data import SPLITS, check_fraction, check_lengths, check_worth, clear_leftovers, is_count, lock, make_tokenizer
from data import replace_file, sha256, token_dtype, write_data

PART = 4 * 2**20  # bytes of text, about
SAMPLE = 16 * 2**20  # characters to learn byte pairs from, at most


# -- parts of texts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Part:
    """What lies between two places of a file: bytes, or row groups of parquet, or rows of a dataset."""

    kind: str  # text, jsonl, gzip (of jsonl), parquet, dataset
    path: str
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
        if self.kind == "dataset":
            return rows_of(self.path)._fingerprint
        stat = os.stat(self.path)
        return stat.st_size, stat.st_mtime_ns


def parts_of_file(path, field="text"):
    """The parts of a file; by its suffix it is .jsonl, .jsonl.gz, .parquet or else plain text."""
    name, size = str(path), os.stat(path).st_size
    if name.lower().endswith((".jsonl.gz", ".json.gz")):
        return [Part("gzip", name, 0, size, field)]
    if name.lower().endswith(".gz"):
        raise ValueError(f"{path}: of compressed files only .jsonl.gz can be read: gunzip it first")
    if name.lower().endswith(".parquet"):
        return [Part("parquet", name, i, i + 1, field) for i in range(parquet(name).num_row_groups)]
    kind = "jsonl" if name.lower().endswith(".jsonl") else "text"
    return [Part(kind, name, start, min(start + PART, size), field) for start in range(0, size, PART)]


def parts_of_dataset(name, field="text", rows=1000):
    """The parts of the train split of a Hugging Face dataset: a folder, or one of the hub by its name."""
    count = len(rows_of(name))
    return [Part("dataset", name, start, min(start + rows, count), field) for start in range(0, count, rows)]


def read_text(part):
    size = os.stat(part.path).st_size
    with open(part.path, "rb") as file:
        start, stop = (cut_near(file, place, size) for place in (part.start, part.stop))
        file.seek(start)
        content = file.read(stop - start)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{part.path}: not UTF-8 text at byte {start + error.start}") from None
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
            yield from field_of(line, part, f"line at byte {place}")


def read_gzip(part):
    try:
        with gzip.open(part.path, "rb") as file:
            for number, line in enumerate(file, 1):
                yield from field_of(line, part, f"line {number}")
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{part.path}: damaged: {error}") from None


def field_of(line, part, where):
    if not line.strip():
        return
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError(f"{part.path}: {where}: not JSON") from None
    row = row if isinstance(row, dict) else {}
    if not isinstance(row.get(part.field, 0), str | None):
        texts = [name for name, value in row.items() if isinstance(value, str)]
        raise no_text(f"{part.path}: {where}", f"field {part.field!r}", texts)
    yield True, row[part.field]


def no_text(where, field, texts):
    return ValueError(f"{where}: no text in {field}; --field may be: {', '.join(texts) or 'none'}")


def parquet(path):
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError:
        raise ValueError(f"{path}: parquet files need pyarrow: pip install pyarrow") from None
    try:
        return ParquetFile(path)
    except ArrowException as error:
        raise ValueError(f"{path}: not a parquet file: {str(error).splitlines()[0]}") from None


def read_parquet(part):
    file = parquet(part.path)
    types = ("string", "large_string", "dictionary<values=string")
    columns = [column.name for column in file.schema_arrow if str(column.type).startswith(types)]
    if part.field not in columns:
        raise no_text(part.path, f"column {part.field!r}", columns)
    batches = file.iter_batches(batch_size=256, row_groups=range(part.start, part.stop), columns=[part.field])
    try:
        for batch in batches:
            for value in batch.column(0):
                yield True, value.as_py()
    except (OSError, UnicodeDecodeError) as error:  # pyarrow's errors about content are OSErrors
        raise ValueError(f"{part.path}: damaged: {str(error).splitlines()[0]}") from None


@cache
def rows_of(name):
    try:
        from datasets import load_dataset
    except ImportError:
        raise ValueError(f"{name}: datasets of Hugging Face need datasets: pip install datasets") from None
    try:
        return load_dataset(name, split="train")
    except Exception as error:  # of the hub and of many formats, with types of their own
        reason = " ".join(str(error.__cause__ or error).split())[:200]
        raise ValueError(f"{name}: cannot be loaded: {reason}") from None


def read_rows(part):
    rows = rows_of(part.path)
    columns = [name for name, column in rows.features.items() if getattr(column, "dtype", "") in ("string", "large_string")]
    if part.field not in columns:
        raise no_text(part.path, f"column {part.field!r}", columns)
    for i in range(part.start, part.stop):
        yield True, rows[i][part.field]


READERS = {"text": read_text, "jsonl": read_jsonl, "gzip": read_gzip, "parquet": read_parquet, "dataset": read_rows}


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
    with replace_file(path.with_suffix(".bin")) as file:
        for i, (begins, text) in enumerate(part.pieces()):
            if begins and not marks and not (is_first and i == 0):
                text = "\n" + text
            content = text.encode()
            ids = tokenizer.encode_array(text)
            if begins and marks:
                ids = np.concatenate((marks, ids))
            file.write(ids.astype(dtype).tobytes())
            digest.update(content)
            tokens += len(ids)
            size += len(content)
    facts = {"tokens": tokens, "bytes": size, "sha256": digest.hexdigest()}
    with replace_file(path.with_suffix(".json")) as file:
        file.write(json.dumps(facts).encode())
    return facts


def end_with_parent():
    """Ends this process, another's worker, when that one ends, however it does."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def start_worker(work):
    """Keeps `work`, which may hold a large tokenizer, for `do`."""
    global task
    task = work
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel enough


def do(*job):
    return task(*job)


def each(work, jobs, workers):
    """Yields work(*job) for all jobs as they get done, by several processes if there are several jobs."""
    if min(len(jobs), workers) <= 1:
        yield from (work(*job) for job in jobs)
        return
    spawn = multiprocessing.get_context("spawn")  # what has threads cannot fork
    with ProcessPoolExecutor(min(len(jobs), workers), spawn, start_worker, (work,)) as pool:
        try:
            on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # for the workers, which finish their parts
            futures = [pool.submit(do, *job) for job in jobs]
            signal.signal(signal.SIGINT, on_interrupt)
            for future in as_completed(futures):
                yield future.result()
        except BrokenProcessPool:
            cure = "the same command goes on from here, with fewer --workers in less memory"
            raise ValueError(f"a process has been ended, perhaps for want of memory: {cure}") from None
        finally:
            pool.shutdown(cancel_futures=True)


# -- all of it -----------------------------------------------------------------------------------------------


def prepare_corpus(folder, parts, source, tokenizer="char", vocab_size=None, val_fraction=0.1, workers=None):
    """What `prepare` does, to a text that comes as a list of Parts: the last `val_fraction` of the tokens validate.

    Bad input is a ValueError. An interrupted run leaves `folder`/parts, and the same call goes on from there.
    """
    check_fraction(val_fraction)
    workers = os.cpu_count() if workers is None else workers
    if not is_count(workers, least=1):
        raise ValueError(f"workers={workers!r} is not a whole number from 1 up")

    def all_characters():
        found, documents = zip(*each(alphabet, [(part,) for part in parts], workers))
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
        if not lock(file):
            raise ValueError(f"{folder}: another prepare.py is at work there: wait for it")
        try:
            clear_leftovers(kept)
            facts = tokenize_all(parts, coder, kept, workers)
            total = sum(fact["tokens"] for _, fact in facts)
            cut = int(total * (1 - val_fraction))
            check_lengths({"train": cut, "val": total - cut}, source, val_fraction)
            sizes = dict(zip(SPLITS, cut_bytes(facts, cut, coder)))
            tokens = {"train": between(facts, 0, cut, coder), "val": between(facts, cut, total, coder)}
            digest = sha256("".join(fact["sha256"] for _, fact in facts).encode())
            write_data(folder, coder, tokens, sizes, source, "", digest)
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
        print(f"{len(there)} of {len(set(paths))} parts are there already")
    jobs = {path: (part, i == 0, path) for i, (part, path) in enumerate(zip(parts, paths)) if path not in there}
    began, size = time.time(), 0
    for count, fact in enumerate(each(partial(tokenize, tokenizer), list(jobs.values()), workers), 1):
        size += fact["bytes"]
        show_progress(count, len(jobs), size / 1e6, time.time() - began)
    return [(path, json.loads(path.with_suffix(".json").read_bytes())) for path in paths]


def show_progress(count, total, megabytes, seconds):
    """A bar on a terminal, elsewhere ten lines; nothing for a text of one part."""
    last = count == total
    if total == 1 or not sys.stdout.isatty() and count * 10 // total == (count - 1) * 10 // total:
        return
    bar = "=" * (count * 40 // total)
    left = seconds / count * (total - count)
    line = f"[{bar:40}] {count}/{total} parts, {megabytes:,.0f} MB, {megabytes / seconds:.1f} MB/s, {left:,.0f} s left"
    print(f"\r\x1b[K{line}" if sys.stdout.isatty() else line, end="\n" if last or not sys.stdout.isatty() else "", flush=True)


def between(facts, start, stop, tokenizer):
    """Yields the tokens from `start` to `stop` of all parts joined, as arrays."""
    for path, fact in facts:
        low, high = max(start, 0), min(stop, fact["tokens"])
        if low < high:
            yield from slices(path, tokenizer, low, high)
        start, stop = start - fact["tokens"], stop - fact["tokens"]


def slices(path, tokenizer, start, stop):
    """Yields the tokens from `start` to `stop` of a part, which may be large, as arrays."""
    ids = np.memmap(path.with_suffix(".bin"), token_dtype(tokenizer), "r")
    for first in range(start, stop, 2**20):
        yield ids[first : min(first + 2**20, stop)]


def cut_bytes(facts, cut, tokenizer):
    """How many bytes of text are before and after the token `cut`; of Hugging Face's tokenizers about as many."""
    before, total = 0, max(2, sum(fact["bytes"] for _, fact in facts))
    for path, fact in facts:
        if cut < fact["tokens"]:
            texts = (ids[~np.isin(ids, tokenizer.document_start)] for ids in slices(path, tokenizer, 0, cut))
            before += min(sum(len(tokenizer.decode_bytes(ids)) for ids in texts), fact["bytes"])
            break
        before += fact["bytes"]
        cut -= fact["tokens"]
    before = min(max(before, 1), total - 1)
    return before, total - before
