"""Your own texts: python data/text/prepare.py my.txt [more.jsonl | folder ...] [--tokenizer=bpe]

Takes plain text (UTF-8) and .jsonl (of whose lines --field is the text), of any size, and of a folder all texts below
it, one after another; with `pip install datasets` also .jsonl.gz, .parquet, .csv and their like, of which --field is
the column. Then train with --dataset=text. Characters are the default since they need no vocabulary size chosen. What
is interrupted goes on when the same command is given again.

--tokenizer=run:FOLDER prepares a text in the tokens of the run in that folder, which then scores the validation part:
python train.py --eval_only --init_from=resume --out_dir=FOLDER --dataset=text. --val_fraction=0.9 makes that most of it.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from data.console import UserError
from config.runtime.common import ArgumentParser, install_excepthook
from data.corpus import parts_of_file, prepare_corpus, text_files

if __name__ == "__main__":
    install_excepthook()
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", metavar="text")
    parser.add_argument("--tokenizer", default="char", help="char, bpe, gpt2, hf:NAME or run:FOLDER (default: char)")
    parser.add_argument("--vocab_size", type=int, help="tokens to learn for bpe (default: 1024)")
    parser.add_argument("--field", default="text", help="field or column with the text (default: text)")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="share kept for validation (default: 0.1)")
    parser.add_argument("--workers", type=int, help="processes at work (default: one for each core)")
    options = parser.parse_args()
    if not options.paths or "" in options.paths:
        raise UserError("give the files or folders to prepare: python data/text/prepare.py my.txt")
    files = [file for path in options.paths for file in text_files(path)]
    parts = [part for file in files for part in parts_of_file(file, options.field)]
    source = files[0].name.encode(errors="replace").decode() + (f" and {len(files) - 1} more" if len(files) > 1 else "")
    folder, how = Path(__file__).resolve().parent, (options.tokenizer, options.vocab_size, options.val_fraction)
    prepare_corpus(folder, parts, source, *how, options.workers)
