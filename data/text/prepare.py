"""Your own texts: python data/text/prepare.py my.txt [more.jsonl | folder ...] [--name=plays] [--tokenizer=bpe]

Takes plain text in UTF-8 (- is standard input), .jsonl (a document on each line), and folders of .txt, .md and .jsonl.
Then train with --dataset=plays; without a name, with --dataset=text. Tables and more: data/openwebtext/prepare.py.
"""

name = "text"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
tokenizer = "char"  # char, bpe, gpt2 or run:FOLDER; char knows this text's characters alone
vocab_size = 1024  # number of bpe tokens to learn
field = "text"  # field of a .jsonl file with the text
separator = ""  # text that separates the documents of a plain file, such as <|endoftext|>
val_fraction = 0.1  # share of the text kept for validation: its end
val = ""  # file or folder to validate on, instead of that share

import json
import sys
from glob import glob
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import UserError, configure, print0, read_text
from data.prepare import dataset_folder, prepare, split_end


def find_files(paths):
    """Return {real path: path} of files and of the texts in folders, each once, without hidden ones."""
    found = {}
    for path in map(Path, filter(None, paths)):  # "" would be the current folder
        files = sorted(file for file in map(path.joinpath, glob("**", root_dir=path, recursive=True)) if file.is_file())
        texts = [file for file in files if file.suffix.lower() in (".txt", ".md", ".jsonl")] if files else [path]
        if len(texts) < len(files):
            print0(f"NOTE    {path}: left out {len(files) - len(texts)} files that are not .txt, .md or .jsonl")
        found |= {file.resolve(): file for file in texts}
    return found


def read_documents(files):
    """Yield the documents of files: those in lines of JSON, or between separators, or one each."""
    for file in files.values():
        suffix, text = file.suffix.lower(), read_text(file)
        if suffix in (".csv", ".tsv", ".json", ".ndjson"):
            raise UserError(f"{file} is for data/openwebtext/prepare.py --dataset={file} --name={file.stem}")
        if suffix != ".jsonl":
            yield from (part.strip("\r\n") for part in text.split(separator)) if separator else [text]
            continue
        for number, line in enumerate(text.split("\n"), 1):
            try:
                document = json.loads(line)[field] if line.strip() else None
                yield "" if document is None else document.encode(errors="replace").decode()  # half a character is ?
            except (AttributeError, LookupError, TypeError, ValueError):
                raise UserError(f"{file}: line {number} is not JSON with a text in field {field!r}") from None


if __name__ == "__main__":
    paths = [word for word in sys.argv[1:] if word == "-" or not word.startswith("-")]
    globals().update(configure(__file__, [word for word in sys.argv[1:] if word not in paths]).values)
    folder = dataset_folder(name, __file__)
    held_out = find_files([val])
    files = {real: file for real, file in find_files(paths).items() if real not in held_out}
    if not files:
        raise UserError("nothing to train on: give files or folders, as in python data/text/prepare.py my.txt")
    train = list(read_documents(files))
    if separator and len(train) == len(files):
        raise UserError(f"separator = {separator!r} is not in the text")
    parts = (train, list(read_documents(held_out))) if val else split_end(train, val_fraction)
    prepare(folder, *parts, ", ".join(Path(path).absolute().name for path in paths), tokenizer, vocab_size)
    print0(f"to train on it: python train.py --dataset={name}")
