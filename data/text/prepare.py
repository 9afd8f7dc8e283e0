"""Your own text: python data/text/prepare.py my.txt [more.txt | folder ...] [--tokenizer=bpe]

Takes UTF-8 files, and of a folder all .txt and .md files below it, one after another; then train with
--dataset=text. Characters are the default since they work on a text of any size and need no vocabulary size chosen.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run from any folder
from config import ArgumentParser, user_errors
from data import prepare, read_text


def text_files(path):
    """`path` itself, or all texts below it if it is a folder."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (".txt", ".md") and file.is_file())
    if not files:
        raise ValueError(f"{path}: no .txt or .md files below this folder")
    return files


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="*", type=Path, metavar="text")
    parser.add_argument("--tokenizer", choices=["char", "bpe", "gpt2"], default="char")
    parser.add_argument("--vocab_size", type=int, help="tokens to learn for bpe (default: 1024)")
    parser.add_argument("--val_fraction", type=float, default=0.1, help="share kept for validation (default: 0.1)")
    options = parser.parse_args()
    with user_errors():
        if not options.paths:
            raise ValueError("give the files or folders to prepare: python data/text/prepare.py my.txt")
        files = [file for path in options.paths for file in text_files(path)]
        text = "\n".join(read_text(file) for file in files)
        source = files[0].name.encode(errors="replace").decode() + (f" and {len(files) - 1} more" if len(files) > 1 else "")
        folder = Path(__file__).resolve().parent
        prepare(folder, text, source, options.tokenizer, options.vocab_size, options.val_fraction)
