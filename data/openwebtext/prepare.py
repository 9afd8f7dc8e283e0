"""OpenWebText in GPT-2's tokens: python data/openwebtext/prepare.py [--limit=1] [--tokenizer=bpe]

Eight million web pages, read by the package `datasets` (pip install datasets). The full set is a 13 GB download
and 40 GB of text, which together take about 54 GB in ~/.cache/huggingface. --limit=1 streams the first gigabyte of
text and nothing more. It is then held in memory.

--dataset takes any other dataset that has a train split with a column of texts: NAME or NAME:CONFIGURATION on the
Hugging Face hub, such as Salesforce/wikitext:wikitext-103-raw-v1, or a folder of .parquet, .csv, .jsonl.gz ... files.
--name=wikitext keeps it apart from OpenWebText.
"""

import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import start_program
from config.runtime.program import UserError, import_optional, one_line
from data.prepare import new_folder, prepare

# -----------------------------------------------------------------------------
name = "openwebtext"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
dataset = "Skylion007/openwebtext"  # name on the hub, or folder
limit = 0.0  # gigabytes of text; 0: all of it
field = "text"  # column with the text
tokenizer = "gpt2"  # char, bpe, gpt2 or run:FOLDER
vocab_size = 0  # number of bpe tokens to learn; 0: 1024
val_fraction = 0.0005  # share of the text kept for validation
# -----------------------------------------------------------------------------

REVISIONS = {"Skylion007/openwebtext": "79d93d786212f7344586290adb811d4ae6a1762c"}  # the same text for everyone


def read_texts():
    """Return the texts of the dataset. They stay on disk, in the cache of `datasets`; with a limit, in memory."""
    datasets = import_optional("datasets")
    path, _, configuration = (dataset, "", "") if Path(dataset).exists() else dataset.partition(":")
    try:
        rows = datasets.load_dataset(
            path, configuration or None, split="train", revision=REVISIONS.get(path), streaming=bool(limit)
        )
        if not limit:
            return rows[field]
        texts, size = [], 0
        for text in chain.from_iterable(part[field] for part in rows.iter(64)):  # row by row it takes ten times as long
            texts.append(text or "")
            size += len(texts[-1].encode())
            if size >= limit * 10**9:
                break
        return texts
    except Exception as error:  # the hub and the file formats raise many types
        raise UserError(f"{dataset}: field {field!r} cannot be read: {one_line(error):.200}") from None


if __name__ == "__main__":
    _, given = start_program(__file__)
    globals().update(given)
    folder = new_folder(name, __file__)
    source = f"{limit} GB of {dataset}" if limit else dataset
    prepare(folder, read_texts(), source, tokenizer, vocab_size, val_fraction)
