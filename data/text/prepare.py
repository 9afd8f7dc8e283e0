"""Your own texts: python data/text/prepare.py my.txt [more.jsonl | folder ...] [--name=plays] [--tokenizer=bpe]

Takes plain text (UTF-8) and .jsonl (--field of each line is a text), of any size, and all texts below a folder, one
after another. With `pip install datasets` it takes .jsonl.gz, .parquet, .csv and the like too (--field is the column).
Then train with --dataset=plays. Without a name it is --dataset=text.

A run scores the validation part of a text in its own tokens, --tokenizer=run:FOLDER. Byte pairs write any text;
characters fail at the first one that the run does not know. --val_fraction=0.9 makes the validation part most of it:

    python data/text/prepare.py other.txt --name=other --tokenizer=run:FOLDER --val_fraction=0.9
    python train.py --eval_only --init_from=resume --out_dir=FOLDER --dataset=other
"""

import re
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import read_settings
from config.runtime.common import UserError, install_excepthook, print0
from data.corpus import read_files, text_files
from data.prepare import prepare

# -----------------------------------------------------------------------------
name = "text"  # folder in data/ to write to, for train.py's --dataset
field = "text"  # field of a .jsonl or column of a table with the text
tokenizer = "char"  # char (which needs no vocabulary size chosen), bpe, gpt2, hf:NAME or run:FOLDER
vocab_size = 0  # of bpe: tokens to learn; 0: 1024
val_fraction = 0.1  # share of the text kept for validation: its end
workers = 0  # processes that encode; 0: one for each core
# -----------------------------------------------------------------------------

if __name__ == "__main__":
    install_excepthook()
    paths = [argument for argument in sys.argv[1:] if not argument.startswith("-")]  # the others are settings
    globals().update(read_settings(__file__, [argument for argument in sys.argv[1:] if argument.startswith("-")]))
    folder = Path(__file__).resolve().parents[1] / name
    if not paths or "" in paths:
        raise UserError("give the files or folders to prepare: python data/text/prepare.py my.txt")
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise UserError(f"name = {name!r} does not work: it must be of letters, digits, '_', '-' and '.'")
    if name != "text" and (folder / "prepare.py").exists():
        raise UserError(f"name = {name!r} does not work: data/{name} has a prepare.py of its own; choose another name")
    files = [file for path in paths for file in text_files(path)]
    source = files[0].name.encode(errors="replace").decode() + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    prepare(folder, partial(read_files, files, field), source, tokenizer, vocab_size, val_fraction, workers)
    print0(f"to train on it: python train.py --dataset={name}")
