"""Your own texts: python data/text/prepare.py my.txt [more.jsonl | folder ...] [--name=plays] [--tokenizer=bpe]

Takes plain text in UTF-8 (- is standard input), .jsonl (a document on each line, in --field), and folders of .txt, .md
and .jsonl files. With --field, standard input is .jsonl, too. Then train with --dataset=plays; without a name, with
--dataset=text. Tables, compressed files, the Hugging Face hub and texts too large for memory:
data/openwebtext/prepare.py --help.

Byte-pair tokenizers encode any text. A character tokenizer fails at the first character it does not know.
"""

name = "text"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
field = ""  # field of a .jsonl file with the text; empty: text
separator = ""  # text that separates the documents of a plain file, such as <|endoftext|>
tokenizer = "char"  # char, bpe, gpt2 or run:FOLDER
vocab_size = 0  # number of bpe tokens to learn; 0: 1024
val_fraction = 0.1  # share of the text kept for validation: its end
val = ""  # file or folder to validate on, instead of that share

import json
import re
import sys
from glob import glob
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import configure
from config.runtime.program import UserError, command, print0, read_text
from data.prepare import new_folder, prepare

JSON_LINES = (".jsonl", ".ndjson", ".jsonlines", ".jl")
TEXTS = (".txt", ".md", *JSON_LINES)  # what is read from a folder
OTHERS = (".csv", ".tsv", ".json", ".parquet", ".arrow", ".gz", ".bz2", ".xz", ".zst", ".zip")  # not plain text


def text_files(path):
    """Return `path` itself ("-" is standard input) or the texts below a folder, by name, but not the hidden ones."""
    if not path:  # as a path, it would be the current folder
        raise UserError("'' is invalid: it must be a file or a folder")
    path = Path(path).expanduser()
    if not path.is_dir():
        if path.suffix.lower() in OTHERS:
            raise UserError(f"{path}: {other_program(path)}")
        return [path]
    below = sorted(path / name for name in glob("**", root_dir=path, recursive=True))  # also behind links
    files = [file for file in below if file.is_file()]
    texts = [file for file in files if file.suffix.lower() in TEXTS]
    others = [file for file in files if file.suffix.lower() not in TEXTS]
    if not texts:
        tables = any(file.suffix.lower() in OTHERS for file in others)
        cure = other_program(path) if tables else "other text files are read if named one by one"
        raise UserError(f"{path}: no .txt, .md or .jsonl files below this folder; {cure}")
    if others:
        print0(f"NOTE    {path}: left out {summary(others)}: a folder stands for its .txt, .md and .jsonl files")
    return texts


def summary(files):
    return files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def other_program(path):
    """Return a sentence with the command that prepares a table, a compressed file or a folder of them."""
    new = name if name != "text" else re.sub(r"\W", "_", path.absolute().name.partition(".")[0])
    options = {"dataset": path, "name": new, "field": field or "text", "tokenizer": tokenizer, "vocab_size": vocab_size}
    options["val_fraction"] = val_fraction
    program = command("data/openwebtext/prepare.py", *(f"--{option}={value}" for option, value in options.items()))
    return f"tables and compressed files are read by {program}"


def is_json_lines(path):
    no_file = not path.is_file()  # standard input (-) and pipes, which have no suffix
    return path.suffix.lower() in JSON_LINES or (bool(field) and no_file)


def read_documents(path):
    """Return the documents of a file: those of its lines of JSON, else its text, cut at each separator."""
    text = read_text(path)
    if is_json_lines(path):
        documents = [read_line(path, *line) for line in enumerate(text.split("\n"), 1)]
    elif separator:  # alone on its line, it takes the line's end with it
        if separator not in text:
            print0(f"NOTE    {path} is one document: it has no separator {separator!r}")
        mark = re.escape(separator)
        documents = re.split(rf"(?m:^{mark}\r?\n)|{mark}", text)
    else:
        documents = [text]
    return [document for document in documents if document]


def read_line(path, number, line):
    key = field or "text"
    try:
        document = json.loads(line)[key] if line.strip() else None
        return "" if document is None else document.encode(errors="replace").decode()  # JSON can hold a lone surrogate
    except (AttributeError, LookupError, TypeError, ValueError):
        raise UserError(f"{path}: line {number} is not JSON with a text in field {key!r}") from None


if __name__ == "__main__":
    options = [argument for argument in sys.argv[1:] if argument.startswith("-") and argument != "-"]
    paths = [argument for argument in sys.argv[1:] if argument not in options]
    configure(globals(), options)
    folder = new_folder(name, __file__)
    val_files = text_files(val) if val else []
    held_out = {file.resolve() for file in val_files}  # they may be in a folder that is trained on
    found = {file.resolve(): file for path in paths for file in text_files(path)}  # each once
    files = [file for real, file in found.items() if real not in held_out]
    if not files:
        raise UserError("nothing to train on: give files or folders, as in python data/text/prepare.py my.txt")
    json_lines = [is_json_lines(file) for file in files + val_files]
    if field and not any(json_lines):
        raise UserError(f"field = {field!r} has no effect: it needs a .jsonl file or standard input (-)")
    if separator and all(json_lines):
        raise UserError(f"separator = {separator!r} has no effect on .jsonl files: each of their lines is a document")
    source = summary(files) + (f", validated on {val}" if val else "")
    documents = [document for file in files for document in read_documents(file)]
    train_documents = len(documents) if val else None
    documents += [document for file in val_files for document in read_documents(file)]
    prepare(folder, documents, source, tokenizer, vocab_size, val_fraction, train_documents)
    print0(f"to train on it: {command('train.py', f'--dataset={name}')}")
