"""A stream of text -> tokens, by all cores, in the order of the text. Little of it is in memory at a time."""

import multiprocessing
import os
import signal
import threading
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np

from config.runtime.common import UserError


def token_dtype(tokenizer):
    return np.dtype("uint16" if tokenizer.vocab_size < 65_536 else "uint32")


def encode(tokenizer, pieces):
    """Return the tokens of some pieces and the size of their text in bytes. A document begins with its own token."""
    arrays, size = [], 0
    for begins, text in pieces:
        if begins:
            arrays.append(np.array(tokenizer.document_start, np.uint32))
        arrays.append(tokenizer.encode_array(text))
        size += len(text.encode())
    return np.concatenate(arrays).astype(token_dtype(tokenizer)), size


def encode_all(tokenizer, chunks, workers):
    """Yield (split, tokens, bytes of text) of each chunk, in their order, encoded by several processes."""
    if workers <= 1:
        yield from ((split, *encode(tokenizer, pieces)) for split, pieces in chunks)
        return
    spawn = multiprocessing.get_context("spawn")  # what has threads cannot fork
    pool = ProcessPoolExecutor(workers, spawn, start_worker, (tokenizer,))
    try:
        unix = hasattr(signal, "pthread_sigmask")
        if unix:  # the processes that start here never see a Ctrl-C: this one ends them
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        for _ in range(workers):
            pool.submit(int)
        if unix:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        ahead = deque()
        for split, pieces in chunks:
            ahead.append((split, pool.submit(encode_in_worker, pieces)))
            if len(ahead) > 2 * workers:  # what is in memory at a time
                first, future = ahead.popleft()
                yield first, *future.result()
        for split, future in ahead:
            yield split, *future.result()
    except BrokenProcessPool:
        raise UserError("a process has been ended, perhaps for want of memory: fewer --workers take less") from None
    finally:
        pool.shutdown(cancel_futures=True)


worker = {}  # of this process: its tokenizer


def start_worker(tokenizer):
    """Keep the tokenizer, which may be large and is sent to a process once."""
    worker["tokenizer"] = tokenizer
    end_with_parent()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are parallel enough


def encode_in_worker(pieces):
    return encode(worker["tokenizer"], pieces)


def end_with_parent():
    """End this process, another's worker, when that one ends, however it does."""
    parent = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
