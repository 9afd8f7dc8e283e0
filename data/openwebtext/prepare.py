"""OpenWebText in GPT-2's tokens: python data/openwebtext/prepare.py [--limit=1] [--tokenizer=bpe]

Eight million web pages, read by the package `datasets` (pip install datasets). The full set is a 13 GB download
and 40 GB of text, which together take about 54 GB in ~/.cache/huggingface. --limit=1 streams the first gigabyte of
text and nothing more. It is then held in memory.

--dataset takes any other dataset that has a train split with a column of texts: NAME or NAME:CONFIGURATION on the
Hugging Face hub, such as Salesforce/wikitext:wikitext-103-raw-v1, or a folder of .parquet, .csv, .jsonl.gz ... files
that are too large for memory (else see data/text/prepare.py). --name=wikitext keeps it apart from OpenWebText.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import start_program
from data.prepare import new_folder, prepare
from data.texts import read_dataset

# -----------------------------------------------------------------------------
name = "openwebtext"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
dataset = "Skylion007/openwebtext"  # name on the hub, or folder
limit = 0.0  # gigabytes of text; 0: all of it
field = "text"  # column with the text
tokenizer = "gpt2"  # char, bpe, gpt2 or run:FOLDER
vocab_size = 0  # number of bpe tokens to learn; 0: 1024
val_fraction = 0.0005  # share of the text kept for validation
# -----------------------------------------------------------------------------

if __name__ == "__main__":
    _, given = start_program(__file__)
    globals().update(given)
    folder = new_folder(name, __file__)
    documents = read_dataset(dataset, field, limit)
    source = f"{limit} GB of {dataset}" if limit else dataset
    prepare(folder, documents, source, tokenizer, vocab_size, val_fraction)
