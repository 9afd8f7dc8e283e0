"""Data: text -> tokens on disk -> batches.

    tokenizer.py     characters, byte pairs, Hugging Face's: text -> token ids and back
    dataset.py       a prepared folder -> batches and evaluation windows
    preprocess.py    a text -> a prepared folder
    corpus.py        the same for texts of any size, by all cores
    shakespeare.py   the text that runs out of the box
    huggingface.py   Llama models and their tokenizers, in and out
    files.py         files written whole or not at all, locks
    <name>/          prepare.py and, once that has run, train.bin, val.bin and meta.json
"""

from data.dataset import SPLITS, Dataset, derive_seed, load_dataset
from data.files import atomic_write, clear_leftovers, file_lock, read_text, sha256
from data.preprocess import ensure_prepared, prepare
from data.shakespeare import tiny_shakespeare
from data.tokenizer import BPETokenizer, CharTokenizer, HFTokenizer, first_tokens, tokenizer_from_state, train_bpe
