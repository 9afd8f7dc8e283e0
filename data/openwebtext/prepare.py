"""OpenWebText in GPT-2's tokens: python data/openwebtext/prepare.py [--limit=1] [--tokenizer=bpe]

Eight million web pages, read by the package `datasets` (pip install datasets). The full set is a 13 GB download
and 40 GB of text, which together take about 54 GB in ~/.cache/huggingface. --limit=1 streams the first gigabyte of
text and nothing more. It is then held in memory.

--dataset takes any other dataset with a column of texts. It is NAME or NAME:CONFIGURATION on the Hugging Face hub, such
as Salesforce/wikitext:wikitext-103-raw-v1; a table or a compressed file, such as a .csv, .parquet, .jsonl.gz or
.txt.zst; or a folder of such files, or one made by save_to_disk. If there are several splits, it reads "train".
--name=wikitext keeps it apart from OpenWebText.
"""

name = "openwebtext"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
dataset = "Skylion007/openwebtext"  # name on the hub, file or folder
limit = 0.0  # gigabytes of text; 0: all of it
field = "text"  # column with the text
tokenizer = "gpt2"  # char, bpe, gpt2 or run:FOLDER
vocab_size = 0  # number of bpe tokens to learn; 0: 1024
val_fraction = 0.0005  # share of the text kept for validation

import glob
import sys
from itertools import chain
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import check_range, configure
from config.runtime.program import UserError, import_optional, one_line
from data.prepare import new_folder, prepare

REVISIONS = {"Skylion007/openwebtext": "79d93d786212f7344586290adb811d4ae6a1762c"}  # the same text for everyone


def open_dataset(datasets):
    """Return the rows of the train split. In a dataset made from text files, each file is a row."""
    if any(Path(dataset, name).exists() for name in ("state.json", "dataset_dict.json")):  # made by save_to_disk
        saved = datasets.load_from_disk(dataset)
        return saved["train"] if isinstance(saved, dict) else saved
    file = Path(dataset).absolute()
    escaped = glob.escape(file.as_posix())  # or else "[1]" in a name would stand for "1"
    if file.is_file():
        where = {"path": str(file.parent), "data_files": escaped}
    elif file.exists():
        where = {"path": str(file)}
        if escaped != file.as_posix():
            patterns = datasets.data_files.get_data_patterns(escaped)
            where["data_files"] = {split: [f"{escaped}/{end}" for end in patterns[split]] for split in patterns}
    else:
        path, _, configuration = dataset.partition(":")
        where = {"path": path, "name": configuration or None, "revision": REVISIONS.get(path)}
    builder = datasets.load_dataset_builder(**where)
    if builder.name == "text":
        where["sample_by"] = "document"  # by default, each line is a row
    if builder.name == "csv" and field in text_fields(datasets, builder.as_streaming_dataset("train"), empty=False):
        where |= {"usecols": [field], "keep_default_na": False}  # by default, null, NA and the like are no texts
    return datasets.load_dataset(**where, split="train", streaming=bool(limit))


def text_fields(datasets, rows, empty=True):
    """Return the columns that hold texts, as far as is known: one that begins with many `empty` rows may."""
    kinds = ["string", "large_string", "string_view"] + ["null"] * empty
    features = rows.features or datasets.Dataset.from_dict(next(rows.iter(64), {})).features
    return [name for name, kind in features.items() if getattr(kind, "dtype", "") in kinds]


def read_texts():
    """Return the texts of the dataset. They stay on disk, in the cache of `datasets`; with a limit, in memory."""
    datasets = import_optional("datasets")
    try:
        rows = open_dataset(datasets)
        choices = text_fields(datasets, rows)
        if field not in choices:
            raise UserError(f"{dataset}: no text in field {field!r}; fields with text: {', '.join(choices) or 'none'}")
        if not limit:
            return rows[field]
        texts, size = [], 0
        parts = (part[field] for part in rows.iter(64))  # row by row it takes ten times as long
        for text in filter(None, chain.from_iterable(parts)):
            texts.append(text)
            size += len(text.encode())
            if size >= limit * 10**9:
                break
        return texts
    except UserError:
        raise
    except Exception as error:  # the hub and the file formats raise many types
        reason = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else error
        raise UserError(f"{dataset}: cannot be read: {type(reason).__name__}: {one_line(reason):.200}") from None


if __name__ == "__main__":
    configure(globals())
    check_range(globals(), "limit", 0)
    if not dataset:  # as a path, it would be the current folder
        raise UserError("dataset = '' is invalid: it must be a dataset on the hub, a file or a folder")
    if name == "openwebtext" and dataset not in REVISIONS:
        raise UserError(f"dataset = {dataset!r}: choose a --name for it, since data/openwebtext is for OpenWebText")
    folder = new_folder(name, __file__)
    source = f"{limit} GB of {dataset}" if limit else dataset
    prepare(folder, read_texts(), source, tokenizer, vocab_size, val_fraction)
