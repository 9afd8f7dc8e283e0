"""Your own texts: python data/text/prepare.py my.txt [more.jsonl.gz | folder ...] [--tokenizer=bpe]

Takes plain text (UTF-8), .jsonl and .jsonl.gz (of whose lines --field is the text) and .parquet (of which it is the
column), of any size, and of a folder all .txt, .md, .jsonl, .jsonl.gz and .parquet files below it, one after another;
then train with --dataset=text. Characters are the default since they need no vocabulary size chosen. What is
interrupted goes on when the same command is given again.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import ArgumentParser, user_errors
from data.corpus import parts_of_file, prepare_corpus


def text_files(path):
    """`path` itself, or all texts below it if it is a folder."""
    if not path.is_dir():
        return [path]
    suffixes = (".txt", ".md", ".jsonl", ".jsonl.gz", ".parquet")
    files = sorted(file for file in path.rglob("*") if file.name.lower().endswith(suffixes) and file.is_file())
    if not files:
        raise ValueError(f"{path}: no {', '.join(suffixes)} files below this folder")
    return files


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="text")
    parser.add_argument("--tokenizer", default="char", help="char, bpe, gpt2 or hf:NAME (default: char)")
    parser.add_argument("--vocab_size", type=int, help="tokens to learn for bpe (default: 1024)")
    parser.add_argument("--field", default="text", help="field or column with the text (default: text)")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="share kept for validation (default: 0.1)")
    parser.add_argument("--workers", type=int, help="processes at work (default: one for each core)")
    options = parser.parse_args()
    with user_errors():
        if not options.paths:
            raise ValueError("give the files or folders to prepare: python data/text/prepare.py my.txt")
        files = [file for path in options.paths for file in text_files(path)]
        parts = [part for file in files for part in parts_of_file(file, options.field)]
        source = files[0].name.encode(errors="replace").decode() + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        folder, how = Path(__file__).resolve().parent, (options.tokenizer, options.vocab_size, options.val_fraction)
        prepare_corpus(folder, parts, source, *how, options.workers)
