"""Your own texts: python data/text/prepare.py my.txt [more.jsonl | folder ...] [--name=plays] [--tokenizer=bpe]

Takes plain text in UTF-8, .jsonl (a document on each line, in --field), and all .txt, .md and .jsonl files below a
folder, one after another. Then train with --dataset=plays. Without a name it is --dataset=text.
For tables, compressed files and texts too large for memory, see data/openwebtext/prepare.py --help.

Byte-pair tokenizers encode any text. A character tokenizer fails at the first character it does not know.
"""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import read_settings
from config.runtime.errors import UserError
from config.runtime.processes import command, install_excepthook, print0
from data.prepare import DATA, dataset_folder, prepare, read_documents, text_files

# -----------------------------------------------------------------------------
name = "text"  # for train.py's --dataset: a folder in data/ or, with a slash, the path of any folder
field = "text"  # field of a .jsonl file with the text
separator = ""  # text that separates the documents of a plain file, such as <|endoftext|>
tokenizer = "char"  # char, bpe, gpt2, hf:NAME or run:FOLDER
vocab_size = 0  # number of bpe tokens to learn; 0: 1024
val_fraction = 0.1  # share of the text kept for validation: its end
# -----------------------------------------------------------------------------

if __name__ == "__main__":
    install_excepthook()
    paths = [argument for argument in sys.argv[1:] if not argument.startswith("-")]  # the others are settings
    globals().update(read_settings(__file__, [argument for argument in sys.argv[1:] if argument.startswith("-")]))
    folder = dataset_folder(name)
    if not paths:
        raise UserError("give the files or folders to prepare: python data/text/prepare.py my.txt")
    if folder.parent == DATA and not re.fullmatch(r"\w[\w.-]{0,99}", name):
        raise UserError(f"name = {name!r:.99} is invalid: use up to 100 letters, digits, '_', '-' and '.'")
    if name != "text" and (folder / "prepare.py").exists():
        raise UserError(f"name = {name!r} is invalid: {folder} has its own prepare.py; choose another name")
    files = [file for path in paths for file in text_files(path)]
    source = files[0].name + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    documents = [document for file in files for document in read_documents(file, field, separator)]
    prepare(folder, documents, source, tokenizer, vocab_size, val_fraction)
    print0(f"to train on it: {command('train.py', f'--dataset={name}')}")
