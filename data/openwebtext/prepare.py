"""OpenWebText in GPT-2's tokens: python data/openwebtext/prepare.py [--limit=1]

Eight million web pages: 54 GB in ~/.cache/huggingface. --limit=1 streams the first gigabyte of text, and holds it in
memory. --dataset=NAME, or NAME:CONFIGURATION, takes another one of the Hugging Face hub, or a .csv, .jsonl, .parquet or
compressed file (of a .txt, each line is a document). The package `datasets` reads them (pip install datasets).
"""

name = "openwebtext"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
dataset = "Skylion007/openwebtext"  # name on the hub, or file
limit = 0.0  # gigabytes of text; 0: all of it
field = "text"  # column with the text
tokenizer = "gpt2"  # char, bpe, gpt2 or run:FOLDER
vocab_size = 1024  # number of bpe tokens to learn
val_fraction = 0.0005  # share of the documents kept for validation

import sys
from glob import escape
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import UserError, configure
from data.prepare import dataset_folder, prepare

globals().update(configure(__file__).values)
folder, file = dataset_folder(name, __file__), Path(dataset).absolute()
if name == "openwebtext" and dataset != "Skylion007/openwebtext":
    raise UserError(f"dataset = {dataset!r}: choose a --name for it, since data/openwebtext is for OpenWebText")
revision = "79d93d786212f7344586290adb811d4ae6a1762c" if dataset == "Skylion007/openwebtext" else None  # pinned
where = dict(zip(("path", "name"), dataset.split(":")), revision=revision)
if file.is_file():
    where = {"path": str(file.parent), "data_files": escape(str(file))}
    if {".csv", ".tsv"} & {*file.suffixes}:
        where |= {"keep_default_na": False, "na_values": [""]}  # NA, null and the like are words
try:
    from datasets import Dataset, load_dataset

    rows = load_dataset(**where, split="train", streaming=bool(limit))
    if limit:
        texts, size, parts = [], 0, rows.iter(64)  # row by row takes ten times as long
        while size < limit * 10**9 and (part := next(parts, None)):
            texts += part[field]
            size += sum(len((text or "").encode()) for text in part[field])
        rows = Dataset.from_dict({field: texts})
    halves = rows.train_test_split(val_fraction, seed=2357)  # nanoGPT's seed
    train, val = halves["train"][field], halves["test"][field]
except ImportError as error:
    raise UserError(f"{error}: pip install {error.name}") from None
except Exception as error:  # the hub and the formats raise many types
    raise UserError(f"{dataset}: {error.__cause__ or error!r}") from error
prepare(folder, train, val, f"{limit} GB of {dataset}" if limit else dataset, tokenizer, vocab_size)
